"""Pruning runs: dry runs, completed runs, concurrent runs, and runs that fail or are killed and resumed."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import signal
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from perdure.casebank import archive
from perdure.casebank.cases import NewCase, add, read
from perdure.casebank.plan import compute
from perdure.casebank.runs import prune, state
from perdure.casebank.runs.state import RunPhase
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import Conflict, NotFound
from tests import forked
from tests.casebank.bank import (
    EXPECTED,
    NORTH,
    TABLES,
    Post,
    bank,
    column,
    details,
    everything,
    fill,
    put,
    statuses,
    use,
)
from tests.turns.harness import until

URL = "https://hooks.example/casebank"
LASTING = {"cases", "case_executions", "case_archive", "case_history"}


def test_a_dry_run_reports_the_plan_and_changes_nothing(filled: Database, clock: MovedClock) -> None:
    """A dry run returns the plan and changes no row of any table."""
    before = everything(filled)
    assert set(TABLES) < set(before)
    pruned = prune.dry_run(bank(filled, clock))
    assert everything(filled) == before
    assert details(pruned) == EXPECTED
    assert (pruned["removed_cases"], pruned["merged_cases"], pruned["archived_cases"]) == (1, 1, 1)
    assert (pruned["dry_run"], pruned["run_id"]) == (True, None)
    assert all(each["reason"] for each in pruned["details"]["spared"])
    assert pruned["details"]["merged"][0]["similarity"] == pytest.approx(0.99995, abs=1e-5)


def test_a_run_does_what_the_dry_run_reported(
    filled: Database, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A run archives low performers, duplicates and inactive cases, and returns the same details as a dry run."""
    caplog.set_level(logging.INFO)
    pruned = prune.run(bank(filled, clock))
    assert details(pruned) == EXPECTED
    assert (pruned["dry_run"], pruned["phase"]) == (False, "done")
    gone = {"low", "twin", "sleeper"}
    assert {name for name, status in statuses(filled).items() if status == "archived"} == gone
    assert set(column(filled, "SELECT case_id FROM case_archive WHERE run_id = :run", run=pruned["run_id"])) == gone
    archived = column(filled, "SELECT case_id FROM case_history WHERE event = 'archived' AND reason <> ''")
    assert set(archived) == gone
    assert "removed 1, merged 1 and archived 1 cases, and spared 4" in caplog.text
    assert "is over: 1 removed, 1 merged, 1 archived, 4 spared" in caplog.text, "without a URL the log is the notice"


def test_the_keeper_takes_over_the_counts(filled: Database, clock: MovedClock) -> None:
    """A merge gives the keeper the sum of the uses, the weighted mean of the rates and the later access time."""
    prune.run(bank(filled, clock))
    assert column(filled, "SELECT usage_count FROM cases WHERE case_id = 'good'") == [30]
    assert column(filled, "SELECT success_rate FROM cases WHERE case_id = 'good'") == [70.0]
    assert column(
        filled,
        "SELECT c.last_accessed_at = a.last_accessed_at FROM cases AS c, case_archive AS a"
        " WHERE c.case_id = 'good' AND a.case_id = 'twin' AND a.keeper_id = 'good'",
    ) == [True]
    assert column(filled, "SELECT details ->> 'losers' FROM case_history WHERE event = 'absorbed'") == ['["twin"]']


def test_a_second_run_finds_nothing_more(filled: Database, clock: MovedClock) -> None:
    """A run right after another run changes no case."""
    first = prune.run(bank(filled, clock))
    before = {name: rows for name, rows in everything(filled).items() if name in LASTING}
    second = prune.run(bank(filled, clock))
    assert second["run_id"] != first["run_id"]
    assert (second["removed_cases"], second["merged_cases"], second["archived_cases"]) == (0, 0, 0)
    assert {name: rows for name, rows in everything(filled).items() if name in LASTING} == before


