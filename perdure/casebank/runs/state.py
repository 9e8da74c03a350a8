"""The stored state of runs: claims, progress, approval, and the objects that routes return.

At most one run is unfinished. The process that executes the run holds a lease and a fencing token. The token increases
with each claim, and writes under an old token are refused. Another process resumes a run whose lease expired. A run
that waits for approval continues when it is approved, and expires if it is not approved within `approval_expires_s`.

A dry run requested over HTTP is stored like a run. One dry run may be unfinished at the same time as a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, assert_never
from uuid import UUID

from sqlalchemy import Row

from perdure.casebank.plan.policy import Action, PlanItem
from perdure.casebank.runs import queries
from perdure.clock import Clock
from perdure.database.bodies import body
from perdure.database.engine import Database, Executor
from perdure.errors import Conflict, NotFound
from perdure.ids import new_id

LEASE_S = 60.0
"""Seconds without progress after which another process may claim a run."""

_PAGE = 1_000
_TRIES = 3


class RunPhase(StrEnum):
    """The phase of a run. The last four are final."""

    PLANNING = "planning"
    NOTIFYING = "notifying"
    WAITING_APPROVAL = "waiting_approval"
    APPLYING = "applying"
    REPORTING = "reporting"
    DONE = "done"
    WITHHELD = "withheld"
    REJECTED = "rejected"
    EXPIRED = "expired"


_FINAL = frozenset({RunPhase.DONE, RunPhase.WITHHELD, RunPhase.REJECTED, RunPhase.EXPIRED})
_BEFORE_APPLYING = frozenset({RunPhase.PLANNING, RunPhase.NOTIFYING, RunPhase.WAITING_APPROVAL})


class RunLost(Exception):
    """Another process claimed the run. This process must stop, and write nothing."""


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A run that this process claimed under `token`."""

    run_id: UUID
    token: int
    phase: RunPhase
    dry_run: bool = False

    @property
    def fence(self) -> dict[str, Any]:
        """Parameters of statements that write only while the claim is valid."""
        return {"run_id": self.run_id, "token": self.token, "lease_s": LEASE_S}


def begin_or_resume(database: Database, clock: Clock) -> ClaimedRun:
    """Claim the interrupted run or, if there is none, begin a new run.

    Raises:
        Conflict: a run is under way, or waits for approval; the message names it.
    """
    database.run(queries.EXPIRE, {})
    held = resume(database, dry_runs=False)
    if held is not None:
        return held
    begun = database.run(queries.BEGIN, {"run_id": new_id(clock), "dry_run": False, "lease_s": LEASE_S})
    if begun:
        return _claimed_run(begun[0])
    raise _under_way(database)


def request(database: Database, clock: Clock, *, dry_run: bool) -> UUID:
    """Store a request for a run or a dry run; returns the run's id. A worker claims the run (`prune.advance`).

    If `dry_run` is false and an unfinished run is waiting for a worker, returns the id of that run instead. If
    `dry_run` is true and a dry run is unfinished, returns the id of that dry run, even if a worker has claimed it.

    Raises:
        Conflict: a run is under way, or waits for approval; the message names it.
    """
    database.run(queries.EXPIRE, {})
    run_id = new_id(clock)
    for _ in range(_TRIES):
        if database.run(queries.BEGIN, {"run_id": run_id, "dry_run": dry_run, "lease_s": None}):
            return run_id
        for row in database.run(queries.UNDER_WAY, {"dry_run": dry_run}):
            if not dry_run and (row.under_way or row.phase == RunPhase.WAITING_APPROVAL):
                raise _under_way(database)
            unfinished: UUID = row.run_id
            return unfinished
    raise _under_way(database, dry_run=dry_run)  # runs began and finished between these statements


def resume(database: Database, *, dry_runs: bool = True) -> ClaimedRun | None:
    """Claim an unfinished run that no process holds; `None` if there is no such run.

    Runs that wait for approval are excluded. Dry runs are included if `dry_runs` is true.
    """
    taken = database.run(queries.TAKE_OVER, {"lease_s": LEASE_S, "dry_runs": dry_runs})
    return _claimed_run(taken[0]) if taken else None


def _under_way(database: Database, *, dry_run: bool = False) -> Conflict:
    rows = database.run(queries.UNDER_WAY, {"dry_run": dry_run})
    named = f": {rows[0].run_id}, in phase {rows[0].phase}" if rows else ""
    return Conflict(f"A run of the CaseBank is already under way{named}.")


def progress(executor: Executor, run: ClaimedRun, done: int, total: int) -> datetime:
    """Store the progress of the phase, and renew the lease; returns the time.

    Raises:
        RunLost: another process claimed the run.
    """
    rows = executor.run(queries.PROGRESS, {**run.fence, "done": done, "total": total})
    if not rows:
        raise RunLost
    now: datetime = rows[0].now
    return now


def release(database: Database, run: ClaimedRun, error: str | None = None) -> None:
    """Release the lease, after a failure or at shutdown, so that another process can claim the run at once."""
    database.run(queries.RELEASE, {**run.fence, "error": error})


