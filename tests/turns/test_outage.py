"""The database becomes unavailable in the middle of a turn: the turn continues and is answered once."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import tool
from perdure.database.engine import Database, Moment
from perdure.errors import Unavailable
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.turns.run.runner import Ran, Runner
from tests.turns.harness import KILL_THE_OTHERS, Harness
from tests.turns.scripted import calls, says


@tool(effect="pure")
def double(number: int) -> int:
    """Double it."""
    return number * 2


ANSWERED = [("user", "hello"), ("assistant", ""), ("tool", "8"), ("assistant", "It is 8.")]


def _said(harness: Harness) -> list[tuple[str, str]]:
    return [(row.role, row.content) for row in harness.sql("SELECT role, content FROM messages ORDER BY seq")]


def _in_doubt_runs_now(harness: Harness) -> None:
    """Make calls in doubt due at once; the wait for them would take real time."""
    harness.sql("UPDATE tool_effects SET decide_at = perdure_now() WHERE status = 'intended'")


def test_connections_killed_in_every_step(harness: Harness) -> None:
    """All backends die once in each model call and in the tool: nothing of the turn is lost or doubled."""
    killed: list[str] = []

    def kill_once(where: str) -> None:
        if where not in killed:
            killed.append(where)
            harness.sql(KILL_THE_OTHERS)

    @tool(effect="pure", name="double")
    def double_and_die(number: int) -> int:
        """Double it while the database restarts."""
        kill_once("tool")
        return number * 2

    def die_and_speak(request: ModelRequest, call: ModelCall) -> ModelReply:
        kill_once(f"prompt of {len(request.messages)}")
        return _next_line(request, call)

    harness.equip(double_and_die)
    harness.script(*[die_and_speak] * 12)
    sent = harness.send()

    def hurry(moment: Moment, name: str) -> None:
        if name == "turns.begin_next":
            _in_doubt_runs_now(harness)

    with harness.hooked(hurry):
        assert harness.run(sent.session_id) == Ran(1)
    assert killed == ["prompt of 2", "tool", "prompt of 4"]
    assert _said(harness) == ANSWERED
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["attempts"]) == ("done", 1)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("name", "nth"), [("turns.step", 1), ("turns.step", 2), ("turns.settle", 1)])
def test_a_commit_in_doubt(harness: Harness, moment: Moment, name: str, nth: int) -> None:
    """The connection breaks just before or just after a commit.

    The runner looks up whether the commit happened and continues; no message is written twice.
    """
    harness.equip(double)
    harness.script(*[_next_line] * 6)
    sent = harness.send()
    seen: list[str] = []

    def break_once(at: Moment, statement: str) -> None:
        if statement == "turns.begin_next":
            _in_doubt_runs_now(harness)
        if (at, statement) == (moment, name):
            seen.append(name)
            if len(seen) == nth:
                raise Unavailable("The connection broke.")

    with harness.hooked(break_once):
        harness.run(sent.session_id)
    assert len(seen) >= nth
    assert _said(harness) == ANSWERED
    assert harness.turn(sent.turn_id)["status"] == "done"
    row = harness.session(sent.session_id)
    assert (row.lease_until, row.unsettled, row.state, row.strikes) == (None, 0, "active", 0)


def _next_line(request: ModelRequest, call: ModelCall) -> ModelReply:
    return says("It is 8.") if len(request.messages) > 3 else calls(("double", {"number": 4}))


def test_a_database_that_refuses_every_commit_does_not_have_the_model_asked_for_ever(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk reads work and steps are refused. Each retry costs a model call, so retries slow down and end."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        harness.move(seconds)

    monkeypatch.setattr("perdure.turns.run.runner.time.sleep", pause)
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
    """After a whole lease another runner may have the session, so this one stops without settling the turn."""
    monkeypatch.setattr("perdure.turns.run.runner.time.sleep", harness.move)
    sent = harness.send()

    def away(at: Moment, statement: str) -> None:
        if statement in {"turns.settle", "turns.begin_next"}:
            raise Unavailable("Nobody answers.")

    with harness.hooked(away):
        assert harness.run(sent.session_id) == Ran(0)
    assert harness.turn(sent.turn_id)["status"] == "running"
    harness.move(31)
    assert harness.run(sent.session_id) == Ran(1)
    assert [role for role, _ in harness.lines(sent.session_id)] == ["user", "assistant"]


def test_a_claim_without_a_database_is_unavailable(harness: Harness) -> None:
    """The caller gets `Unavailable`, and no turn has begun."""
    nowhere = Database(harness.database.url.set(port=1, host="127.0.0.1"))
    runtime: Any = harness.runtime
    runner = Runner(type(runtime)(**{**vars(runtime), "database": nowhere}), "lost")
    with pytest.raises(Unavailable):
        runner.run(harness.send().session_id)
