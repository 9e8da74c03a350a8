"""A message with `on_busy="steer"` joins the turn that runs between two steps, or becomes a turn of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest

from perdure import GuardRejected, TurnStarted, required, tool
from perdure.access.tenants import UserKey
from perdure.application.sending import send as send_unrouted
from perdure.database.engine import Moment, Statement
from perdure.errors import Unavailable
from perdure.models.protocol import Message, ModelReply, Role
from perdure.tools.registry import ToolContext
from perdure.turns import queries as turns_queries
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.cancel import cancel
from perdure.turns.committed import read_committed, states_of
from perdure.turns.inbox.route_unrouted import route_user
from perdure.turns.outcome import CANCELLED
from tests.turns.awaiting import end_task, export
from tests.turns.broker import Broker
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.scripted import calls, says, spoken, system_text

ROUND = (calls(("act", {})), says("done"))


class Steering:
    """A turn whose tool `act` calls `during`, which sends messages that steer the turn."""

    def __init__(self, harness: Harness, **limits: Any) -> None:
        self.harness = harness
        self.during: list[Callable[[], object]] = []
        self.ran = 0

        @tool(effect="idempotent")
        def act(context: ToolContext) -> str:
            """Act."""
            self.ran += 1
            self.metadata = dict(context.metadata)
            for each in self.during:
                each()
            return "acted"

        harness.equip(act, **limits)
        harness.script(*ROUND)

    def run(self, **given: Any) -> UUID:
        """Run the turn of the message `first`; returns the id of its session."""
        sent = self.harness.send("first", message_id="1", **given)
        self.harness.run(sent.session_id)
        return sent.session_id


def _users(harness: Harness) -> list[tuple[str, str]]:
    """The users' messages in the transcript, with the status of their turns."""
    rows = harness.sql(
        "SELECT m.content, t.status, m.message_id FROM messages AS m JOIN turns AS t USING (turn_id)"
        " WHERE m.role = 'user' ORDER BY m.seq"
    )
    assert len({row.message_id for row in rows}) == len(rows)
    return [(row.content, row.status) for row in rows]


def _consistent(harness: Harness) -> None:
    """Check the invariants, and that each accepted message is in the transcript once."""
    harness.check()
    said = harness.sql("SELECT count(*) FROM messages WHERE role = 'user'")[0][0]
    assert harness.counts()["inbox"] == said


def test_a_message_joins_between_two_steps(harness: Harness) -> None:
    """It follows the results for the model, keeps its row, and its turn's id leads to the turn that it joined."""
    steering = Steering(harness)
    sent: list[Any] = []
    steering.during.append(
        lambda: sent.extend(
            harness.send(text, message_id=text, on_busy="steer", metadata={"of": text}) for text in ("second", "third")
        )
    )
    session_id = steering.run(metadata={"kept": 1})
    first = harness.sql("SELECT turn_id FROM turns")[0].turn_id
    assert harness.lines(session_id) == [
        ("user", "first"), ("assistant", ""), ("tool", "acted"), ("user", "second"), ("user", "third"),
        ("assistant", "done"),
    ]  # fmt: skip
    told = [each.content for each in harness.model.requests[-1].messages if each.role is Role.USER]
    assert told == ["first", "second", "third"]
    rows = harness.sql("SELECT message_id, turn_id, position FROM inbox ORDER BY position")
    assert [(row.message_id, row.turn_id, row.position) for row in rows] == [
        ("1", first, 1), ("second", first, 2), ("third", first, 3),
    ]  # fmt: skip
    said = harness.sql("SELECT message_id, token_count FROM messages WHERE role = 'user' ORDER BY seq")
    assert [(row.message_id, row.token_count) for row in said] == [("1", 5), ("second", 6), ("third", 5)]
    assert len({first, *(each.turn_id for each in sent)}) == 3
    for each in sent:
        turn = harness.turn(each.turn_id)
        assert (turn["turn_id"], turn["status"], turn["reply"]["text"]) == (str(first), "done", "done")
        assert read_committed(harness.database, each.turn_id).total == 6
        again = harness.send(turn_text(each, sent), message_id=turn_text(each, sent))
        assert (again.turn_id, again.duplicate) == (each.turn_id, True)
    assert harness.turn(first)["metadata"] == {"kept": 1, "of": "third"}
    assert states_of(harness.database, [sent[0].turn_id])[sent[0].turn_id][0] == "done"
    assert (steering.ran, len(harness.model.requests)) == (1, 2)
    _consistent(harness)
    assert harness.ask("next")["status"] == "done"


def turn_text(each: Any, sent: list[Any]) -> str:
    """The text of a message that `test_a_message_joins_between_two_steps` has sent."""
    return ("second", "third")[sent.index(each)]


