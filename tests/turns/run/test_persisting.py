"""If the database briefly refuses a commit, the commit is retried without a second model or tool call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from sqlalchemy import Connection, text

from perdure import tool
from perdure.database.engine import Database, Moment, Statement
from perdure.errors import Unavailable
from perdure.memory.redis.memory import RedisMemory
from perdure.turns.lease import leave_queries
from perdure.turns.lease.claim import Ran, claim
from perdure.turns.prompt import first_read
from perdure.turns.run import queries
from perdure.turns.run.loop import Runner
from tests.memory.conftest import redis_memory
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

__all__ = ["redis_memory"]

LOCKS = {
    "turns.step": "SELECT FROM sessions FOR UPDATE",
    "turns.settle": "SELECT FROM turns WHERE settled_at IS NULL FOR UPDATE",
}


class Bench:
    """Makes an unsafe tool and counts the tool's runs."""

    def __init__(self) -> None:
        self.ran = 0

    def tool(self) -> Any:
        @tool(effect="unsafe")
        def act() -> str:
            """Count the run."""
            self.ran += 1
            return "acted"

        return act


def _talk(harness: Harness, bench: Bench) -> Any:
    harness.equip(bench.tool())
    harness.script(calls(("act", {})), says("done"))
    return harness.send("act")


def _answered_once(harness: Harness, bench: Bench) -> None:
    rows = [(row.role, row.content) for row in harness.sql("SELECT role, content FROM messages ORDER BY seq")]
    assert rows == [("user", "act"), ("assistant", ""), ("tool", "acted"), ("assistant", "done")]
    assert (len(harness.model.requests), bench.ran) == (2, 1)
    turn = harness.sql("SELECT status, attempts FROM turns")[0]
    assert tuple(turn) == ("done", 1)
    row = harness.sql("SELECT lease_until, unsettled, state, strikes, claims, token FROM sessions")[0]
    assert tuple(row) == (None, 0, "active", 0, 0, 1)


@pytest.mark.parametrize(
    ("name", "nth"),
    [
        ("turns.step", 1),
        pytest.param("turns.step", 2, marks=pytest.mark.long),
        pytest.param("turns.settle", 1, marks=pytest.mark.long),
    ],
)
def test_a_row_that_another_transaction_locks_costs_no_model_call(harness: Harness, name: str, nth: int) -> None:
    """The lock timeout rejects the commit. The runner repeats the commit after the row is unlocked."""
    bench, seen = Bench(), []
    sent = _talk(harness, bench)
    engine = harness.database.engine.execution_options(isolation_level="READ COMMITTED")
    held: list[Connection] = []

    def hold(moment: Moment, statement: str) -> None:
        if (moment, statement) == ("before", name):
            seen.append(statement)
            if len(seen) == nth:
                held.append(engine.connect())
                held[0].execute(text(LOCKS[name]))
        elif (moment, statement) == ("before", "turns.begin_next") and held:
            held.pop().close()

    with harness.hooked(hold):
        assert harness.run(sent.session_id) == Ran(1)
    assert len(seen) > nth, "the first attempt was rejected"
    _answered_once(harness, bench)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("name", "nth"), [("turns.step", 1), ("turns.step", 2), ("turns.settle", 1)])
def test_a_commit_without_a_response_is_looked_up(
    harness: Harness,
    redis_memory: RedisMemory,
    moment: Moment,
    name: str,
    nth: int,
) -> None:
    """The runner looks up whether the commit happened. In either case, no model or tool call is repeated.

    Working memory gets the turn, too.
    """
    harness.redis_memory = redis_memory
    bench, seen = Bench(), []
    sent = _talk(harness, bench)

    def break_once(at: Moment, statement: str) -> None:
        if (at, statement) == (moment, name):
            seen.append(statement)
            if len(seen) == nth:
                raise Unavailable("The connection broke.")

    with harness.hooked(break_once):
        assert harness.run(sent.session_id) == Ran(1)
    _answered_once(harness, bench)
    assert [turn.turn_id for turn in redis_memory.working.read(sent.session_id)] == [sent.turn_id]


@pytest.mark.parametrize("statement", [queries.STEP, leave_queries.SETTLE], ids=lambda each: each.name)
def test_a_statement_that_the_server_commits_late_is_not_committed_twice(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, statement: Statement
) -> None:
    """The server may commit a statement late, while the client repeats it. The statement takes effect only once."""
    bench, late = Bench(), list[dict[str, Any]]()
    sent = _talk(harness, bench)
    run = Database.run

    def lose_the_first(self: Database, each: Statement, parameters: Mapping[str, Any], **how: Any) -> Any:
        if each is statement and not late:
            late.append(dict(parameters))
            raise Unavailable("The connection broke; the statement may still be committed.")
        if each is statement and len(late) == 1:
            late.append({})
            assert run(self, each, late[0])
        return run(self, each, parameters, **how)

    monkeypatch.setattr(Database, "run", lose_the_first)
    assert harness.run(sent.session_id) == Ran(1)
    monkeypatch.undo()
    _answered_once(harness, bench)


