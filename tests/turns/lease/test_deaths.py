"""The death of a process is charged to the turn that most likely caused it, not to all turns of the process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest

from perdure import tool
from perdure.database.engine import Statement, Transaction
from perdure.turns.cancel import cancel
from perdure.turns.lease import leave_queries, queries
from perdure.turns.lease.claim import (
    NeedsIsolation,
    NotNeeded,
    Ran,
    _blame,
    claim,
    claim_patiently,
)
from perdure.turns.lease.queries import ISOLATE_FROM_CLAIM
from perdure.turns.lease.tenure import Tenure, all_fenced
from perdure.turns.reading import read_attempt_error
from perdure.turns.run.child_watch import ChildEnd, count_failed_start
from perdure.turns.run.loop import Runner
from tests.turns.harness import Crash, Harness, side_by_side, until
from tests.turns.scripted import calls, says

LEASE_S = 30

WAITING = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@tool(effect="pure")
def deadly() -> str:
    """The process dies in this tool (`_die_in_a_call`)."""
    return "alive"


def _die_in_a_call(harness: Harness, session_id: UUID) -> None:
    """Run the session until its process dies during the call of a tool, which may be an earlier process's call."""
    first = not harness.sql("SELECT 1 FROM tool_effects")
    harness.script(calls(("deadly", {})))
    with harness.crashing("before", "turns.step", 2 if first else 1):
        harness.run(session_id)


def _hold(harness: Harness, owner: str, *session_ids: UUID) -> None:
    """Claim the sessions for the process `owner`, which then dies."""
    for session_id in session_ids:
        assert isinstance(claim(harness.runtime, session_id, owner), Tenure)


def _counts(harness: Harness, column: str = "claims") -> list[int]:
    rows = harness.sql(f"SELECT {column} AS value FROM sessions ORDER BY created_at, session_id")  # noqa: S608 (constants)
    return [row.value for row in rows]


def _sessions(harness: Harness, count: int) -> list[UUID]:
    return [harness.send(user_id=f"user {number}").session_id for number in range(count)]


def _take_over(harness: Harness, owner: str, *session_ids: UUID) -> list[UUID]:
    """Let the leases expire, and claim the sessions for `owner`; returns those that must run alone."""
    harness.move(LEASE_S + 10)
    found = {each: claim(harness.runtime, each, owner) for each in session_ids}
    assert all(isinstance(each, Tenure | NeedsIsolation) for each in found.values())
    return [each for each, outcome in found.items() if isinstance(outcome, NeedsIsolation)]


def test_one_turn_of_a_dead_process_is_charged(harness: Harness) -> None:
    """Of the turns of a dead process, one keeps its claim and its strike. The claims of the others do not count."""
    sessions = _sessions(harness, 6)
    _hold(harness, "dead", *sessions[:4])
    _hold(harness, "also dead", *sessions[4:])
    assert _take_over(harness, "next", *sessions) == []
    assert sorted(_counts(harness)) == sorted(_counts(harness, "strikes")) == [1, 1, 1, 1, 2, 2]
    assert _counts(harness, "deaths") == [1] * 6


def test_a_fleet_that_dies_twice_isolates_one_turn_of_each_process(harness: Harness) -> None:
    """After two deaths of all processes, each process has one suspected turn. The others run in workers at once."""
    sessions = _sessions(harness, 20)
    _hold(harness, "a", *sessions[:10])
    _hold(harness, "b", *sessions[10:])
    assert _take_over(harness, "c", *sessions[:10]) == []
    assert [type(claim(harness.runtime, each, "d")) for each in sessions[10:]] == [Tenure] * 10
    assert len(_take_over(harness, "e", *sessions)) == 2


def test_concurrent_claims_charge_a_death_once(harness: Harness) -> None:
    """Workers that take over the turns of a dead process concurrently agree about the turn that is charged."""
    sessions = _sessions(harness, 4)
    _hold(harness, "dead", *sessions)
    harness.move(LEASE_S + 10)
    found = side_by_side(*(lambda each=each: claim_patiently(harness.runtime, each, "harness") for each in sessions))
    assert [type(each) for each in found] == [Tenure] * 4
    assert sorted(_counts(harness)) == [1, 1, 1, 2]


