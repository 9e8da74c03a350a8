"""A message to a busy session waits, is refused, interrupts the session's turns, or is merged into a waiting turn."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

import pytest

from perdure import tool
from perdure.errors import Conflict
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Role
from perdure.turns import outbox
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.turns.lease.claim import Ran
from tests.turns.harness import PATIENCE_S, Harness
from tests.turns.scripted import calls, says
from tests.turns.test_cost import driven


@tool(effect="pure")
def double(number: int) -> int:
    """Double the number."""
    return number * 2


def _open_calls(harness: Harness, text: str = "first") -> UUID:
    """A session whose worker died between committing a turn's tool calls and committing their results."""
    harness.equip(double)
    harness.script(calls(("double", {"number": 4}), ("double", {"number": 5})))
    session_id = harness.send(text).session_id
    with harness.crashing("after", "turns.step"):
        harness.run(session_id)
    return session_id


def _begun(harness: Harness) -> UUID:
    """A session with a claimed turn that has committed nothing."""
    session_id = harness.send("first").session_id
    harness.claimed(session_id)
    return session_id


def _accepted(harness: Harness) -> UUID:
    return harness.send("first").session_id


def _idle(harness: Harness) -> UUID:
    session_id = harness.send("first").session_id
    harness.run(session_id)
    return session_id


SITUATIONS = {"idle": _idle, "accepted": _accepted, "begun": _begun, "open calls": _open_calls}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("on_busy", ["enqueue", "reject", "interrupt", "merge"])
def test_the_second_message_in_each_situation(harness: Harness, situation: str, on_busy: str) -> None:
    """In each state of the session, each `on_busy` value has its documented effect on the first and the second turn."""
    session_id = SITUATIONS[situation](harness)
    first = harness.sql("SELECT turn_id, status FROM turns")[0]
    if on_busy == "reject" and situation != "idle":
        before = harness.counts()
        with pytest.raises(Conflict, match="busy"):
            harness.send("second", on_busy=on_busy)
        assert harness.counts() == before
        return
    second = harness.send("second", on_busy=on_busy)
    merged = on_busy == "merge" and situation == "accepted"
    assert (second.turn_id == first.turn_id) is merged
    assert second.seq == (1 if merged else 2)
    expected = "cancelled" if on_busy == "interrupt" and situation != "idle" else first.status
    assert harness.turn(first.turn_id)["status"] == expected
    harness.move(31)
    harness.run(session_id)
    assert harness.turn(second.turn_id)["status"] == "done"
    assert harness.turn(first.turn_id)["status"] == ("cancelled" if expected == "cancelled" else "done")


def test_a_turn_that_has_begun_takes_no_message_in(harness: Harness) -> None:
    """With `merge`, a message to a begun turn begins the next one: the begun turn has read what it answers."""
    session_id = _begun(harness)
    second = harness.send("second", on_busy="merge")
    assert second.seq == 2
    harness.move(31)
    harness.run(session_id)
    assert harness.turn(second.turn_id)["status"] == "done"


def test_an_interrupted_turn_has_its_code_and_no_reply(harness: Harness) -> None:
    """An interruption cancels begun and waiting turns with the code `TURN_CANCELLED` and without a reply."""
    session_id = _open_calls(harness)
    waiting = harness.send("second")
    last = harness.send("third", on_busy="interrupt")
    for turn_id in (harness.sql("SELECT turn_id FROM turns WHERE seq = 1")[0].turn_id, waiting.turn_id):
        turn = harness.turn(turn_id)
        assert (turn["status"], turn["reply"], turn["error"]["code"]) == ("cancelled", None, "TURN_CANCELLED")
    harness.script(says("at your service"))
    harness.run(session_id)
    assert harness.turn(last.turn_id)["reply"]["text"] == "at your service"
    assert [each["content"] for each in harness.messages(session_id) if each["role"] == "tool"] == [UNKNOWN_OUTCOME] * 2
    assert ("user", "second") not in harness.lines(session_id)


def test_an_interrupted_runner_writes_nothing_more(harness: Harness) -> None:
    """If the interrupted runner's model call returns late, the stale token prevents the commit of the reply."""
    in_call, go_on = threading.Event(), threading.Event()

    def slow(request: ModelRequest, call: ModelCall) -> ModelReply:
        in_call.set()
        assert go_on.wait(PATIENCE_S)
        return says("too late")

    harness.script(slow, says("second reply"))
    first = harness.send("first")
    old = threading.Thread(target=harness.run, args=(first.session_id,), daemon=True)
    old.start()
    assert in_call.wait(PATIENCE_S)
    second = harness.send("second", on_busy="interrupt")
    assert harness.run(first.session_id) == Ran(1)
    go_on.set()
    old.join(PATIENCE_S)
    assert harness.lines(first.session_id) == [("user", "first"), ("user", "second"), ("assistant", "second reply")]
    assert harness.turn(first.turn_id)["status"] == "cancelled"
    assert harness.turn(second.turn_id)["status"] == "done"