def test_tools_see_the_metadata_of_a_message_that_joined(harness: Harness) -> None:
    """The members of its metadata are added to the turn's at once, not with the next claim."""
    steering = Steering(harness)
    harness.script(calls(("act", {})), calls(("act", {})), says("done"))
    steering.during.append(lambda: harness.send("second", message_id="2", on_busy="steer", metadata={"of": "second"}))
    steering.run()
    assert steering.metadata == {"of": "second"}


def test_a_turn_without_a_further_round_leaves_the_message(harness: Harness) -> None:
    """A message that is sent during the last model call, or to a turn at its limit of steps, becomes its own turn."""
    steering = Steering(harness)

    def late(*_: object) -> ModelReply:
        harness.send("second", on_busy="steer")
        return says("done")

    harness.script(ROUND[0], late, says("2"))
    steering.run()
    assert _users(harness) == [("first", "done"), ("second", "done")]
    assert harness.sql("SELECT count(*) FROM turns")[0][0] == 2
    _consistent(harness)
    limited = Steering(harness, max_steps=1)
    limited.during.append(lambda: harness.send("fourth", on_busy="steer"))
    harness.script(calls(("act", {})), says("answer to the fourth"))
    harness.ask("third")
    assert _users(harness)[2:] == [("third", "failed"), ("fourth", "done")]
    _consistent(harness)


def test_a_message_joins_a_turn_that_was_to_join_another(harness: Harness) -> None:
    """A message that steers and has become a turn of its own is that turn's first message, and no other one."""
    steering = Steering(harness)

    def late(*_: object) -> ModelReply:
        harness.send("second", message_id="2", on_busy="steer")
        return says("done")

    harness.script(late, *ROUND)
    steering.during.append(lambda: harness.send("third", message_id="3", on_busy="steer"))
    session_id = steering.run()
    assert [text for role, text in harness.lines(session_id) if role == "user"] == ["first", "second", "third"]
    rows = harness.sql("SELECT text FROM inbox JOIN turns USING (turn_id) WHERE seq = 2 ORDER BY position")
    assert [row.text for row in rows] == ["second", "third"]
    _consistent(harness)


def test_no_message_joins_a_turn_that_its_next_commit_ends(harness: Harness) -> None:
    """The reply that is committed with the round is the last that its limit allows."""

    def late(*_: object) -> ModelReply:
        harness.send("second", on_busy="steer")
        return says("no number")

    harness.equip(output=int, max_steps=1)
    harness.script(late, says("2"))
    harness.ask("first")
    assert _users(harness) == [("first", "failed"), ("second", "done")]
    _consistent(harness)