def test_a_death_is_charged_once_while_a_session_of_the_process_is_locked(harness: Harness) -> None:
    """A session that another transaction has locked is judged with the others, not by itself later."""
    sessions = _sessions(harness, 4)
    _hold(harness, "dead", *sessions)
    harness.move(LEASE_S + 10)
    innocent = max(sessions)  # among equals, the first is charged
    with ThreadPoolExecutor() as threads, harness.database.transaction("test.lock") as other:
        other.run(Statement("test.lock", "SELECT FROM sessions WHERE session_id = %(id)s FOR UPDATE"), {"id": innocent})
        claiming = threads.submit(claim, harness.runtime, min(sessions), "next")
        until(lambda: claiming.done() or bool(harness.sql(WAITING)), "the claim waits")
    assert isinstance(claiming.result(), Tenure)
    assert isinstance(claim(harness.runtime, innocent, "next"), Tenure)
    assert sorted(_counts(harness)) == [0, 0, 1, 2]


def test_the_turn_in_a_tool_call_is_suspected_first(harness: Harness) -> None:
    """A turn that called a tool is charged before turns that waited for a model. The tool is the likelier cause."""
    harness.equip(deadly)
    innocent = _sessions(harness, 3)
    _hold(harness, "harness", *innocent)
    poison = harness.send(user_id="poisoner")
    for _ in range(ISOLATE_FROM_CLAIM):
        _die_in_a_call(harness, poison.session_id)
        harness.move(LEASE_S * 2)
        for session_id in innocent:
            assert isinstance(claim(harness.runtime, session_id, "harness"), Tenure)
    assert isinstance(harness.run(poison.session_id), NeedsIsolation)
    assert _counts(harness)[:3] == [1, 1, 1]
    harness.script(says("gone"))
    harness.run(poison.session_id, alone=True)


def test_a_committed_step_ends_the_suspicion(harness: Harness) -> None:
    """A turn that made progress after a death runs in a worker again, however many workers die afterwards.

    Neither its own earlier calls nor the unknown outcome of another turn's call make it suspect.
    """

    @tool(effect="pure")
    def look() -> str:
        """Look."""
        return "seen"

    @tool
    def pay() -> str:
        """Pay."""
        return "paid"

    harness.equip(look, pay)
    other = harness.send(user_id="bob")
    harness.script(calls(("pay", {})))
    with harness.crashing("after", "turns.step"):
        harness.run(other.session_id)
    harness.move(LEASE_S + 10)
    harness.script(says("The outcome is unknown."))
    assert harness.run(other.session_id) == Ran(1)
    sent = harness.send()
    harness.script(Crash("dead"))
    for _ in range(3):
        with pytest.raises(Crash):
            harness.run(sent.session_id)
        harness.move(LEASE_S + 10)
        harness.script(calls(("look", {})), Crash("dead"))
    harness.script(says("done"))
    assert harness.run(sent.session_id) == Ran(1)


def test_a_settled_turn_leaves_no_suspicion(harness: Harness) -> None:
    """The session's next turn is charged as if no process had died."""
    sent = harness.send()
    harness.script(Crash("dead"))
    with pytest.raises(Crash):
        harness.run(sent.session_id)
    harness.move(LEASE_S + 10)
    assert harness.run(sent.session_id) == Ran(1)
    assert _counts(harness, "claims") == _counts(harness, "deaths") == [0]


def test_the_charged_turn_is_found_even_if_others_look_more_suspicious(harness: Harness) -> None:
    """Later deaths charge twice as many turns each, so a turn that kills its processes soon runs alone."""
    sessions = _sessions(harness, 12)
    poison = max(sessions)  # among equals, the last
    _hold(harness, "dead 0", *sessions)
    for deaths in range(1, 12):
        alone = _take_over(harness, f"dead {deaths}", *sessions)
        if poison in alone:
            break
        sessions = [each for each in sessions if each not in alone]
    assert deaths <= 7, "3 + log2(12)"


