"""Tests of forks: new sessions that copy a conversation up to a tick (a number of committed steps)."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel

from perdure import Agent, handoff, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.database.engine import Moment
from perdure.errors import Conflict, InvalidRequest, NotFound
from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Role
from perdure.sessions.ending import Ended, expire_idle, read_conversation, request_end
from perdure.sessions.forking import fork
from perdure.snapshots.deletion import delete_snapshots
from perdure.snapshots.exchange import read
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.tools.registry import ToolContext
from perdure.turns.additions import Additions
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.lease.claim import Ran
from perdure.turns.sweep import sweep
from tests.sessions.conftest import End
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says, spoken, system_text

IDLE_S = 1_800.0


@tool(effect="unsafe")
def act() -> str:
    """Return `done`."""
    return "done"


def _talked(harness: Harness) -> UUID:
    """Make a session with three turns, which are settled at the ticks 1, 4 and 5. The second turn uses a tool."""
    harness.equip(act)
    harness.script(says("one"), calls(("act", {})), says("two"), says("three"))
    session_ids = {harness.ask(text, channel=channel)["session_id"] for text, channel in TALK}
    assert len(session_ids) == 1
    session_id = UUID(session_ids.pop())
    assert harness.session(session_id).tick == 5
    return session_id


TALK = [("first", "cli"), ("second", "http"), ("third", "telegram")]

LINES = [
    ("user", "first"),
    ("assistant", "one"),
    ("user", "second"),
    ("assistant", ""),
    ("tool", "done"),
    ("assistant", "two"),
    ("user", "third"),
    ("assistant", "three"),
]


def _fork(harness: Harness, session_id: UUID, tick: int | None = None) -> UUID:
    return fork(harness.database, harness.clock, session_id, tick)


def _texts(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(str(each.role), each.content) for each in messages if each.role is not Role.SYSTEM]


@pytest.mark.parametrize(
    ("tick", "turns", "lines", "at"),
    [(1, 1, 2, 1), (2, 1, 2, 1), (3, 1, 2, 1), (4, 2, 6, 4), (5, 3, 8, 5), (None, 3, 8, 5)],
)
def test_a_fork_copies_through_the_last_turn_settled_at_its_tick(
    harness: Harness, tick: int | None, turns: int, lines: int, at: int
) -> None:
    """If the tick is in the middle of a turn, the previous turn is the last one copied."""
    source = _talked(harness)
    forked = _fork(harness, source, tick)
    row = harness.session(forked)
    assert harness.lines(forked) == LINES[:lines]
    assert (row.turn_count, row.last_turn_seq, row.message_count, row.tick) == (turns, turns, lines, at)
    assert (row.user_id, row.agent, row.state, row.token) == ("ana", "assistant", "active", 0)
    assert (row.routable, row.unsettled, row.forked_from) == (False, 0, source)
    assert row.channels == [channel for _, channel in TALK[:turns]]


def test_every_column_is_copied_or_renewed_on_purpose(harness: Harness) -> None:
    """The statement `FORK` copies every column of messages and turns, but gives the copies new session and turn ids.

    What was in a prompt is of the turn that was run, and is read there.
    """
    source = _talked(harness)
    forked = _fork(harness, source)
    for table, own in (("messages", {"session_id", "turn_id"}), ("turns", {"session_id", "turn_id"})):
        query = f"SELECT * FROM {table} WHERE session_id = %(id)s ORDER BY seq"  # noqa: S608 (constants)
        for theirs, ours in zip(harness.sql(query, id=source), harness.sql(query, id=forked), strict=True):
            different = {name for name, value in theirs._mapping.items() if ours._mapping[name] != value}
            assert different - {"prompt"} == own


def test_a_fork_is_addressed_by_its_id_and_knows_only_the_copy(harness: Harness) -> None:
    """A fork's prompt contains the copied conversation. The fork and its source do not share later messages."""
    source = _talked(harness)
    forked = _fork(harness, source, 4)
    harness.script(says("in the fork"), says("in the source"))
    sent = harness.send("other", session_id=forked)
    assert sent.session_id == forked
    assert harness.run(forked) == Ran(1)
    assert _texts(harness.model.requests[-1].messages) == [*LINES[:6], ("user", "other")]
    harness.ask("fourth")
    assert _texts(harness.model.requests[-1].messages) == [*LINES, ("user", "fourth")]
    assert harness.lines(forked) == [*LINES[:6], ("user", "other"), ("assistant", "in the fork")]
    assert harness.lines(source) == [*LINES, ("user", "fourth"), ("assistant", "in the source")]