def test_an_interrupted_tools_result_enters_no_transcript(harness: Harness) -> None:
    """If a tool returns after its turn was cancelled, the result is not added to the transcript."""
    in_tool, go_on = threading.Event(), threading.Event()

    @tool
    def slow() -> str:
        """Take a while."""
        in_tool.set()
        assert go_on.wait(PATIENCE_S)
        return "done at last"

    harness.equip(slow)
    harness.script(calls(("slow", {})), says("second reply"))
    first = harness.send("first")
    old = threading.Thread(target=harness.run, args=(first.session_id,), daemon=True)
    old.start()
    assert in_tool.wait(PATIENCE_S)
    harness.send("second", on_busy="interrupt")
    go_on.set()
    old.join(PATIENCE_S)
    harness.run(first.session_id)
    assert harness.turn(first.turn_id)["status"] == "cancelled"
    assert "done at last" not in str(harness.messages(first.session_id))
    assert harness.sql("SELECT status FROM tool_effects")[0].status == "unknown"


@pytest.mark.exhaustive
def test_a_merged_turn_is_no_longer_than_the_longest_message(harness: Harness) -> None:
    """A merged turn has at most `guard.max_chars` characters.

    Without this limit, the 250 messages of this test would become one turn of 622,000 tokens.
    """
    sent = [harness.send("x" * 10_000, on_busy="merge") for _ in range(250)]
    assert [each.seq for each in sent] == list(range(1, 251))
    assert len({each.turn_id for each in sent}) == 250
    longest = harness.sql("SELECT max(total) FROM (SELECT sum(length(text)) AS total FROM inbox GROUP BY turn_id) AS t")
    assert longest[0][0] == harness.settings.guard.max_chars


def test_short_messages_are_merged_up_to_the_limit(harness: Harness) -> None:
    """A message that would make the turn longer than `guard.max_chars` characters (not bytes) begins a new turn."""
    sent = [harness.send("ж" * 3_000, on_busy="merge") for _ in range(7)]
    assert [each.seq for each in sent] == [1, 1, 1, 2, 2, 2, 3]
    assert harness.send("ж" * 1_000, on_busy="merge").seq == 3
    assert harness.send("ж" * 6_001, on_busy="merge").seq == 4
    harness.run(sent[0].session_id)
    assert {harness.turn(each.turn_id)["status"] for each in sent} == {"done"}


def test_merged_messages_reach_the_model_in_order(harness: Harness) -> None:
    """Three merged messages become one turn. The model reads them as three user messages."""
    first = harness.send("one", message_id="1")
    merged = [harness.send(text, message_id=text, on_busy="merge") for text in ("two", "three")]
    assert {each.turn_id for each in merged} == {first.turn_id}
    assert [each.duplicate for each in merged] == [False, False]
    harness.run(first.session_id)
    texts = [each.content for each in harness.model.requests[0].messages if each.role is Role.USER]
    assert texts == ["one", "two", "three"]
    assert len(harness.model.requests) == 1
    rows = harness.sql("SELECT message_id, position, turn_id FROM inbox ORDER BY position")
    assert [(row.message_id, row.position) for row in rows] == [("1", 1), ("two", 2), ("three", 3)]


def test_a_repeated_merged_message_is_a_duplicate(harness: Harness) -> None:
    """A merged message keeps its own row and id. Sending the message again returns the same turn."""
    first = harness.send("one", message_id="1")
    harness.send("two", message_id="2", on_busy="merge")
    again = harness.send("two", message_id="2", on_busy="merge")
    assert (again.turn_id, again.duplicate) == (first.turn_id, True)
    with pytest.raises(Conflict):
        harness.send("else", message_id="2")
    assert harness.counts()["inbox"] == 2


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another channel": ({}, {"channel": "telegram"}),
    "another agent": ({}, {"agent": "other"}),
    "no agent, after another agent": ({"agent": "other"}, {}),
    "another receiver": ({}, {"reply_to": {"url": "https://a.example"}}),
    "no receiver": ({"reply_to": {"url": "https://a.example"}}, {}),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_message_that_differs_is_not_merged(harness: Harness, difference: str) -> None:
    """A turn has one channel, one agent and one receiver, so a message that differs in any of them is not merged."""
    given, other = DIFFERENT[difference]
    harness.equip()
    harness.ask("the session is the default agent's")
    first = harness.send("one", **given)
    second = harness.send("two", on_busy="merge", **other)
    assert (second.turn_id == first.turn_id, second.seq) == (False, 3)


