"""Runs: one at a time, under a lease, resumable, and what the outside sees of them.

A run is a row. The process that works on it holds its lease by a token that grows with each claim, and
writes only under that token. A run whose process died is taken up where it stood; one that
waits for approval is taken up once it is approved, and is void after its time. A dry run that was asked for over
HTTP is a row, too: it makes its plan and is done, next to a run that is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, assert_never
from uuid import UUID

from sqlalchemy import Row

from perdure.casebank.plan.policy import Action
from perdure.casebank.runs import queries
from perdure.clock import Clock
from perdure.database.engine import Database, Executor
from perdure.errors import Conflict, NotFound
from perdure.ids import new_id

LEASE_S = 60.0
"""Seconds after which a run that shows no progress is somebody else's."""

_PAGE = 1_000
_TRIES = 3


class Phase(StrEnum):
    """Where a run stands. The last four are final."""

    PLANNING = "planning"
    NOTIFYING = "notifying"
    WAITING_APPROVAL = "waiting_approval"
    APPLYING = "applying"
    REPORTING = "reporting"
    DONE = "done"
    WITHHELD = "withheld"
    REJECTED = "rejected"
    EXPIRED = "expired"


_FINAL = frozenset({Phase.DONE, Phase.WITHHELD, Phase.REJECTED, Phase.EXPIRED})
_BEFORE_APPLYING = frozenset({Phase.PLANNING, Phase.NOTIFYING, Phase.WAITING_APPROVAL})


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plan or of its outcome, as it is told."""

    action: Action
    case_id: str
    rule: str
    reason: str
    keeper_id: str | None = None
    similarity: float | None = None


class RunLost(Exception):
    """The run is somebody else's now: stop, and write nothing."""


@dataclass(frozen=True, slots=True)
class Held:
    """A run that is ours under `token`."""

    run_id: UUID
    token: int
    phase: Phase
    planned_at: datetime | None
    dry_run: bool = False

    @property
    def fence(self) -> dict[str, Any]:
        """The parameters by which a statement makes sure that it still is."""
        return {"run_id": self.run_id, "token": self.token, "lease_s": LEASE_S}


def begin_or_resume(database: Database, clock: Clock) -> Held:
    """Take up the run that nobody works on, or begin a new one.

    Raises:
        Conflict: one is under way, or waits for approval; the message names it.
    """
    database.run(queries.EXPIRE, {})
    held = resume(database, dry_runs=False)
    if held is not None:
        return held
    begun = database.run(queries.BEGIN, {"run_id": new_id(clock), "dry_run": False, "lease_s": LEASE_S})
    if begun:
        return _held(begun[0])
    raise _under_way(database)


def request(database: Database, clock: Clock, *, dry_run: bool) -> UUID:
    """Write down that a run is wanted, for a worker to take up (`prune.advance`); returns the run's id.

    Where a run was interrupted, or a dry run is unfinished, that one's id: it goes on.

    Raises:
        Conflict: a run is under way, or waits for approval; the message names it.
    """
    database.run(queries.EXPIRE, {})
    run_id = new_id(clock)
    for _ in range(_TRIES):
        if database.run(queries.BEGIN, {"run_id": run_id, "dry_run": dry_run, "lease_s": None}):
            return run_id
        for row in database.run(queries.UNDER_WAY, {"dry_run": dry_run}):
            if not dry_run and (row.held or row.phase == Phase.WAITING_APPROVAL):
                raise _under_way(database)
            unfinished: UUID = row.run_id
            return unfinished
    raise _under_way(database)  # runs began and finished between these statements


def resume(database: Database, *, dry_runs: bool = True) -> Held | None:
    """Take up an unfinished run that no process holds, if there is one; `dry_runs` says whether a dry run will do."""
    taken = database.run(queries.TAKE_OVER, {"lease_s": LEASE_S, "dry_runs": dry_runs})
    return _held(taken[0]) if taken else None