def test_forks_and_source_do_not_recall_each_others_later_messages(harness: Harness, end: End) -> None:
    """The source and its forks do not recall each other's messages from the time after the fork.

    The forks do not recall the source's summary either. The user's next session recalls the summary, and the messages
    of the source and of the forks.
    """
    seen: list[str] = []

    @tool
    def look(ctx: ToolContext) -> str:
        """Recall."""
        assert ctx.memory is not None
        seen.extend(each.content for each in ctx.memory.recall("what is my parrot called?", 10))
        return "looked"

    def recalled(session_id: UUID) -> str:
        seen.clear()
        harness.script(calls(("look", {})), says("well"))
        harness.ask("What is my parrot called?", session_id=session_id)
        system = system_text(harness.model.requests[-1])
        return system + " ".join(seen)

    harness.equip(look)
    source = UUID(harness.ask("I have a parrot.")["session_id"])
    forks = [_fork(harness, source), _fork(harness, source)]
    forks.append(_fork(harness, forks[0]))
    family = [source, *forks]
    names = ["Coco", "Rico", "Kiki", "Lora"]
    for session_id, name in zip(family, names, strict=True):
        harness.ask(f"My parrot is called {name}.", session_id=session_id)
    for own, session_id in zip(names, family, strict=True):
        text = recalled(session_id)
        assert [name for name in names if name in text] in ([], [own])
        assert own in " ".join(seen)
    request_end(harness.database, source, "enough")
    harness.script(says(json.dumps({"summary": "Of a parrot in Lima.", "key_topics": []})))
    assert end(source) == Ended()
    for session_id in forks:
        assert "Lima" not in recalled(session_id)
    other = harness.ask("hello")["session_id"]
    assert {"Lima", "Coco", "Rico"} <= set(re.findall(r"\w+", recalled(UUID(other))))


def test_no_message_is_routed_to_a_fork(harness: Harness) -> None:
    """A message without a session id never enters a fork. The next session's `previous_session_id` is the source."""
    source = _talked(harness)
    forked = _fork(harness, source)
    assert harness.send("more").session_id == source
    harness.run(source)
    request_end(harness.database, source, "enough")
    harness.move(1)
    newer = _fork(harness, source)
    request_end(harness.database, newer, "enough")
    following = harness.send("again").session_id
    assert following not in {source, forked, newer}
    assert harness.session(following).previous_session_id == source


def test_nothing_of_a_copy_runs_or_is_delivered_again(harness: Harness) -> None:
    """A sweep does not wake a fork. Effects and deliveries are not copied. Another user cannot write to the fork."""
    harness.equip(act)
    harness.script(calls(("act", {})), says("done"))
    given = {"message_id": "m1", "reply_to": {"url": "https://a.example/x"}}
    source = UUID(harness.ask("once", **given)["session_id"])
    before = harness.counts()
    forked = _fork(harness, source)
    harness.waker.sessions.clear()
    harness.move(3_600)
    sweep(harness.runtime)
    assert harness.waker.sessions == []
    assert harness.counts() == {
        **before,
        "sessions": before["sessions"] + 1,
        "turns": before["turns"] + 1,
        "messages": before["messages"] + 4,
    }
    with pytest.raises(NotFound):
        harness.send("mine?", user_id="bob", session_id=forked)


def test_message_ids_count_once(harness: Harness) -> None:
    """A repeated message id returns the original turn, even if the repeated message is sent to the fork."""
    sent = harness.send("once", message_id="m1")
    harness.run(sent.session_id)
    forked = _fork(harness, sent.session_id)
    again = harness.send("once", message_id="m1", session_id=forked)
    assert (again.turn_id, again.session_id, again.duplicate) == (sent.turn_id, sent.session_id, True)


def test_a_fork_can_be_forked_where_its_source_could(harness: Harness) -> None:
    """A fork can itself be forked at a tick that it copied, but not at a later tick of its source."""
    source = _talked(harness)
    forked = _fork(harness, source, 4)
    assert harness.lines(_fork(harness, forked, 1)) == LINES[:2]
    with pytest.raises(Conflict, match=r"tick 5.*tick 4"):
        _fork(harness, forked, 5)