def test_the_row_of_a_run_has_its_phase_plan_and_outcome(filled: Database, clock: MovedClock) -> None:
    """A run's row shows the phase and progress during the run, and the plan and outcome afterwards."""
    seen: list[tuple[str, int, int]] = []

    def look(moment: str, name: str) -> None:
        if moment == "after" and name in {"casebank.enter", "casebank.apply"}:
            shown = state.list_runs(filled)[0]
            seen.append((shown["phase"], shown["done"], shown["total"]))

    filled.observe = look
    pruned = prune.run(bank(filled, clock))
    run = state.read_run(filled, UUID(pruned["run_id"]))
    assert next(phase for phase, _, _ in seen if phase != "planning") == "notifying"
    assert ("applying", 3, 3) in seen
    assert seen[-1][0] == "done"
    assert details(run["plan"]) == details(run["outcome"]) == EXPECTED
    report = state.read_report(filled, UUID(pruned["run_id"]), action="merge")
    assert [(line["query"], line["keeper_query"], line["outcome"]) for line in report] == [
        ("how to do it", "how to do it", "done")
    ]
    with pytest.raises(NotFound):
        state.read_run(filled, UUID(int=1))


# --- changes between plan and apply -------------------------------------------------------------


def planned_then(database: Database, clock: MovedClock, change: Any) -> dict[str, Any]:
    """Execute a run, and call `change` after the run has made its plan and before it archives a case."""
    post = Post()

    def notify(url: str, body: bytes) -> None:
        if json.loads(body)["event"] == "casebank.plan":
            change()
        post(url, body)

    parts = bank(database, clock, notify_url=URL)
    return prune.run(prune.RunContext(parts.database, parts.clock, parts.limits, notify, parts.pause))


def test_a_case_used_between_plan_and_apply_is_spared(filled: Database, clock: MovedClock) -> None:
    """Cases used after the plan was made are spared, because the run locks each row and checks it again."""
    pruned = planned_then(filled, clock, lambda: use(filled, ["low", "twin", "sleeper"], UUID(int=7)))
    assert (pruned["removed_cases"], pruned["merged_cases"], pruned["archived_cases"]) == (0, 0, 0)
    assert {(each["case_id"], each["rule"]) for each in pruned["details"]["spared"]} >= {
        ("low", "recent_access"),
        ("twin", "recent_access"),
        ("sleeper", "recent_access"),
    }
    assert set(statuses(filled).values()) == {"active"}
    assert column(filled, "SELECT usage_count FROM cases WHERE case_id = 'good'") == [20]


def test_a_merge_uses_the_keepers_rate_at_that_time(filled: Database, clock: MovedClock) -> None:
    """A merge computes with the keeper's current rate and usage count, because the plan may be days old."""
    put(filled, "unrated", vector=[0, 0, 0, 1.0], usage=40)
    put(filled, "its twin", vector=[0, 0, 0, 1.0], usage=10, rate=50.0)

    def rate() -> None:
        with filled.engine.connect() as connection:
            connection.exec_driver_sql("UPDATE cases SET success_rate = 100 WHERE case_id = 'unrated'")
            connection.exec_driver_sql("UPDATE cases SET usage_count = 40 WHERE case_id = 'good'")

    pruned = planned_then(filled, clock, rate)
    assert pruned["merged_cases"] == 2
    rates = "SELECT success_rate FROM cases WHERE case_id IN ('unrated', 'good') ORDER BY case_id"
    assert column(filled, rates) == [(80.0 * 40 + 50.0 * 10) / 50, (100.0 * 40 + 50.0 * 10) / 50]


@pytest.mark.parametrize(
    ("change", "spared"),
    [
        ("UPDATE cases SET success_rate = 25 WHERE case_id = 'low'", "low"),
        ("UPDATE cases SET query_vector = '[0,0,0,1]' WHERE case_id = 'twin'", "twin"),
        ("UPDATE cases SET embedder = 'other:4' WHERE case_id = 'good'", "twin"),
        ("UPDATE cases SET query = 'how not to do it' WHERE case_id = 'good'", "twin"),
        ("UPDATE cases SET status = 'archived' WHERE case_id = 'good'", "twin"),
        ("DELETE FROM cases WHERE case_id = 'good'", "twin"),
        ("DELETE FROM cases WHERE case_id = 'sleeper'", "sleeper"),
        ("UPDATE cases SET usage_count = 99 WHERE case_id = 'sleeper'", "sleeper"),
    ],
)
def test_cases_changed_since_the_plan_are_spared(filled: Database, clock: MovedClock, change: str, spared: str) -> None:
    """A run spares each case that has changed since the plan was made, and applies the rest of the plan."""

    def happen() -> None:
        with filled.engine.connect() as connection:
            connection.exec_driver_sql(change)

    pruned = planned_then(filled, clock, happen)
    assert pruned["removed_cases"] + pruned["merged_cases"] + pruned["archived_cases"] == 2
    assert spared in {each["case_id"] for each in pruned["details"]["spared"]}


