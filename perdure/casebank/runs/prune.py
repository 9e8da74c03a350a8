"""A run from its beginning to its end: plan, notify, approve, apply, report; and the dry run.

Each phase begins with a commit and may be entered again: whoever takes up a run goes on from
the phase that its row names. A dry run computes the same plan and writes nothing at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from perdure.casebank import queries as casebank_queries
from perdure.casebank.plan.compute import Item, compute, read_candidates
from perdure.casebank.runs import queries as runs_queries
from perdure.casebank.runs import state
from perdure.casebank.runs.apply import apply
from perdure.casebank.runs.notify import NotifyFailed, Post, notify
from perdure.casebank.runs.pace import Pace
from perdure.casebank.runs.state import Held, Line, Phase, RunLost
from perdure.clock import Clock
from perdure.database.engine import Database, as_json
from perdure.errors import loggable
from perdure.settings import CasebankSettings, PruneApproval

log = logging.getLogger(__name__)

_PAGE = 100
_TOLD_EVERY_S = 1.0


class Interrupted(Exception):
    """What `pause` raises where the process is told to leave: the run is somebody else's from here."""


def _silent(_phase: Phase, _done: int, _total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Bank:
    """What a run needs.

    `post` sends a notice; `pause` waits for that many seconds, or raises `Interrupted`; `tell` is called with phase,
    done and total after each piece of work.
    """

    database: Database
    clock: Clock
    limits: CasebankSettings
    post: Post
    pause: Callable[[float], object] = time.sleep
    tell: Callable[[Phase, int, int], object] = _silent


def dry_run(bank: Bank) -> dict[str, Any]:
    """The plan as a run would make it now. Nothing is written, not even a run."""
    pace = _pace(bank)

    def step(done: int, total: int) -> None:
        bank.tell(Phase.PLANNING, done, total)
        pace.rest()

    items = _compute(bank, bank.database.run(casebank_queries.NOW, {})[0].now, step)
    told = state.summed(map(_line, items))
    _log("a dry run of the CaseBank would have", told)
    return {**told, "dry_run": True, "run_id": None}


def run(bank: Bank) -> dict[str, Any]:
    """Begin a run, or go on with one that was broken off, as far as it goes now; the run route's answer.

    With approval `manual` that is as far as its plan: the answer's `phase` says so.

    Raises:
        Conflict: a run is under way or waits for approval.
    """
    return _advance(bank, state.begin_or_resume(bank.database, bank.clock))


def advance(bank: Bank) -> dict[str, Any] | None:
    """Go on with a run that was requested, approved or interrupted, if there is one."""
    held = state.resume(bank.database)
    return None if held is None else _advance(bank, held)


def _advance(bank: Bank, held: Held) -> dict[str, Any]:
    """Phase by phase, until the run is finished or waits."""
    try:
        while (step := _STEPS.get(held.phase)) is not None:
            held = step(bank, held)
    except RunLost:
        log.warning("run %s was taken over by another process", held.run_id)
    except Interrupted:
        state.release(bank.database, held)
        log.info("run %s is left to another process, which goes on with it within a minute", held.run_id)
    except Exception as error:
        state.release(bank.database, held, loggable(error))
        raise
    return state.result(bank.database, held.run_id)


def _plan(bank: Bank, held: Held) -> Held:
    """Make the plan and write it down."""
    rows = bank.database.run(runs_queries.PLANNED_AT, held.fence)
    if not rows:
        raise RunLost
    telling = _Telling(bank, held)
    items = _compute(bank, rows[0].planned_at, telling.step)
    for start in range(0, len(items), _PAGE):
        page = [_written(number, items[number]) for number in range(start, min(start + _PAGE, len(items)))]
        if not bank.database.run(runs_queries.WRITE_ITEMS, {**held.fence, "items": as_json(page)}):
            raise RunLost
        telling.step(start + len(page), len(items))
    _log(f"run {held.run_id} of the CaseBank plans to have", state.summed(map(_line, items)))
    planned = replace(held, planned_at=rows[0].planned_at)
    return state.enter(bank.database, planned, Phase.DONE if held.dry_run else Phase.NOTIFYING)


def _notify(bank: Bank, held: Held) -> Held:
    """Tell of the plan. If that fails nothing is removed."""
    run = state.read_run(bank.database, held.run_id)
    total = _total(run["plan"])
    waits_s = bank.limits.approval_expires_s if bank.limits.approval is PruneApproval.MANUAL and total else None
    tell = partial(notify, url=_url(bank), post=bank.post, pause=bank.pause)
    try:
        tell("casebank.plan", run, run["plan"], approval_within_s=waits_s)
    except NotifyFailed as error:
        withheld = f"nothing was removed, because the notice of the plan did not arrive: {error}"
        log.error("run %s of the CaseBank: %s", held.run_id, withheld)  # noqa: TRY400 (a receiver's failure, not ours)
        return state.enter(bank.database, held, Phase.WITHHELD, error=withheld)
    if waits_s is not None:
        return state.enter(bank.database, held, Phase.WAITING_APPROVAL, total=total, notified=True, expires_s=waits_s)
    return state.enter(bank.database, held, Phase.APPLYING, total=total, notified=True)


def _apply(bank: Bank, held: Held) -> Held:
    """Carry out what is left of the plan."""
    pace = _pace(bank)

    def step(done: int, total: int) -> None:
        bank.tell(Phase.APPLYING, done, total)
        pace.rest()

    apply(bank.database, held, bank.limits, step)
    return state.enter(bank.database, held, Phase.REPORTING)


def _report(bank: Bank, held: Held) -> Held:
    """Tell of the results. What was done is done, whether or not that arrives."""
    run = state.read_run(bank.database, held.run_id)
    _log(f"run {held.run_id} of the CaseBank has", run["outcome"])
    try:
        notify("casebank.outcome", run, run["outcome"], url=_url(bank), post=bank.post, pause=bank.pause)
    except NotifyFailed as error:
        return state.enter(bank.database, held, Phase.DONE, error=f"the notice of the results did not arrive: {error}")
    return state.enter(bank.database, held, Phase.DONE)


_STEPS: dict[Phase, Callable[[Bank, Held], Held]] = {
    Phase.PLANNING: _plan,
    Phase.NOTIFYING: _notify,
    Phase.APPLYING: _apply,
    Phase.REPORTING: _report,
}


class _Telling:
    """Says how far the planning is, every second or so, and rests in between."""

    def __init__(self, bank: Bank, held: Held) -> None:
        self._bank = bank
        self._held = held
        self._pace = _pace(bank)
        self._told_at = time.monotonic()

    def step(self, done: int, total: int) -> None:
        """A piece of work is done."""
        self._bank.tell(Phase.PLANNING, done, total)
        if time.monotonic() - self._told_at >= _TOLD_EVERY_S:
            state.progress(self._bank.database, self._held, done, total)
            self._told_at = time.monotonic()
        self._pace.rest()


def _compute(bank: Bank, now: datetime, step: Callable[[int, int], None]) -> list[Item]:
    total = bank.database.run(runs_queries.COUNT_ACTIVE, {})[0].cases
    return compute(read_candidates(bank.database, _PAGE), bank.limits, now, total, step)


def _pace(bank: Bank) -> Pace:
    return Pace(bank.limits.load_percent, bank.pause)


def _url(bank: Bank) -> str | None:
    url = bank.limits.notify_url
    return None if url is None else url.get_secret_value()


def _total(plan: dict[str, Any]) -> int:
    return int(plan["removed_cases"] + plan["merged_cases"] + plan["archived_cases"])


def _line(item: Item) -> Line:
    return Line(item.action, item.facts.case_id, item.rule, item.reason, item.keeper_id, item.similarity)


def _written(position: int, item: Item) -> dict[str, Any]:
    accessed = item.facts.last_accessed_at
    return {
        "position": position,
        "action": item.action,
        "case_id": item.facts.case_id,
        "rule": item.rule,
        "reason": item.reason,
        "keeper_id": item.keeper_id,
        "similarity": item.similarity,
        "keeper_weight": item.keeper_weight,
        "usage_count": item.facts.usage_count,
        "success_rate": item.facts.success_rate,
        "last_accessed_at": None if accessed is None else accessed.isoformat(),
    }


def _log(who: str, told: dict[str, Any]) -> None:
    log.info(
        "%s removed %d, merged %d and archived %d cases, and spared %d",
        who,
        told["removed_cases"],
        told["merged_cases"],
        told["archived_cases"],
        len(told["details"]["spared"]),
    )