def test_the_source_continues_while_it_is_copied(harness: Harness) -> None:
    """A turn that is settled between the statements `PLAN_FORK` and `FORK` is not copied."""
    source = _talked(harness)

    def settle_a_turn(moment: Moment, statement: str) -> None:
        if (moment, statement) == ("before", "sessions.fork"):
            harness.database.observe = None
            harness.ask("in between")

    with harness.hooked(settle_a_turn):
        forked = _fork(harness, source)
    assert harness.lines(source)[:-2] == harness.lines(forked) == LINES


def test_the_variables_are_those_of_the_last_turn_copied(harness: Harness) -> None:
    """A fork begins with the variables of its last copied turn. The fork and the source then change independently.

    A fork of an ended session has no variables.
    """

    @tool(effect="pure")
    def note(text: str, ctx: ToolContext) -> str:
        """Append the text to the variable `noted`."""
        ctx.working_variables["noted"] = [*ctx.working_variables.get("noted", []), text]
        return "noted"

    def noting(text: str, **given: Any) -> UUID:
        harness.script(calls(("note", {"text": text})), says("ok"))
        return UUID(harness.ask(text, **given)["session_id"])

    def kept(session_id: UUID) -> dict[str, Any]:
        return dict(read(harness.database, session_id).memory.working_variables)

    harness.equip(note)
    source = UUID(harness.ask("hello")["session_id"])
    for text in ("one", "two"):
        noting(text)
    forks = [_fork(harness, source, tick) for tick in (1, 4, 6, 7)]
    assert [kept(each) for each in forks] == [{}, {"noted": ["one"]}, {"noted": ["one"]}, {"noted": ["one", "two"]}]
    assert kept(_fork(harness, forks[3], 4)) == {"noted": ["one"]}
    noting("other", session_id=forks[1])
    noting("three")
    assert kept(forks[1]) == {"noted": ["one", "other"]}
    assert kept(source) == {"noted": ["one", "two", "three"]}
    request_end(harness.database, source, "enough")
    delete_snapshots(harness.database, PostgresSnapshots(harness.database), source)
    assert kept(_fork(harness, source)) == {}
    assert kept(forks[3]) == {"noted": ["one", "two"]}


def test_an_unfinished_turn_is_not_copied(harness: Harness) -> None:
    """An unfinished turn is not copied, because its open calls would never get results in the fork."""
    source = _talked(harness)
    forks: list[UUID] = []

    def forking(request: ModelRequest, call: ModelCall) -> ModelReply:
        forks.append(_fork(harness, source))
        return says("four") if len(forks) > 1 else calls(("act", {}))

    harness.script(forking, forking)
    harness.ask("fourth")
    assert [harness.lines(each) for each in forks] == [LINES, LINES]


def test_a_turn_that_was_cancelled_before_it_began_leaves_no_gap(harness: Harness) -> None:
    """A fork neither copies nor counts a turn that was cancelled before it began."""
    source = _talked(harness)
    dropped, sent = harness.send("dropped"), harness.send("fourth")
    cancel(harness.runtime, dropped.turn_id)
    harness.run(source)
    forked = _fork(harness, source)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert harness.lines(forked) == [*LINES, ("user", "fourth"), ("assistant", "ok")]
    assert harness.session(forked).turn_count == 4


def test_an_ended_session_may_be_forked(harness: Harness, end: End) -> None:
    """The fork of an ended session is active. The summary is not copied, because it may cover turns not in the fork."""
    source = _talked(harness)
    request_end(harness.database, source, "enough")
    harness.script(says(json.dumps({"summary": "All of it.", "key_topics": ["all"]})))
    assert end(source) == Ended()
    forked = _fork(harness, source, 4)
    row = harness.session(forked)
    assert (row.state, row.summary, row.key_topics, row.ended_at) == ("active", None, [], None)
    harness.send("on", session_id=forked)
    assert harness.run(forked) == Ran(1)