def test_a_stuck_turn_of_a_living_process_is_charged_alone(harness: Harness) -> None:
    """A process that renews its other leases lives. Only the turn whose lease has expired is charged."""
    stuck, *others = _sessions(harness, 3)
    _hold(harness, "alive", stuck, *others)
    harness.move(LEASE_S - 5)
    harness.sql(
        "UPDATE sessions SET lease_until = perdure_now() + interval '30 s' WHERE session_id = ANY (%(ids)s)",
        ids=others,
    )
    harness.move(6)
    assert isinstance(claim(harness.runtime, stuck, "next"), Tenure)
    assert _counts(harness) == [2, 1, 1]
    assert _counts(harness, "deaths") == [1, 0, 0]


def test_a_turn_stays_in_a_process_of_its_own(harness: Harness) -> None:
    """A step in a dedicated process does not return the turn to a worker, which the turn's next call could hang."""
    harness.equip(deadly)
    sent = harness.send()
    harness.sql("UPDATE sessions SET claims = %(claims)s", claims=ISOLATE_FROM_CLAIM)
    harness.script(calls(("deadly", {})))
    with harness.crashing("before", "turns.step", 2):
        harness.run(sent.session_id, alone=True)
    harness.move(LEASE_S * 2)
    assert isinstance(harness.run(sent.session_id), NeedsIsolation)
    cancel(harness.runtime, sent.turn_id)
    assert isinstance(harness.run(sent.session_id), NeedsIsolation), "its process may still run, which its worker ends"
    assert harness.run(sent.session_id, alone=True) == Ran(1)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"


def test_a_failed_start_is_counted_and_a_cancellation_settles(harness: Harness) -> None:
    """A process that cannot start uses an attempt. If the turn is then cancelled, no process is started for it."""
    sent = harness.send()
    harness.sql("UPDATE sessions SET claims = %(claims)s", claims=ISOLATE_FROM_CLAIM)
    runner = Runner(harness.runtime, "worker")
    found = runner.run(sent.session_id)
    assert isinstance(found, NeedsIsolation)
    assert found.fence is not None
    ended = ChildEnd(2.0, "SettingsError: no registry")
    count_failed_start(harness.runtime, runner, sent.session_id, found.fence, ended)
    row, turn = harness.session(sent.session_id), harness.turn(sent.turn_id)
    assert (row.strikes, row.spent_s, turn["status"], turn["attempts"]) == (1, 2.0, "parked", 1)
    assert "no registry" in str(read_attempt_error(harness.database, sent.turn_id))
    cancel(harness.runtime, sent.turn_id)
    assert runner.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"


@pytest.mark.parametrize("drained", [False, True], ids=["run", "drain"])
def test_a_cancellation_that_two_workers_find_settles_one_turn(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, drained: bool
) -> None:
    """Wake-ups of a session may be repeated. The worker that comes late does not cancel the session's next turn."""
    first, second = harness.send("first"), harness.send("second")
    harness.sql("UPDATE sessions SET claims = %(claims)s", claims=ISOLATE_FROM_CLAIM)
    harness.sql("UPDATE turns SET status = 'parked' WHERE turn_id = %(id)s", id=first.turn_id)
    cancel(harness.runtime, first.turn_id)
    worker, other = (Runner(harness.runtime, name) for name in ("worker", "other"))
    settle = Runner.settle_unrun

    def settle_late(self: Runner, *given: Any) -> bool:
        assert settle(other, *given)
        return settle(self, *given)

    monkeypatch.setattr(Runner, "settle_unrun", settle_late)
    (worker.drain if drained else worker.run)(first.session_id)
    monkeypatch.undo()
    harness.run(first.session_id)
    assert [harness.turn(each.turn_id)["status"] for each in (first, second)] == ["cancelled", "done"]
    assert harness.session(first.session_id).lease_until is None