def _under_way(database: Database) -> Conflict:
    rows = database.run(queries.UNDER_WAY, {"dry_run": False})
    named = f" {rows[0].run_id}, {rows[0].phase}" if rows else ""
    return Conflict(f"A run of the CaseBank is under way already:{named}.")


def progress(database: Database, run: Held, done: int, total: int) -> None:
    """Say how far the phase is, and go on holding the run.

    Raises:
        RunLost: it is somebody else's.
    """
    if not database.run(queries.PROGRESS, {**run.fence, "done": done, "total": total}):
        raise RunLost


def release(database: Database, run: Held, error: str | None = None) -> None:
    """Give the run back, after a failure or on the way out, for anybody to take up at once."""
    database.run(queries.RELEASE, {**run.fence, "error": error})


def enter(
    database: Database,
    run: Held,
    phase: Phase,
    *,
    total: int = 0,
    error: str | None = None,
    notified: bool = False,
    expires_s: float = 0,
) -> Held:
    """Go on to a phase.

    Raises:
        RunLost: the run is somebody else's.
    """
    parameters = {
        **run.fence,
        "phase": phase.value,
        "total": total,
        "error": error,
        "notified": notified,
        "expires_s": expires_s,
        "finished": phase in _FINAL,
    }
    if not database.run(queries.ENTER, parameters):
        raise RunLost
    return replace(run, phase=phase)


def approve(database: Database, run_id: UUID, by: str) -> None:
    """Let the plan be applied. Whoever approves then has somebody take the run up (`prune.advance`).

    Raises:
        NotFound: there is no such run.
        Conflict: its plan does not wait for approval, or not any more.
    """
    _decide(database, run_id, Phase.APPLYING, by)


def reject(database: Database, run_id: UUID, by: str) -> None:
    """Let the plan be void.

    Raises:
        NotFound: there is no such run.
        Conflict: its plan does not wait for approval, or not any more.
    """
    _decide(database, run_id, Phase.REJECTED, by)


def expire(database: Database) -> int:
    """Void the plan that waited too long; how many there were."""
    return len(database.run(queries.EXPIRE, {}))


def read_run(executor: Executor, run_id: UUID) -> dict[str, Any]:
    """The body of `GET /v1/consolidation/runs/{id}`.

    Raises:
        NotFound: there is no such run.
    """
    row = _row(executor, run_id)
    planned = row.phase != Phase.PLANNING
    applied = not row.dry_run and row.phase not in _BEFORE_APPLYING | {Phase.REJECTED, Phase.EXPIRED}
    return {
        **_shown(row),
        "plan": _details(executor, run_id, applied=False) if planned else None,
        "outcome": _details(executor, run_id, applied=True) if applied else None,
    }


def read_progress(executor: Executor, run_id: UUID) -> dict[str, Any]:
    """Where a run stands, without its plan: what `list_runs` has of it.

    Raises:
        NotFound: there is no such run.
    """
    return _shown(_row(executor, run_id))


def at_rest(executor: Executor, run_id: UUID) -> bool:
    """Whether a run is finished or waits for approval: no worker goes on with it by itself.

    Raises:
        NotFound: there is no such run.
    """
    row = _row(executor, run_id)
    return row.finished_at is not None or row.phase == Phase.WAITING_APPROVAL


def list_runs(executor: Executor, most: int = 20) -> list[dict[str, Any]]:
    """Runs, newest first, without their plans."""
    return [_shown(row) for row in executor.run(queries.LIST_RUNS, {"most": most})]


def result(executor: Executor, run_id: UUID) -> dict[str, Any]:
    """The answer of the run route: what was done, or the plan while it is not applied.

    Raises:
        NotFound: there is no such run.
    """
    run = read_run(executor, run_id)
    told = run["outcome"] or run["plan"] or summed(())
    return {**told, "dry_run": run["dry_run"], "run_id": str(run_id), "phase": run["phase"]}