def test_an_idle_fork_ends(harness: Harness, end: End) -> None:
    """A fork's idle time counts from the creation of the fork."""
    source = _talked(harness)
    harness.move(IDLE_S - 1)
    forked = _fork(harness, source)
    harness.move(1)
    assert expire_idle(harness.database, IDLE_S) == [source]
    harness.send("still here", session_id=forked)
    harness.run(forked)
    harness.move(IDLE_S)
    assert expire_idle(harness.database, IDLE_S) == [forked]
    harness.script(says(json.dumps({"summary": "Other.", "key_topics": []})))
    assert end(forked) == Ended()
    with pytest.raises(Conflict, match="ended"):
        harness.send("too late", session_id=forked)


@pytest.mark.parametrize("tick", [6, 2**31, 10**30])
def test_a_future_tick_is_refused(harness: Harness, tick: int) -> None:
    """The error states the requested tick and the session's tick. Nothing is written."""
    source = _talked(harness)
    before = harness.counts()
    with pytest.raises(Conflict, match=f"tick {tick}: it is at tick 5"):
        _fork(harness, source, tick)
    assert harness.counts() == before


def test_an_invalid_fork_is_refused(harness: Harness) -> None:
    """A fork is refused if the session is unknown, no turn is settled, or the tick is before the first settled turn."""
    source = _talked(harness)
    fresh = harness.send(user_id="bob").session_id
    before = harness.counts()
    with pytest.raises(NotFound):
        _fork(harness, uuid4())
    with pytest.raises(InvalidRequest, match="tick"):
        _fork(harness, source, -1)
    with pytest.raises(Conflict, match="no settled turn at tick 0; the first was settled at tick 1"):
        _fork(harness, source, 0)
    for tick in (None, 0):
        with pytest.raises(Conflict, match="no settled turn yet"):
            _fork(harness, fresh, tick)
    assert harness.counts() == before


def test_what_is_not_to_be_remembered_is_not_remembered_of_a_fork(harness: Harness) -> None:
    """The copy of such a turn is in the fork's prompts, and not in its summary."""
    said = Incoming.model_validate({"user": UserKey("ana"), "text": "my secret"})
    sent = accept(harness.runtime, said, additions=Additions(instructions="Be brief.", remember=False))
    harness.run(sent.session_id)
    forked = fork(harness.database, harness.clock, sent.session_id)
    harness.ask("not a secret", session_id=forked)
    assert [each.content for each in spoken(harness.model.requests[-1])] == ["my secret", "ok", "not a secret"]
    assert [each.content for each in read_conversation(harness.database, forked, 20)] == ["not a secret", "ok"]
    [copied, _] = harness.sql("SELECT additions FROM turns WHERE session_id = %(id)s ORDER BY seq", id=forked)
    assert copied.additions == {"remember": False}


def test_a_fork_has_the_agent_of_its_time(harness: Harness) -> None:
    """A later turn handed the conversation over: the fork is of the agent before. The fork of all turns is not."""
    billing = Agent("billing", "You bill.")
    harness.agents = Agents([Agent("desk", "You welcome.", [handoff(billing)]), billing])
    harness.script(says("hello"), calls(("handoff_to_billing", {})), says("I bill."))
    source = UUID(harness.ask("hi")["session_id"])
    tick = harness.session(source).tick
    harness.ask("my invoice")
    assert [harness.session(_fork(harness, source, at)).agent for at in (tick, None)] == ["desk", "billing"]


def test_an_agent_that_a_message_named_is_not_that_of_a_fork(harness: Harness) -> None:
    """The message was for another agent, and the session stayed with its own."""
    harness.agents = Agents([Agent("desk", "You welcome."), Agent("billing", "You bill.")])
    source = UUID(harness.ask("hi")["session_id"])
    harness.ask("my invoice", agent="billing")
    assert harness.session(_fork(harness, source)).agent == "desk"


def test_a_fork_has_the_data_of_its_replies(harness: Harness) -> None:
    """And what a function of the agent made for the turn."""

    class City(BaseModel):
        name: str

    harness.agents = Agents([Agent("desk", lambda _: "You know cities.", output=City)])
    harness.script(says('{"name": "Rome"}'))
    source = UUID(harness.ask("where?")["session_id"])
    query = "SELECT data, instructions, tools_left_out FROM turns WHERE session_id = %(id)s"
    harness.sql("UPDATE turns SET tools_left_out = '[\"act\"]'")
    [copied] = harness.sql(query, id=_fork(harness, source))
    assert tuple(copied) == ({"name": "Rome"}, "You know cities.", ["act"])
