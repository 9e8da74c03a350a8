"""The CaseBank's tasks: weekly pruning, daily rating of cases (reflection), and counting of uses each minute.

Two more tasks run each minute. `casebank.advance` continues a pruning run that was requested, approved or interrupted.
`casebank.suggest` requests suggestions for flagged cases.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from perdure.casebank import executions, reflection
from perdure.casebank.embedding import embed_cases
from perdure.casebank.plan.policy import Rule
from perdure.casebank.runs import prune as pruning
from perdure.casebank.runs import state
from perdure.casebank.runs.prune import RunContext, RunInterrupted
from perdure.channels.notices import bank_of
from perdure.errors import Conflict, PerdureError, Unavailable, loggable
from perdure.runtime import Runtime
from perdure.tasks.process import Process
from perdure.tasks.task import declare
from perdure.tasks.timetable import ScheduledTask

log = logging.getLogger(__name__)


@declare("casebank.prune", base=ScheduledTask, ignore_result=False)
def prune(self: ScheduledTask, *, dry_run: bool = True) -> dict[str, Any] | None:
    """Plan a pruning run, and apply the plan unless `dry_run`.

    Returns the response body of `POST /v1/consolidation/run`.

    If another run is in progress or waits for approval, a scheduled call does nothing and returns `None`.
    """
    bank = _bank(self.process)
    try:
        return _without_quotations(pruning.dry_run(bank) if dry_run else pruning.run(bank))
    except RunInterrupted:
        raise self.refused(Unavailable("This process shuts down; repeat the request.")) from None
    except Conflict as error:
        if not self.is_firing:
            raise
        log.warning("this week's run of the CaseBank is skipped: %s", error.message)
        return None


@declare("casebank.advance", base=ScheduledTask)
def advance(self: ScheduledTask) -> dict[str, Any] | None:
    """Expire a plan that was not approved in time, then continue a requested, approved or interrupted pruning run."""
    runtime = self.process.runtime
    if state.expire(runtime.database):
        log.warning("a plan of the CaseBank was not approved in time and has expired")
    result = pruning.advance(_bank(self.process))
    return None if result is None else _without_quotations(result)


@declare("casebank.count", base=ScheduledTask)
def count(self: ScheduledTask) -> int:
    """Increase each case's use count by the uses that turns have recorded; returns the number of uses added."""
    leaving = self.process.leaving
    return executions.count(self.process.runtime.database, lambda: not leaving.is_set())


@declare("casebank.reflect", base=ScheduledTask, ignore_result=False)
def reflect(self: ScheduledTask) -> dict[str, Any]:
    """Set each case's success rate from its newest uses, and embed the cases without a vector of the embedder."""
    runtime = self.process.runtime
    done = reflection.reflect(runtime.database)
    _embed(runtime, self.process.leaving)
    return {"rated": done.rated, "flagged": done.flagged}


@declare("casebank.suggest", base=ScheduledTask)
def suggest(self: ScheduledTask) -> int | None:
    """Ask the summary model how to improve a few flagged cases; see `reflection.suggest`."""
    runtime = self.process.runtime
    settings = runtime.settings
    model = runtime.models(settings.summary_model or settings.model)
    return reflection.suggest(runtime.database, runtime.clock, model, settings.model_timeout_s)


def _without_quotations(result: dict[str, Any]) -> dict[str, Any]:
    """`result` without users' words: the result backend and Flower keep the result even if a user is erased.

    The plan may spare a case because its question differs from a similar case's question in one word. The returned
    reason names the kind of the word, but not the word itself.
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
            raise RunInterrupted

    return bank_of(process.runtime, pause)


def _embed(runtime: Runtime, leaving: threading.Event) -> None:
    try:
        for looked in embed_cases(runtime.database, runtime.embedder):
            log.info("embedded cases: %d examined", looked)
            if leaving.is_set():  # the next daily run embeds the others
                return
    except Unavailable:
        raise
    except PerdureError as error:  # the rates are committed; the next daily run embeds the cases
        log.warning("cases could not be embedded; the next run retries: %s", loggable(error))