def enter(
    database: Database,
    run: ClaimedRun,
    phase: RunPhase,
    *,
    total: int = 0,
    error: str | None = None,
    expires_s: float = 0,
) -> ClaimedRun:
    """Enter a phase, and renew the lease unless the phase is final or `WAITING_APPROVAL`.

    Raises:
        RunLost: another process claimed the run.
    """
    parameters = {
        **run.fence,
        "phase": phase.value,
        "total": total,
        "error": error,
        "expires_s": expires_s,
        "finished": phase in _FINAL,
    }
    if not database.run(queries.ENTER, parameters):
        raise RunLost
    return replace(run, phase=phase)


def approve(database: Database, run_id: UUID, by: str) -> None:
    """Approve the plan. The caller must then wake a worker, which applies the plan (`prune.advance`).

    Raises:
        NotFound: there is no such run.
        Conflict: the run does not wait for approval.
    """
    _decide(database, run_id, RunPhase.APPLYING, by)


def reject(database: Database, run_id: UUID, by: str) -> None:
    """Reject the plan.

    Raises:
        NotFound: there is no such run.
        Conflict: the run does not wait for approval.
    """
    _decide(database, run_id, RunPhase.REJECTED, by)


def expire(database: Database) -> int:
    return len(database.run(queries.EXPIRE, {}))


def read_run(executor: Executor, run_id: UUID) -> dict[str, Any]:
    """The body of `GET /v1/consolidation/runs/{id}`.

    Raises:
        NotFound: there is no such run.
    """
    row = _row(executor, run_id)
    planned = row.phase != RunPhase.PLANNING
    applied = not row.dry_run and row.phase not in _BEFORE_APPLYING | {RunPhase.REJECTED, RunPhase.EXPIRED}
    return {
        **body(row),
        "plan": summarize(_items(executor, run_id, applied=False)) if planned else None,
        "outcome": summarize(_items(executor, run_id, applied=True)) if applied else None,
    }


def read_progress(executor: Executor, run_id: UUID) -> dict[str, Any]:
    """A run without its plan, as in `list_runs`.

    Raises:
        NotFound: there is no such run.
    """
    return body(_row(executor, run_id))


def at_rest(executor: Executor, run_id: UUID) -> bool:
    """Whether a run is finished or waits for approval. No worker continues such a run.

    Raises:
        NotFound: there is no such run.
    """
    row = _row(executor, run_id)
    return row.finished_at is not None or row.phase == RunPhase.WAITING_APPROVAL


def list_runs(executor: Executor, most: int = 20) -> list[dict[str, Any]]:
    """Runs, newest first, without their plans."""
    return [body(row) for row in executor.run(queries.LIST_RUNS, {"most": most})]


def result(executor: Executor, run_id: UUID) -> dict[str, Any]:
    """The outcome of a run, or its plan if the plan is not applied yet, as routes and commands return it.

    Raises:
        NotFound: there is no such run.
    """
    run = read_run(executor, run_id)
    summary = run["outcome"] or run["plan"] or summarize(())
    return {**summary, "dry_run": run["dry_run"], "run_id": str(run_id), "phase": run["phase"]}


def read_report(
    executor: Executor, run_id: UUID, *, action: str | None = None, after: int = -1, most: int = 100
) -> list[dict[str, Any]]:
    """The plan's items for the administrator, in order. Each has its reason, outcome, and the texts of case and keeper.

    `action` selects `remove`, `merge`, `archive` or `spare` items; `None` selects all items.

    Raises:
        NotFound: there is no such run.
    """
    _row(executor, run_id)
    rows = executor.run(queries.REPORT, {"run_id": run_id, "action": action, "after": after, "most": most})
    return [dict(row._mapping) for row in rows]  # noqa: SLF001 (SQLAlchemy's public name for it)


def summarize(items: Iterable[PlanItem | Row[Any]]) -> dict[str, Any]:
    """Counts and details of a plan or an outcome, in the form that routes and notices use.

    `items` are the planner's items, or rows of `queries.ITEMS`.
    """
    details: dict[str, list[Any]] = {"removed": [], "merged": [], "archived": [], "spared": []}
    for item in items:
        match action := Action(item.action):
            case Action.REMOVE:
                details["removed"].append(item.case_id)
            case Action.MERGE:
                details["merged"].append(
                    {"keeper": item.keeper_id, "removed": item.case_id, "similarity": item.similarity}
                )
            case Action.ARCHIVE:
                details["archived"].append(item.case_id)
            case Action.SPARE:
                details["spared"].append({"case_id": item.case_id, "rule": item.rule, "reason": item.reason})
            case _:
                assert_never(action)
    return {
        "removed_cases": len(details["removed"]),
        "merged_cases": len(details["merged"]),
        "archived_cases": len(details["archived"]),
        "details": details,
    }


def _decide(database: Database, run_id: UUID, phase: RunPhase, by: str) -> None:
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


def _claimed_run(row: Row[Any]) -> ClaimedRun:
    return ClaimedRun(row.run_id, row.token, RunPhase(row.phase), row.dry_run)


def _items(executor: Executor, run_id: UUID, *, applied: bool) -> Iterator[Row[Any]]:
    after = -1
    parameters = {"run_id": run_id, "applied": applied, "most": _PAGE}
    while rows := executor.run(queries.ITEMS, {**parameters, "after": after}):
        yield from rows
        after = rows[-1].position