def test_a_message_is_merged_into_a_turn_of_its_own_session(harness: Harness) -> None:
    """The newest waiting turn of all may be another user's, with the same channel, agent and receiver."""
    first = harness.send("one")
    for _ in range(2):
        harness.send("theirs", user_id="bob")
    with harness.affecting("ana"):
        assert harness.send("two", on_busy="merge").turn_id == first.turn_id


def test_no_message_is_merged_into_one_that_steers(harness: Harness) -> None:
    """A turn that steers gives its message to the running turn, and a merged message must not be left behind."""
    harness.claimed(harness.send("one").session_id)
    steering = harness.send("two", on_busy="steer")
    assert harness.send("three", on_busy="merge").turn_id != steering.turn_id


def test_matching_messages_are_merged(harness: Harness) -> None:
    """Messages with the same agent and receiver are merged. A message without an agent has the default agent."""
    receiver = {"url": "https://a.example"}
    first = harness.send("one", reply_to=receiver, priority=3)
    second = harness.send("two", on_busy="merge", agent="assistant", reply_to=receiver, priority=7)
    assert second.turn_id == first.turn_id
    assert harness.sql("SELECT priority FROM turns")[0].priority == 7, "the turn gets the higher priority"


def test_merging_goes_to_the_newest_turn_only(harness: Harness) -> None:
    """Merging a message into an older turn would change the order of the messages."""
    harness.equip()
    harness.send("one")
    harness.send("two", agent="other")
    third = harness.send("three", on_busy="merge")
    assert third.seq == 3


def test_the_setting_is_the_default(harness: Harness) -> None:
    """A message's own `on_busy` overrides `PERDURE_TURN__ON_BUSY`."""
    harness.set(on_busy="reject")
    harness.send("one")
    with pytest.raises(Conflict):
        harness.send("two")
    assert harness.send("three", on_busy="enqueue").seq == 2


def test_interrupted_turns_are_delivered_as_cancelled(harness: Harness) -> None:
    """An interrupted turn is delivered to its `reply_to`, so that the receiver does not wait for a reply."""
    receiver = {"url": "https://a.example"}
    first = harness.send("one", reply_to=receiver)
    harness.send("two", on_busy="interrupt")
    row = harness.sql("SELECT delivery_id, turn_id, status FROM deliveries")[0]
    assert (row.turn_id, row.status) == (first.turn_id, "pending")
    assert harness.waker.deliveries == [row.delivery_id]


def _interrupting(harness: Harness, user_id: str, queued: int) -> int:
    """Interrupt a session with `queued` waiting turns; returns the number of SQL statements."""
    receiver = {"url": "https://a.example"}
    session_id = harness.send("running", user_id, reply_to=receiver).session_id
    harness.claimed(session_id)
    for number in range(queued):
        harness.send(f"queued {number}", user_id, reply_to=receiver if number % 2 else None)
    with driven(harness.database) as statements:
        harness.send("now this", user_id, on_busy="interrupt")
    return sum(not each.startswith("PREPARE") for each in statements)


def test_an_interruptions_statements_do_not_grow_with_the_queue(harness: Harness) -> None:
    """Interrupting 60 queued turns takes as many statements as interrupting 4. At most ten deliveries are woken."""
    few, many = _interrupting(harness, "ana", 4), _interrupting(harness, "ben", 60)
    assert many == few
    owed = harness.sql(
        "SELECT turns.user_id, d.delivery_id FROM deliveries AS d JOIN turns USING (turn_id)"
        " WHERE turns.status = 'cancelled' AND d.status = 'pending' ORDER BY turns.user_id, seq"
    )
    assert [row.user_id for row in owed] == ["ana"] * 3 + ["ben"] * 31
    assert harness.waker.deliveries == [row.delivery_id for row in [*owed[:3], *owed[3:13]]]
    counts = harness.sql("SELECT status, count(*) FROM turns GROUP BY status ORDER BY status")
    assert [tuple(row) for row in counts] == [("accepted", 2), ("cancelled", 66)]
    ben = harness.sql("SELECT session_id, unsettled, state FROM sessions WHERE user_id = 'ben'")[0]
    assert (ben.unsettled, ben.state) == (1, "active")
    assert harness.run(ben.session_id) == Ran(1)
    assert set(outbox.due(harness.database, 100, 5.0)) == {row.delivery_id for row in owed}