def test_a_case_restored_while_a_run_plans_to_archive_it_stays(filled: Database, clock: MovedClock) -> None:
    """If an administrator restores a case after the plan was made, the case is spared."""

    def archive_and_restore() -> None:
        with filled.engine.connect() as connection:
            connection.exec_driver_sql("UPDATE cases SET status = 'archived' WHERE case_id = 'sleeper'")
            connection.exec_driver_sql(
                "INSERT INTO case_archive (case_id, query, response_text, created_at, usage_count, last_accessed_at,"
                " archived_at, archived_reason) SELECT case_id, query, response_text, created_at, usage_count,"
                " last_accessed_at, now(), 'by hand' FROM cases WHERE case_id = 'sleeper'"
            )
        archive.restore(filled, "sleeper")

    pruned = planned_then(filled, clock, archive_and_restore)
    assert statuses(filled)["sleeper"] == "active"
    assert ("sleeper", "recently_restored") in details(pruned)["spared"]


# --- killed, resumed and concurrent runs --------------------------------------------------------


@pytest.mark.exhaustive
def test_a_run_killed_anywhere_is_resumed_and_nothing_is_done_twice(
    database: Database, database_url: str, clock: MovedClock, tmp_path: Path
) -> None:
    """If a process is killed before or after any commit, the next run completes the plan and repeats nothing."""
    parts = bank(database, clock, duplicate_batch=1)
    for boundary in itertools.count():
        clear(database)
        fill(database)
        killed = _killed_at(boundary, database_url, tmp_path)
        if killed:
            assert details(resumed(parts, clock)) == EXPECTED
            clock.advance(-clock.offset)
        archived = column(database, "SELECT case_id FROM case_history WHERE event = 'archived' ORDER BY case_id")
        assert archived == column(database, "SELECT case_id FROM case_archive ORDER BY case_id")
        assert archived == ["low", "sleeper", "twin"]
        assert column(database, "SELECT usage_count FROM cases WHERE case_id = 'good'") == [30]
        assert len(state.list_runs(database)) == 1
        if not killed:
            break
    assert boundary > 20


def _killed_at(boundary: int, database_url: str, directory: Path) -> bool:
    """Prune in a process that is killed at `boundary`. Returns False if the process ended before this boundary."""
    process = forked.start(
        forked.Program(
            "tests.casebank.killing:main",
            ["killing", database_url, str(boundary)],
            dict(os.environ),
            directory,
            stderr=directory / "stderr",
        )
    )
    process.join(60)
    assert process.exitcode in {0, -signal.SIGKILL}, (directory / "stderr").read_text()
    return process.exitcode != 0


OPEN_TRANSACTIONS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
"""


def resumed(parts: prune.RunContext, clock: MovedClock) -> dict[str, Any]:
    """Resume the run of a killed process, after the run's lease has expired."""
    # PostgreSQL ends the killed client's transaction with a delay. Until then, the run's row is locked.
    until(lambda: column(parts.database, OPEN_TRANSACTIONS) == [0], "the killed process's transaction ends")
    left = state.list_runs(parts.database)
    if left and left[0]["finished_at"]:  # killed after its last commit
        return state.result(parts.database, UUID(left[0]["run_id"]))
    if left and left[0]["under_way"]:
        with pytest.raises(Conflict):
            prune.run(parts)
        clock.advance(timedelta(seconds=state.LEASE_S + 10))
    return prune.run(parts)


def clear(database: Database) -> None:
    """Empty the CaseBank's tables."""
    database.observe = None
    with database.engine.connect() as connection:
        connection.exec_driver_sql(f"TRUNCATE {', '.join(TABLES)}")