def count_planned(executor: Executor, run_id: UUID) -> tuple[int, int]:
    """How many cases the plan takes away, and how many of them have been handled."""
    row = executor.run(queries.COUNTS, {"run_id": run_id})[0]
    return row.planned, row.handled


def read_report(
    executor: Executor, run_id: UUID, *, action: str | None = None, after: int = -1, most: int = 100
) -> list[dict[str, Any]]:
    """The plan's lines for people, in order: reasons, outcome, and the texts side by side.

    `action` is one of remove, merge, archive, spare, or None for all of them.

    Raises:
        NotFound: there is no such run.
    """
    _row(executor, run_id)
    rows = executor.run(queries.REPORT, {"run_id": run_id, "action": action, "after": after, "most": most})
    return [dict(row._mapping) for row in rows]  # noqa: SLF001 (SQLAlchemy's public name for it)


def summed(lines: Iterable[Line]) -> dict[str, Any]:
    """Counts and details, as every route that tells of a plan or its outcome shapes them."""
    told: dict[str, list[Any]] = {"removed": [], "merged": [], "archived": [], "spared": []}
    for line in lines:
        match line.action:
            case Action.REMOVE:
                told["removed"].append(line.case_id)
            case Action.MERGE:
                told["merged"].append(
                    {"keeper": line.keeper_id, "removed": line.case_id, "similarity": line.similarity}
                )
            case Action.ARCHIVE:
                told["archived"].append(line.case_id)
            case Action.SPARE:
                told["spared"].append({"case_id": line.case_id, "rule": line.rule, "reason": line.reason})
            case _:
                assert_never(line.action)
    return {
        "removed_cases": len(told["removed"]),
        "merged_cases": len(told["merged"]),
        "archived_cases": len(told["archived"]),
        "details": told,
    }


def _decide(database: Database, run_id: UUID, phase: Phase, by: str) -> None:
    if database.run(queries.DECIDE, {"run_id": run_id, "phase": phase.value, "by": by}):
        return
    database.run(queries.EXPIRE, {})
    row = _row(database, run_id)
    raise Conflict(f"The plan of this run does not wait for approval: the run is in phase {row.phase}.")


def _row(executor: Executor, run_id: UUID) -> Row[Any]:
    rows = executor.run(queries.READ_RUN, {"run_id": run_id})
    if not rows:
        raise NotFound("There is no such run of the CaseBank.")
    return rows[0]


def _held(row: Row[Any]) -> Held:
    return Held(row.run_id, row.token, Phase(row.phase), row.planned_at, row.dry_run)


def _shown(row: Row[Any]) -> dict[str, Any]:
    times = ("started_at", "planned_at", "notified_at", "expires_at", "finished_at")
    return {
        "run_id": str(row.run_id),
        "dry_run": row.dry_run,
        "phase": row.phase,
        "done": row.done,
        "total": row.total,
        "under_way": row.held,
        "decided_by": row.decided_by,
        "error": row.error,
        **{name: None if (at := getattr(row, name)) is None else at.isoformat() for name in times},
    }


def _details(executor: Executor, run_id: UUID, *, applied: bool) -> dict[str, Any]:
    lines = _lines(executor, run_id)
    return summed(filter(None, map(_as_applied, lines)) if applied else map(_as_planned, lines))


def _lines(executor: Executor, run_id: UUID) -> Iterator[Row[Any]]:
    after = -1
    while rows := executor.run(queries.ITEMS, {"run_id": run_id, "after": after, "most": _PAGE}):
        yield from rows
        after = rows[-1].position


def _as_planned(row: Row[Any]) -> Line:
    return Line(Action(row.action), row.case_id, row.rule, row.reason, row.keeper_id, row.similarity)


def _as_applied(row: Row[Any]) -> Line | None:
    """What came of a line of the plan; None where nothing has yet."""
    if row.outcome == "spared":
        return Line(Action.SPARE, row.case_id, row.outcome_rule, row.outcome_reason)
    return _as_planned(row) if row.outcome == "done" or row.action == Action.SPARE else None
