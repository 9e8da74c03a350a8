"""Takes a run through its phases: plan, notify, approve, apply, report. Also computes dry runs.

Each phase begins with a commit and can be repeated: a worker that claims a run continues with the phase in the run's
row. A dry run computes the same plan as a run and changes no case.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from perdure.casebank import queries as casebank_queries
from perdure.casebank.plan.policy import PlanItem
from perdure.casebank.runs import queries as runs_queries
from perdure.casebank.runs import state
from perdure.casebank.runs.notify import NotifyFailed, Post, notify
from perdure.casebank.runs.state import ClaimedRun, RunLost, RunPhase
from perdure.clock import Clock, iso
from perdure.database.engine import Database, as_json
from perdure.errors import loggable
from perdure.settings import CasebankSettings, PruneApproval

log = logging.getLogger(__name__)

_PAGE = 100
_WRITE_EVERY_S = 1.0
_SHORTEST_REST_S = 0.001


class RunInterrupted(Exception):
    """Raised by `pause` when the process shuts down. The run is then released, so that another process continues it."""


def _silent(_phase: RunPhase, _done: int, _total: int) -> None:
    """The default of `on_progress`: reports nothing."""


@dataclass(frozen=True)
class RunContext:
    """The dependencies of a run.

    `post` sends a notice. `pause` waits the given seconds, or raises `RunInterrupted`. `on_progress` is called after
    each piece of work with the phase, the work done and the total.
    """

    database: Database
    clock: Clock
    limits: CasebankSettings
    post: Post
    pause: Callable[[float], object] = time.sleep
    on_progress: Callable[[RunPhase, int, int], object] = _silent


def dry_run(context: RunContext) -> dict[str, Any]:
    """The plan that a run would make now. Writes nothing and creates no run."""
    now = context.database.run(casebank_queries.NOW, {})[0].now
    items = _compute(context, now, _reporter(context, RunPhase.PLANNING))
    summary = state.summarize(items)
    _log("a dry run of the CaseBank would have", summary)
    return {**summary, "dry_run": True, "run_id": None}


def run(context: RunContext) -> dict[str, Any]:
    """Begin a run, or continue an interrupted run, until it finishes or waits for approval.

    Returns `state.result`. If the run waits for approval, `phase` in the result is `waiting_approval`.

    Raises:
        Conflict: a run is under way or waits for approval.
    """
    return _advance(context, state.begin_or_resume(context.database, context.clock))


def advance(context: RunContext) -> dict[str, Any] | None:
    """Execute a requested, approved or interrupted run. Returns `state.result`; `None` if there is no such run."""
    claimed = state.resume(context.database)
    return None if claimed is None else _advance(context, claimed)


def _advance(context: RunContext, claimed: ClaimedRun) -> dict[str, Any]:
    """Execute the run's phases until the run finishes, waits for approval, or is claimed by another process."""
    try:
        while (execute := _PHASES.get(claimed.phase)) is not None:
            claimed = execute(context, claimed)
    except RunLost:
        log.warning("run %s of the CaseBank was claimed by another process: this one stops running it", claimed.run_id)
    except RunInterrupted:
        state.release(context.database, claimed)
        log.info("run %s of the CaseBank was released; another process continues it within a minute", claimed.run_id)
    except Exception as error:
        state.release(context.database, claimed, loggable(error))
        raise
    return state.result(context.database, claimed.run_id)


def _plan(context: RunContext, claimed: ClaimedRun) -> ClaimedRun:
    """Compute and store the plan."""
    rows = context.database.run(runs_queries.PLANNED_AT, claimed.fence)
    if not rows:
        raise RunLost
    report = _reporter(context, RunPhase.PLANNING, claimed)
    items = _compute(context, rows[0].planned_at, report)
    for start in range(0, len(items), _PAGE):
        page = [_item_as_json(number, items[number]) for number in range(start, min(start + _PAGE, len(items)))]
        if not context.database.run(runs_queries.WRITE_ITEMS, {**claimed.fence, "items": as_json(page)}):
            raise RunLost
        report(start + len(page), len(items))
    _log(f"run {claimed.run_id} of the CaseBank plans to have", state.summarize(items))
    return state.enter(context.database, claimed, RunPhase.DONE if claimed.dry_run else RunPhase.NOTIFYING)


