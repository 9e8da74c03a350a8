"""The CaseBank's tasks: pruned weekly, rated daily, uses counted each minute.

A run that was approved, or broken off with its process, is taken up within a minute.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import shared_task

from perdure.casebank import executions, reflection
from perdure.casebank.embedding import embed_cases
from perdure.casebank.plan.policy import Rule
from perdure.casebank.runs import prune as pruning
from perdure.casebank.runs import state
from perdure.casebank.runs.prune import Interrupted, RunContext
from perdure.casebank.search import build_indexes
from perdure.channels.notices import bank_of
from perdure.errors import Conflict, PerdureError, Unavailable, loggable
from perdure.runtime import Runtime
from perdure.tasks.process import Process
from perdure.tasks.scheduled import ScheduledTask

log = logging.getLogger(__name__)


@shared_task(name="casebank.prune", bind=True, base=ScheduledTask, ignore_result=False)
def prune(self: ScheduledTask, *, dry_run: bool = True) -> dict[str, Any] | None:
    """Make the plan, and unless it is a dry run have it applied; the result is the run route's.

    A week in which another run is under way, or still waits for its approval, is left out.
    """
    bank = _bank(self.process)
    try:
        return _without_quotations(pruning.dry_run(bank) if dry_run else pruning.run(bank))
    except Interrupted:
        raise self.refused(Unavailable("This process is leaving; please ask again.")) from None
    except Conflict as error:
        if not self.is_firing:
            raise
        log.warning("this week's run of the CaseBank is left out: %s", error.message)
        return None


@shared_task(name="casebank.advance", bind=True, base=ScheduledTask)
def advance(self: ScheduledTask) -> dict[str, Any] | None:
    """Expire a plan that was not approved in time; continue an approved or interrupted run."""
    runtime = self.process.runtime
    if state.expire(runtime.database):
        log.warning("a plan of the CaseBank was not approved in time, and is void")
    result = pruning.advance(_bank(self.process))
    return None if result is None else _without_quotations(result)


@shared_task(name="casebank.count", bind=True, base=ScheduledTask)
def count(self: ScheduledTask) -> int:
    """Add to the cases the uses that turns have recorded."""
    leaving = self.process.leaving
    return executions.count(self.process.runtime.database, lambda: not leaving.is_set())


@shared_task(name="casebank.reflect", bind=True, base=ScheduledTask, ignore_result=False)
def reflect(self: ScheduledTask) -> dict[str, Any]:
    """Set the rates of cases from what came of their newest uses; make them findable that are not."""
    runtime = self.process.runtime
    done = reflection.reflect(runtime.database)
    _make_findable(runtime)
    return {"rated": done.rated, "flagged": done.flagged}


@shared_task(name="casebank.suggest", bind=True, base=ScheduledTask)
def suggest(self: ScheduledTask) -> int | None:
    """Have the summary model say how flagged cases could be better: a few a minute."""
    runtime = self.process.runtime
    settings = runtime.settings
    model = runtime.models(settings.summary_model or settings.model)
    return reflection.suggest(runtime.database, runtime.clock, model, settings.model_timeout_s)


def _without_quotations(result: dict[str, Any]) -> dict[str, Any]:
    """`result` as the result backend and Flower may keep it, which no erasure reaches: without words of users.

    Where cases are spared since their questions differ, the reason says in what kind of word, but not in which.
    """
    details = result["details"]
    spared = [{**line, "reason": _without_words(line)} for line in details["spared"]]
    return {**result, "details": {**details, "spared": spared}}


def _without_words(line: dict[str, Any]) -> str:
    near, but, differing = str(line["reason"]).partition(", but ")
    return near + but + differing.partition(" (")[0] if line["rule"] == Rule.DIFFERENT else near + but + differing


def _bank(process: Process) -> RunContext:
    def pause(seconds: float) -> None:
        if process.leaving.wait(seconds):
            raise Interrupted

    return bank_of(process.runtime, pause)


def _make_findable(runtime: Runtime) -> None:
    try:
        for looked in embed_cases(runtime.database, runtime.embedder):
            log.info("cases that lacked a vector: %d looked at", looked)
    except Unavailable:
        raise
    except PerdureError as error:  # rates are set all the same; tomorrow it is tried again
        log.warning("cases get their vectors later: %s", loggable(error))
    build_indexes(runtime.database)