DIFFERENT: dict[str, dict[str, Any]] = {
    "another channel": {"channel": "telegram"},
    "another agent": {"agent": "other"},
    "another receiver": {"reply_to": {"url": "https://a.example"}},
    "too long": {"text": "x" * 9_996},
    "not steering": {"on_busy": "enqueue"},
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_message_that_differs_is_a_turn_of_its_own(harness: Harness, difference: str) -> None:
    """As for `merge`: a turn has one channel, one agent, one receiver and at most `guard.max_chars` characters.

    It is one even if another message joins the turn.
    """
    steering = Steering(harness)
    joining = {"text": "and", "on_busy": "steer"}
    given = {**joining, "text": "second", **DIFFERENT[difference]}
    steering.during += [lambda: harness.send(**joining), lambda: harness.send(**given)]
    steering.run()
    assert [status for _, status in _users(harness)] == ["done"] * 3
    rows = harness.sql("SELECT text FROM inbox JOIN turns USING (turn_id) ORDER BY turns.seq, position")
    assert [row.text for row in rows] == ["first", "and", given["text"]]
    assert harness.sql("SELECT count(*) FROM turns")[0][0] == 2
    _consistent(harness)


def test_no_message_joins_a_turn_of_another_session(harness: Harness) -> None:
    """The messages of another user, whose turn runs at the same time, stay with that user."""
    steering = Steering(harness)
    harness.claimed(harness.send("first of bob", user_id="bob").session_id)
    harness.send("second of bob", user_id="bob", on_busy="steer")
    steering.during.append(lambda: harness.send("second", on_busy="steer"))
    with harness.affecting("ana"):
        steering.run()
    assert [each.content for each in harness.model.requests[-1].messages if each.role is Role.USER] == [
        "first", "second",
    ]  # fmt: skip


def test_a_guard_sees_each_message_before_a_model(harness: Harness) -> None:
    """If the agent has a `before_turn` hook, no message joins: the hook refuses the message's own turn."""

    def blocklist(turn: TurnStarted) -> None:
        if "forbidden" in turn.text:
            raise GuardRejected("No.")

    steering = Steering(harness, before_turn=[required(blocklist)])
    steering.during.append(lambda: harness.send("forbidden", on_busy="steer"))
    steering.run()
    assert [status for _, status in _users(harness)] == ["done", "failed"]
    assert all("forbidden" not in str(each.messages) for each in harness.model.requests)
    _consistent(harness)


@pytest.mark.parametrize("waits", ["approval", "task"])
def test_a_message_joins_a_turn_that_waits_with_its_results(harness: Harness, waits: str) -> None:
    """A message to a turn that waits for a person or a task joins when the results are committed."""
    harness.calls = broker = Broker()
    if waits == "approval":
        harness.equip(tool(requires_approval=True, name="act")(_acted))
        harness.script(*ROUND)
    else:
        harness.equip(export)
        harness.script(calls(("reports_export", {"year": 2025})), says("done"))
    turn = harness.ask("first")
    session_id = UUID(turn["session_id"])
    harness.send("second", on_busy="steer")
    assert [text for role, text in harness.lines(session_id) if role == "user"] == ["first"]
    if waits == "approval":
        [call] = turn["pending_approvals"]
        decision = parse_decision({"call_id": call["call_id"], "decision": "approve"})
        decide(harness.runtime, UUID(turn["turn_id"]), decision)
    else:
        end_task(harness, broker.sent[0], "acted")
    harness.run(session_id)
    assert [role for role, _ in harness.lines(session_id)] == ["user", "assistant", "tool", "user", "assistant"]
    assert _users(harness) == [("first", "done"), ("second", "done")]
    _consistent(harness)


def _acted() -> str:
    """Act."""
    return "acted"


CRASHES = [
    (moment, name, nth)
    for name, nth in (("turns.step", 1), ("turns.step", 2), ("turns.step_joining", 1), ("turns.settle", 1))
    for moment in ("before", "after")
]


@pytest.mark.parametrize(("moment", "name", "nth"), CRASHES)
def test_a_crash_neither_loses_nor_doubles_the_message(harness: Harness, moment: Moment, name: str, nth: int) -> None:
    """After a crash at any commit of the turn, the message is in the transcript once, and is answered."""
    steering = Steering(harness)
    sent: list[Any] = []
    steering.during.append(lambda: None if sent else sent.append(harness.send("second", on_busy="steer")))
    with harness.crashing(moment, name, nth):
        steering.run()
    said = harness.sql("SELECT count(*) FROM messages WHERE role = 'assistant'")[0][0]
    harness.script(*[*ROUND, says("2")][said:])
    harness.move(31)
    harness.run(harness.sql("SELECT session_id FROM sessions")[0].session_id)
    assert [status for _, status in _users(harness)] == ["done", "done"]
    assert harness.turn(sent[0].turn_id)["status"] == "done"
    _consistent(harness)


def test_a_commit_whose_result_is_lost_has_joined_the_message(harness: Harness) -> None:
    """If the connection fails after the commit, the runner reads which messages joined, and tells the model."""
    steering = Steering(harness)
    steering.during.append(lambda: harness.send("second", message_id="2", on_busy="steer", metadata={"a": 1}))
    seen: list[int] = []

    def lose(moment: Moment, name: str) -> None:
        if (moment, name) == ("after", "turns.step_joining") and not seen:
            seen.append(1)
            raise lost

    lost = Unavailable("the connection was lost")
    with harness.hooked(lose):
        steering.run()
    assert [each.content for each in harness.model.requests[-1].messages[-2:]] == ["acted", "second"]
    assert _users(harness) == [("first", "done"), ("second", "done")]
    assert len(harness.model.requests) == 2
    _consistent(harness)


INTERRUPT = Statement("test.interrupt", "UPDATE sessions SET token = token + 1")

SEND_THIRD = Statement(
    "test.send_third",
    """
    WITH session AS (
        UPDATE sessions SET last_turn_seq = last_turn_seq + 1, unsettled = unsettled + 1 RETURNING session_id
    ), turn AS (
        INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, steers, accepted_at)
        SELECT gen_random_uuid(), session_id, 3, 'ana', 'assistant', 'http', 5, 'accepted', true, perdure_now()
        FROM session RETURNING turn_id
    )
    INSERT INTO inbox (user_id, channel, message_id, turn_id, position, text, accepted_at)
    SELECT 'ana', 'http', '3', turn_id, 1, 'third', perdure_now() FROM turn
    """,
)


@pytest.mark.parametrize("at", ["turns.step", "turns.step_joining"])
@pytest.mark.parametrize("what", ["cancel the message", "cancel the turn", "send another", "interrupt"])
def test_another_transaction_holds_the_session_when_the_round_is_committed(
    harness: Harness, what: str, at: str
) -> None:
    """The commit waits for the other transaction, and then acts on what it left: no message is counted twice."""
    steering = Steering(harness)
    sent: list[Any] = []
    steering.during.append(lambda: sent.append(harness.send("second", message_id="2", on_busy="steer")))
    held, count = threading.Event(), []
    changes: list[Future[None]] = []

    def change() -> None:
        with harness.runtime.database.transaction("test.hold") as transaction:
            transaction.run(Statement("test.lock_sessions", "SELECT session_id FROM sessions FOR NO KEY UPDATE"), {})
            held.set()
            until(
                lambda: harness.sql(
                    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
                ),
                "the commit waits",
            )
            if what.startswith("cancel"):
                turn_id = (
                    sent[0].turn_id
                    if what == "cancel the message"
                    else harness.sql("SELECT turn_id FROM turns WHERE seq = 1")[0].turn_id
                )
                given = {"turn_id": turn_id, "message": CANCELLED, "delivery_id": UUID(int=1)}
                transaction.run(turns_queries.CANCEL, given)
            else:
                transaction.run(SEND_THIRD if what == "send another" else INTERRUPT, {})

    def hold(moment: Moment, name: str) -> None:
        if (moment, name) == ("before", at):
            count.append(1)
            if len(count) == (2 if at == "turns.step" else 1):
                changes.append(pool.submit(change))
                assert held.wait(PATIENCE_S)

    harness.script(*ROUND, says("3"))
    with ThreadPoolExecutor(1) as pool, harness.hooked(hold):
        steering.run()
    [changed] = changes
    changed.result(PATIENCE_S)
    if what == "interrupt":
        assert harness.sql("SELECT unsettled FROM sessions")[0].unsettled == 2
        return
    expected = {
        "cancel the message": [("first", "done")],
        "cancel the turn": [("first", "done"), ("second", "done")],  # no keeper runs here that would notice
        "send another": [("first", "done"), ("second", "done"), ("third", "done")],
    }[what]
    assert _users(harness) == expected
    assert harness.sql("SELECT count(*) FROM turns")[0][0] == 2, "the third message was not there when it waited"
    if what != "cancel the message":
        _consistent(harness)
    assert harness.sql("SELECT unsettled FROM sessions")[0].unsettled == 0


def test_cancelling_the_id_of_a_message_that_joined_changes_nothing(harness: Harness) -> None:
    """Its own turn is gone: whoever cancels it directly cancels no other."""
    steering = Steering(harness)
    sent: list[Any] = []
    steering.during.append(lambda: sent.append(harness.send("second", on_busy="steer")))
    steering.run()
    cancel(harness.runtime, sent[0].turn_id)
    assert harness.turn(sent[0].turn_id)["status"] == "done"


def test_an_applications_message_steers(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """`perdure.send` returns an id that leads to the joined turn, also for a repetition of the message."""
    monkeypatch.setattr("perdure.application.process.Parts.wake", lambda *_: None)
    monkeypatch.setattr("perdure.application.process._LATER_S", ())
    steering = Steering(harness)
    ids: list[UUID] = []

    def application() -> None:
        with harness.database.engine.begin() as connection:
            for number in range(2):
                sent = send_unrouted(
                    connection, user_id="ana", text="second", on_busy="steer", channel="http",
                    message_id="2" if number == 0 else "3",
                )  # fmt: skip
                ids.append(UUID(str(sent.turn_id)))
        route_user(harness.runtime, UserKey("ana"))

    steering.during.append(application)
    steering.run()
    assert _users(harness) == [("first", "done")] + [("second", "done")] * 2
    for each in ids:
        assert harness.turn(each)["reply"]["text"] == "done"
    with harness.database.engine.begin() as connection:
        again = send_unrouted(connection, user_id="ana", text="second", channel="http", message_id="2")
    route_user(harness.runtime, UserKey("ana"))
    turn_id = UUID(str(again.turn_id))
    assert harness.turn(turn_id)["reply"]["text"] == "done"
    assert states_of(harness.database, [turn_id])[turn_id][0] == "done"
    _consistent(harness)


def test_steering_is_a_setting(harness: Harness) -> None:
    """`PERDURE_TURN__ON_BUSY=steer` is the default of messages without `on_busy`."""
    harness.set(on_busy="steer")
    steering = Steering(harness)
    steering.during.append(lambda: harness.send("second"))
    steering.run()
    assert harness.sql("SELECT count(*) FROM turns")[0][0] == 1
    _consistent(harness)


def test_the_prompt_of_the_next_turn_has_the_message_in_its_place(harness: Harness) -> None:
    """Later prompts have the joined message after the results, and a turn after a gap in `seq` knows its channel."""
    steering = Steering(harness)
    steering.during.append(lambda: harness.send("second", on_busy="steer"))
    steering.run()
    harness.script(says("again"))
    harness.ask("next")
    told: list[Message] = list(spoken(harness.model.requests[-1]))
    assert [each.content for each in told] == ["first", "", "acted", "second", "done", "next"]
    assert "wrote on" not in system_text(harness.model.requests[-1])