def _notify(context: RunContext, claimed: ClaimedRun) -> ClaimedRun:
    """Send the plan to the administrator. If the notice fails, the run ends without changes."""
    run = state.read_run(context.database, claimed.run_id)
    total = _total(run["plan"])
    waits_s = context.limits.approval_expires_s if context.limits.approval is PruneApproval.MANUAL and total else None
    send = partial(notify, url=_url(context), post=context.post, pause=context.pause)
    try:
        send("casebank.plan", run, run["plan"], approval_within_s=waits_s)
    except NotifyFailed as error:
        withheld = f"nothing was removed, because the notice of the plan did not arrive: {error}"
        log.error("run %s of the CaseBank: %s", claimed.run_id, withheld)  # noqa: TRY400 (a receiver's failure, not ours)
        return state.enter(context.database, claimed, RunPhase.WITHHELD, error=withheld)
    if waits_s is not None:
        return state.enter(context.database, claimed, RunPhase.WAITING_APPROVAL, total=total, expires_s=waits_s)
    return state.enter(context.database, claimed, RunPhase.APPLYING, total=total)


def _apply(context: RunContext, claimed: ClaimedRun) -> ClaimedRun:
    """Apply the rest of the plan."""
    from perdure.casebank.runs.apply import apply  # noqa: PLC0415 (numpy takes time and memory to import)

    apply(context.database, claimed, context.limits, _reporter(context, RunPhase.APPLYING))
    return state.enter(context.database, claimed, RunPhase.REPORTING)


def _report(context: RunContext, claimed: ClaimedRun) -> ClaimedRun:
    """Send the outcome. A notice that fails does not fail the run."""
    run = state.read_run(context.database, claimed.run_id)
    _log(f"run {claimed.run_id} of the CaseBank has", run["outcome"])
    try:
        notify("casebank.outcome", run, run["outcome"], url=_url(context), post=context.post, pause=context.pause)
    except NotifyFailed as error:
        return state.enter(
            context.database, claimed, RunPhase.DONE, error=f"the notice of the results did not arrive: {error}"
        )
    return state.enter(context.database, claimed, RunPhase.DONE)


_PHASES: dict[RunPhase, Callable[[RunContext, ClaimedRun], ClaimedRun]] = {
    RunPhase.PLANNING: _plan,
    RunPhase.NOTIFYING: _notify,
    RunPhase.APPLYING: _apply,
    RunPhase.REPORTING: _report,
}


def _reporter(context: RunContext, phase: RunPhase, planned: ClaimedRun | None = None) -> Callable[[int, int], None]:
    """Reports the work done and the total, then pauses, so that the run works `load_percent` of the time.

    If `planned` is given, its progress is stored at most once a second. A pause of less than a millisecond is put off
    until a later call. With `load_percent` 100, each call nevertheless runs `pause(0)`, which may raise to stop the
    work.
    """
    rest_per_work = 100 / context.limits.load_percent - 1
    rested_at = written_at = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal rested_at, written_at
        context.on_progress(phase, done, total)
        if planned is not None and time.monotonic() - written_at >= _WRITE_EVERY_S:
            state.progress(context.database, planned, done, total)
            written_at = time.monotonic()
        rest_s = (time.monotonic() - rested_at) * rest_per_work
        if rest_s >= _SHORTEST_REST_S or not rest_per_work:
            context.pause(rest_s)
            rested_at = time.monotonic()

    return report


def _compute(context: RunContext, now: datetime, on_progress: Callable[[int, int], None]) -> list[PlanItem]:
    from perdure.casebank.plan.compute import (  # noqa: PLC0415 (numpy takes time and memory to import)
        compute,
        read_candidates,
        read_contents,
    )

    total = context.database.run(runs_queries.COUNT_ACTIVE, {})[0].cases
    pages, read = read_candidates(context.database, _PAGE), partial(read_contents, context.database)
    return compute(pages, read, context.limits, now, total=total, on_progress=on_progress)


def _url(context: RunContext) -> str | None:
    url = context.limits.notify_url
    return None if url is None else url.get_secret_value()


def _total(plan: dict[str, Any]) -> int:
    return int(plan["removed_cases"] + plan["merged_cases"] + plan["archived_cases"])


def _item_as_json(position: int, item: PlanItem) -> dict[str, Any]:
    accessed = item.facts.last_accessed_at
    return {
        "position": position,
        "action": item.action,
        "case_id": item.case_id,
        "rule": item.rule,
        "reason": item.reason,
        "keeper_id": item.keeper_id,
        "similarity": item.similarity,
        "keeper_weight": item.keeper_weight,
        "usage_count": item.facts.usage_count,
        "success_rate": item.facts.success_rate,
        "last_accessed_at": iso(accessed),
    }


def _log(subject: str, summary: dict[str, Any]) -> None:
    log.info(
        "%s removed %d, merged %d and archived %d cases, and spared %d",
        subject,
        summary["removed_cases"],
        summary["merged_cases"],
        summary["archived_cases"],
        len(summary["details"]["spared"]),
    )
