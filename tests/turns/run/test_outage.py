"""If the database becomes unavailable in the middle of a turn, the turn continues and is answered once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure import tool
from perdure.database.engine import Database, Moment
from perdure.errors import Unavailable
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.turns.lease.claim import Ran
from perdure.turns.run.loop import Runner
from tests.turns.harness import KILL_THE_OTHERS, Harness
from tests.turns.scripted import calls, says


@tool(effect="pure")
def double(number: int) -> int:
    """Double the number."""
    return number * 2


ANSWERED = [("user", "hello"), ("assistant", ""), ("tool", "8"), ("assistant", "It is 8.")]


def _transcript(harness: Harness) -> list[tuple[str, str]]:
    return [(row.role, row.content) for row in harness.sql("SELECT role, content FROM messages ORDER BY seq")]


def _make_doubts_due(harness: Harness) -> None:
    """Set `decide_at` of unfinished tool calls to now. Otherwise the runner would wait for that moment in real time."""
    harness.sql("UPDATE tool_effects SET decide_at = perdure_now() WHERE status = 'intended'")


def test_connections_killed_in_every_step(harness: Harness) -> None:
    """If all connections are terminated in each model call and in the tool call, no message is lost or duplicated."""
    killed: list[str] = []

    def kill_once(where: str) -> None:
        if where not in killed:
            killed.append(where)
            harness.sql(KILL_THE_OTHERS)

    @tool(effect="pure", name="double")
    def double_and_kill(number: int) -> int:
        """Double the number, and terminate all database connections once."""
        kill_once("tool")
        return number * 2

    def kill_and_reply(request: ModelRequest, call: ModelCall) -> ModelReply:
        kill_once(f"prompt of {len(request.messages)}")
        return _next_line(request, call)

    harness.equip(double_and_kill)
    harness.script(*[kill_and_reply] * 12)
    sent = harness.send()

    def hurry(moment: Moment, name: str) -> None:
        if name == "turns.begin_next":
            _make_doubts_due(harness)

    with harness.hooked(hurry):
        assert harness.run(sent.session_id) == Ran(1)
    assert killed == ["prompt of 3", "tool", "prompt of 5"]
    assert _transcript(harness) == ANSWERED
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["attempts"]) == ("done", 1)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("name", "nth"), [("turns.step", 1), ("turns.step", 2), ("turns.settle", 1)])
def test_a_commit_in_doubt(harness: Harness, moment: Moment, name: str, nth: int) -> None:
    """If the connection breaks just before or just after a commit, the turn is answered once.

    The runner looks up whether the commit happened, and writes no message twice.
    """
    harness.equip(double)
    harness.script(*[_next_line] * 6)
    sent = harness.send()
    seen: list[str] = []

    def break_once(at: Moment, statement: str) -> None:
        if statement == "turns.begin_next":
            _make_doubts_due(harness)
        if (at, statement) == (moment, name):
            seen.append(name)
            if len(seen) == nth:
                raise Unavailable("The connection broke.")

    with harness.hooked(break_once):
        harness.run(sent.session_id)
    assert len(seen) >= nth
    assert _transcript(harness) == ANSWERED
    assert harness.turn(sent.turn_id)["status"] == "done"
    row = harness.session(sent.session_id)
    assert (row.lease_until, row.unsettled, row.state, row.strikes) == (None, 0, "active", 0)


def _next_line(request: ModelRequest, call: ModelCall) -> ModelReply:
    return says("It is 8.") if len(request.messages) > 3 else calls(("double", {"number": 4}))


def test_retries_end_while_the_database_refuses_every_commit(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """If every commit fails, as on a full disk, the retries back off and end at the turn's time limit."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        harness.move(seconds)

    monkeypatch.setattr("perdure.turns.run.commit.time.sleep", pause)
    harness.equip(double)
    harness.script(*[_next_line] * 200)
    sent = harness.send()

    def full(at: Moment, statement: str) -> None:
        if (at, statement) == ("before", "turns.step"):
            raise Unavailable("The disk is full.")

    with harness.hooked(full):
        harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "TIMEOUT")
    assert len(harness.model.requests) < 25
    assert pauses == sorted(pauses)


def test_a_runner_stops_when_the_database_stays_unavailable(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its lease expires, the runner stops and leaves the turn unsettled. Another runner then answers the turn."""
    monkeypatch.setattr("perdure.turns.run.commit.time.sleep", harness.move)
    sent = harness.send()

    def unavailable(at: Moment, statement: str) -> None:
        if statement in {"turns.settle", "turns.begin_next"}:
            raise Unavailable("The server does not respond.")

    with harness.hooked(unavailable):
        assert harness.run(sent.session_id) == Ran(0)
    assert harness.turn(sent.turn_id)["status"] == "running"
    harness.move(31)
    assert harness.run(sent.session_id) == Ran(1)
    assert [role for role, _ in harness.lines(sent.session_id)] == ["user", "assistant"]


def test_a_claim_without_a_database_raises_unavailable(harness: Harness) -> None:
    """A refused connection is reported as `Unavailable`."""
    nowhere = Database(harness.database.url.set(port=1, host="127.0.0.1"))
    runner = Runner(replace(harness.runtime, database=nowhere), "lost")
    with pytest.raises(Unavailable):
        runner.run(harness.send().session_id)