def test_the_reply_of_a_stale_runner_is_discarded(harness: Harness) -> None:
    """If a second runner has already committed its reply, the stale runner's reply is discarded."""
    harness.script(says("of the first"), says("of the second"))
    sent = harness.send()
    tries: list[str] = []

    def take_over(moment: Moment, statement: str) -> None:
        if (moment, statement) == ("before", "turns.settle"):
            tries.append(statement)
            if len(tries) == 1:
                harness.move(31)
                assert Runner(harness.runtime, "second").run(sent.session_id) == Ran(1)
                raise Unavailable("The connection broke.")

    with harness.hooked(take_over):
        assert harness.run(sent.session_id) == Ran(0)
    assert [content for role, content in harness.lines(sent.session_id) if role == "assistant"] == ["of the second"]


def test_a_process_that_shuts_down_does_not_wait_for_the_database(harness: Harness) -> None:
    """A draining process retries the commit once, without a pause, and then parks the turn."""
    sent = harness.send()
    runner = Runner(harness.runtime, "draining")
    tries: list[str] = []

    def refuse(moment: Moment, statement: str) -> None:
        if (moment, statement) == ("before", "turns.settle"):
            tries.append(statement)
            runner.keeper.begin_shutdown()
            raise Unavailable("The row is locked.")

    with runner.keeper.keep(harness.claimed(harness.send(user_id="bob").session_id)), harness.hooked(refuse):
        assert runner.run(sent.session_id) == Ran(0)
    assert len(tries) == 2
    assert harness.turn(sent.turn_id)["status"] == "parked"
    harness.script(says("elsewhere"))
    assert harness.run(sent.session_id) == Ran(1)


def test_a_process_that_shuts_down_leaves_no_lease_if_its_last_try_had_committed(harness: Harness) -> None:
    """It reads the session again, finds that the turn is settled, and releases the session for the next message."""
    sent = harness.send()
    runner = Runner(harness.runtime, "draining")
    tries: list[Moment] = []

    def lose(moment: Moment, statement: str) -> None:
        if statement == "turns.settle" and (moment == "after" or not tries):
            tries.append(moment)
            runner.keeper.begin_shutdown()
            raise Unavailable("The connection broke.")

    with harness.hooked(lose):
        runner.run(sent.session_id)
    assert tries == ["before", "after"]
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert harness.session(sent.session_id).lease_until is None


@pytest.mark.parametrize(("outages", "settled"), [(11, 0), (10, 1)])
def test_ten_outages_cost_no_attempt(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, outages: int, settled: int
) -> None:
    """The turn begins again after a pause that grows. The eleventh outage is a failed attempt, so it does not go on."""
    pauses: list[float] = []
    left = iter(range(outages))

    def load(*given: Any, **how: Any) -> Any:
        if next(left, None) is not None:
            raise Unavailable("The connection broke.")
        return first_read_load(*given, **how)

    first_read_load = first_read.load
    monkeypatch.setattr(first_read, "load", load)
    monkeypatch.setattr("perdure.turns.run.commit.time", _Sleeping(pauses.append))
    sent = harness.send()
    assert harness.run(sent.session_id) == Ran(settled)
    assert pauses == [0.2 * 2**n for n in range(8)] + [30]
    assert harness.session(sent.session_id).strikes == 1 - settled
    assert harness.turn(sent.turn_id)["attempts"] == 1


def test_the_lease_is_kept_while_a_commit_waits(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a runner retries a commit for longer than a lease, no other runner can claim the session."""
    pauses: list[float] = []
    others: list[object] = []
    harness.script(says("kept in hand"))
    sent = harness.send()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        harness.move(seconds)
        others.append(claim(harness.runtime, sent.session_id, "other", alone=True))

    monkeypatch.setattr("perdure.turns.run.commit.time", _Sleeping(pause))

    def refuse(moment: Moment, statement: str) -> None:
        if (moment, statement) == ("before", "turns.settle") and sum(pauses) < 3 * harness.settings.turn.lease_s:
            raise Unavailable("The row is locked.")

    with harness.hooked(refuse):
        assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "kept in hand"
    assert len(harness.model.requests) == 1
    assert {type(each).__name__ for each in others} == {"NotNeeded"}


class _Sleeping:
    """Replaces the module `time`. Its `sleep` calls the given function."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.sleep = sleep