def test_a_process_that_reaches_no_server_costs_time_but_no_attempt(harness: Harness) -> None:
    """The turn keeps its attempts, shows the error, and fails at its time limit, so it does not start for ever."""
    sent = harness.send()
    harness.sql("UPDATE sessions SET claims = %(claims)s, wakes = 2", claims=ISOLATE_FROM_CLAIM)
    runner = Runner(harness.runtime, "worker")
    found = runner.run(sent.session_id)
    assert isinstance(found, NeedsIsolation)
    assert found.fence is not None
    ended = ChildEnd(harness.settings.turn.timeout_s / 2, "Redis cannot be reached.", charged=False)
    count_failed_start(harness.runtime, runner, sent.session_id, found.fence, ended)
    row, turn = harness.session(sent.session_id), harness.turn(sent.turn_id)
    assert (row.strikes, row.spent_s, row.wakes, turn["attempts"]) == (0, ended.seconds, 2, 0)
    assert "Redis cannot be reached." in str(read_attempt_error(harness.database, sent.turn_id))
    count_failed_start(harness.runtime, runner, sent.session_id, found.fence, ended)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "TIMEOUT")


def _lock(other: Transaction, session_id: UUID) -> None:
    other.run(Statement("test.lock", "SELECT FROM sessions WHERE session_id = %(id)s FOR UPDATE"), {"id": session_id})


@pytest.mark.parametrize("statement", [queries.RENEW, leave_queries.RELEASE_ALL], ids=["renewed", "released"])
def test_a_process_that_turns_out_to_live_is_not_charged(harness: Harness, statement: Statement) -> None:
    """A lease that is renewed or released while its session's lock is awaited belongs to no dead process."""
    sessions = _sessions(harness, 3)
    tenures = [harness.claimed(each) for each in sessions]
    harness.move(LEASE_S + 10)
    with ThreadPoolExecutor() as threads, harness.database.transaction("test.lock") as other:
        other.run(statement, {**all_fenced(tenures), "lease_s": LEASE_S})
        blaming = threads.submit(_blame, harness.database, sessions[0], harness.settings.turn)
        until(lambda: blaming.done() or bool(harness.sql(WAITING)), "the judgement waits")
    blaming.result()
    assert _counts(harness, "deaths") == [0] * 3
    assert _counts(harness) == [0 if statement is leave_queries.RELEASE_ALL else 1] * 3


@pytest.mark.long
def test_a_session_that_stays_locked_does_not_hold_up_the_others(harness: Harness) -> None:
    """The other sessions of a dead process are claimed while, for example, an erasure has locked one of them."""
    sessions = sorted(_sessions(harness, 4))
    _hold(harness, "dead", *sessions)
    harness.move(LEASE_S + 10)
    with harness.database.transaction("test.lock") as other:
        _lock(other, sessions[-1])
        assert [type(claim(harness.runtime, each, "next")) for each in sessions[:-1]] == [Tenure] * 3


def test_a_late_release_and_a_judgement_do_not_fail(harness: Harness) -> None:
    """A process that was paused releases its sessions in the order of its claims, which is not that of a judgement."""
    sessions = sorted(_sessions(harness, 3))
    tenures = [harness.claimed(each) for each in reversed(sessions)]
    harness.move(LEASE_S + 10)
    with ThreadPoolExecutor() as threads, harness.database.transaction("test.lock") as other:
        _lock(other, sessions[1])
        releasing = threads.submit(harness.database.run, leave_queries.RELEASE_ALL, all_fenced(tenures))
        until(lambda: len(harness.sql(WAITING)) == 1, "the release waits")
        claiming = threads.submit(claim, harness.runtime, sessions[0], "next")
        until(lambda: claiming.done() or len(harness.sql(WAITING)) == 2, "the judgement waits")
    assert len(releasing.result()) == 3
    assert isinstance(claiming.result(), Tenure | NotNeeded)