def test_a_group_merged_over_many_batches_has_the_planned_counts(database: Database, clock: MovedClock) -> None:
    """Merging a group of duplicates in several batches gives the keeper the same counts as one batch would."""
    for number in range(30):
        put(
            database, f"{number:02}", vector=NORTH, usage=30 - number, rate=[None, 10.0, 95.0][number % 3], idle_days=95
        )
    prune.run(bank(database, clock, duplicate_batch=4, low_success_min_usage=100, inactive_exempt_usage=500))
    rates = [(30 - number, [None, 10.0, 95.0][number % 3]) for number in range(30)]
    known = [(uses, rate) for uses, rate in rates if rate is not None]
    expected = sum(uses * rate for uses, rate in known) / sum(uses for uses, _ in known)
    assert column(database, "SELECT usage_count FROM cases WHERE case_id = '00'") == [sum(range(1, 31))]
    assert column(database, "SELECT success_rate FROM cases WHERE case_id = '00'") == [pytest.approx(expected)]
    assert set(statuses(database).values()) == {"archived"}, "the keeper is inactive even with its merged counts"


def test_of_two_concurrent_runs_the_second_is_refused(filled: Database, clock: MovedClock) -> None:
    """A second concurrent run is refused with a conflict and does not disturb the first."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(_url: str, _body: bytes) -> None:
        inside.set()
        assert go_on.wait(60)

    parts = bank(filled, clock, notify_url=URL)
    first = prune.RunContext(parts.database, parts.clock, parts.limits, wait, parts.pause)
    pruned: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: pruned.append(prune.run(first)))
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(Conflict, match="under way"):
            prune.run(bank(filled, clock))
        assert prune.advance(bank(filled, clock)) is None
        assert prune.dry_run(bank(filled, clock))["removed_cases"] == 1, "a dry run needs no lease"
    finally:
        go_on.set()
        thread.join(60)
    assert details(pruned[0]) == EXPECTED


def test_a_run_that_was_taken_over_writes_nothing_more(filled: Database, clock: MovedClock) -> None:
    """After another process resumes a run whose lease expired, the run's first process fails at its next commit."""
    held = state.begin_or_resume(filled, clock)
    clock.advance(timedelta(seconds=state.LEASE_S + 10))
    successor = state.begin_or_resume(filled, clock)
    assert (successor.run_id, successor.token) == (held.run_id, held.token + 1)
    with pytest.raises(state.RunLost):
        state.progress(filled, held, 1, 2)
    with pytest.raises(state.RunLost):
        state.enter(filled, held, RunPhase.NOTIFYING)
    state.progress(filled, successor, 1, 2)


def test_a_resumed_run_counts_the_batches_that_are_done(filled: Database, clock: MovedClock) -> None:
    """The progress of a batch is committed with the batch, so a run that is resumed shows how much is done."""
    parts, seen = bank(filled, clock, duplicate_batch=1), list[tuple[int, int]]()

    def stop(phase: RunPhase, _done: int, _total: int) -> None:
        if phase is RunPhase.APPLYING:
            raise prune.RunInterrupted

    def see(phase: RunPhase, done: int, total: int) -> None:
        if phase is RunPhase.APPLYING:
            seen.append((done, total))

    assert prune.run(replace(parts, on_progress=stop))["phase"] == "applying"
    assert [(run["done"], run["total"], run["under_way"]) for run in state.list_runs(filled)] == [(1, 3, False)]
    assert details(prune.run(replace(parts, on_progress=see))) == EXPECTED
    assert seen == [(2, 3), (3, 3)]


def test_a_failed_run_releases_its_lease(filled: Database, clock: MovedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run stores its error and releases its lease, so that the next attempt can start at once."""

    def break_down(*_given: Any, **_named: Any) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr(compute, "compute", break_down)
        with pytest.raises(OSError, match="disk full"):
            prune.run(bank(filled, clock))
    assert "disk full" in state.list_runs(filled)[0]["error"]
    assert details(prune.run(bank(filled, clock))) == EXPECTED
    assert state.list_runs(filled)[0]["error"] is None


def test_cases_are_used_and_added_during_a_run(filled: Database, clock: MovedClock) -> None:
    """Cases can be used and added during a run, because the run holds no lock between its commits."""
    number = iter(range(1_000))

    def look(_moment: str, _name: str) -> None:
        filled.observe = None
        turn = next(number)
        use(filled, ["unknown"], UUID(int=turn), succeeded=True)
        add(filled, NewCase(f"new {turn}", "a question", "an answer"), now=clock.now())
        filled.observe = look

    filled.observe = look
    pruned = prune.run(bank(filled, clock))
    assert details(pruned) == EXPECTED
    used = next(number)
    assert read(filled, "unknown")["usage_count"] == 50 + used
    assert used > 10
