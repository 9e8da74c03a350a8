"""Executes tool calls, each in a thread of its own, within its time limit and under the session's lease.

The tool's effect class decides what happens if a call exceeds its time limit or its outcome is unknown. A `pure` or
`idempotent` call runs again with the same effect id. An `unsafe` call is probed; if the tool has no probe, the outcome
stays unknown.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, assert_never
from uuid import UUID

from perdure.access.tenants import tenant_of, user_of
from perdure.database.engine import as_json
from perdure.errors import OutcomeUnknown, PerdureError, ToolError, loggable
from perdure.files.store import Call
from perdure.memory.recall.agent_memory import Means, OwnMemory
from perdure.runtime import Runtime
from perdure.text.untrusted import cut, message_of, storable
from perdure.timetable.user_reminders import UserReminders
from perdure.tools import event_loop, guarded, progress
from perdure.tools.leaks import Leaks
from perdure.tools.registry import (
    MAX_RESULT_CHARS,
    DidNotHappen,
    Effect,
    Happened,
    ProbeOutcome,
    ToolContext,
    Unknown,
)
from perdure.tools.sources import RunnableTool
from perdure.tools.variables import Change, VariableSet, WorkingVariables
from perdure.turns.calls import queries
from perdure.turns.calls.hooked import ToolHooks
from perdure.turns.calls.ledger import CallLedger
from perdure.turns.calls.plan import Planned
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME, Result
from perdure.turns.lease.tenure import LeaseLost, TurnRow, TurnScope

log = logging.getLogger(__name__)

_MOST_LOGGED = 10_000
"""If an error's message has more characters, the error's traceback is not logged."""

_MOST_CAUSES = 50

_POLL_S = 0.5
"""Seconds between two checks for a lost lease."""

_RECORDING_S = 5.0
"""Extra seconds to record a result that arrived within the time limit."""

TRIED_BEFORE = "An earlier attempt at this call was interrupted and may have taken effect."
"""Appended to the error of a repeated `idempotent` call.

If the model calls the tool again, the new call has a new effect id, so the effect may happen twice.
"""


class NotBegun(Exception):
    """The lease or the time limit expired before the tool's function was called, so the call had no effect."""


class CallThread:
    """Runs one call, or its probe, in a thread. Puts itself into the queue `done` at the end."""

    def __init__(
        self,
        planned: Planned,
        work: Callable[[], Any],
        until: float,
        context: ToolContext,
        done: queue.SimpleQueue[CallThread],
        *,
        arrived: threading.Event | None = None,
    ) -> None:
        self.planned = planned
        self._until = until
        self._arrived = arrived or threading.Event()
        self._context = context
        self.outcome: Any = None
        self._work = work
        self._done = done
        self.thread = threading.Thread(
            target=copy_context().run, args=(self._go,), name=f"perdure-tool-{planned.call.name[:40]}", daemon=True
        )
        self.thread.start()

    @property
    def until(self) -> float:
        """The call's deadline (monotonic), extended by `_RECORDING_S` seconds if its result arrived in time."""
        return self._until + (_RECORDING_S if self._arrived.is_set() else 0.0)

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def abandon(self, leaks: Leaks) -> None:
        """Let the thread run on its own: it is told to stop, can no longer change variables, and counts as leaked."""
        self._context.working_variables.revoke()
        self._context.cancelled.set()
        leaks.add(self.thread)

    def _go(self) -> None:
        try:
            self._run()
        finally:
            self._done.put(self)

    def _run(self) -> None:
        try:
            self.outcome = self._work()
        except NotBegun as error:
            self.outcome = error
        except ToolError as error:
            self.outcome = error
            # The error's own message is not logged: it may quote a user's text. A `ToolError` that the tool itself
            # raised is an answer to the model, and has no traceback.
            cause = error.__cause__
            kind, unexpected = type(cause or error).__name__, None if isinstance(cause, ToolError) else cause
            log.info("tool %s failed: %s", self.planned.call.name, kind, exc_info=_loggable_cause(unexpected))
        except BaseException as error:
            self.outcome = ToolError(f"{type(error).__name__}: the tool was aborted.")
            log.exception("tool %s raised an unexpected error: its call failed", self.planned.call.name)


def _loggable_cause(error: BaseException | None) -> BaseException | None:
    """Return `error` if its traceback may be logged; `None` if `error` or one of its causes has a very long message."""
    each = error
    for _ in range(_MOST_CAUSES):
        if each is None:
            return error
        if len(message_of(each)) > _MOST_LOGGED:
            return None
        each = each.__cause__ or each.__context__
    return None


def memory_of_call(runtime: Runtime, turn: TurnRow, effect_id: UUID) -> OwnMemory:
    """The memory of the turn's user, for one tool call."""
    settings = runtime.settings
    means = Means(runtime.recall, settings.consolidation, settings.memory.recall_timeout_s)
    zone = turn.zone(settings.timezone)
    return OwnMemory(means, turn.user_id, turn.session_id, turn.turn_id, effect_id, turn.channel, zone)


def outcome_result(run: CallThread) -> Result:
    """The result of a call whose thread has ended."""
    planned = run.planned
    if isinstance(run.outcome, PerdureError):
        text = f"Error: {run.outcome.message}"
        if planned.repeated and planned.tool is not None and planned.tool.effect is Effect.IDEMPOTENT:
            text = f"{text}\n{TRIED_BEFORE}"
        return Result(planned.position, "failed", text, planned.effect_id)
    return Result(planned.position, "done", str(run.outcome), planned.effect_id)


def result_of(status: str, text: str) -> str:
    """The text of a recorded result.

    Raises:
        ToolError, OutcomeUnknown: the call failed, or its outcome was unknown.
    """
    if status == "done":
        return text
    raise OutcomeUnknown(text) if status == "unknown" else ToolError(text)


class CallExecutor:
    """Runs the calls of one message concurrently, for the turn at hand."""

    def __init__(
        self,
        runtime: Runtime,
        scope: TurnScope,
        turn: TurnRow,
        *,
        hooks: ToolHooks,
        ledger: CallLedger,
        variables: VariableSet,
    ) -> None:
        self._runtime = runtime
        self._scope = scope
        self._turn = turn
        self._hooks = hooks
        self._ledger = ledger
        self._variables = variables

    def run(self, calls: Sequence[Planned], *, record: bool = False) -> list[Result]:
        """Run calls concurrently. A call that exceeds its time limit runs once more if its effect class allows it.

        If there are several calls or `record` is true, each result is also recorded in the effect row of its call.

        Raises:
            LeaseLost: another worker has the session.
        """
        with self._runtime.measures.timed("tools", self._runtime.clock):
            return self._run(calls, record=record or len(calls) > 1)

    def _run(self, calls: Sequence[Planned], *, record: bool) -> list[Result]:
        done: queue.SimpleQueue[CallThread] = queue.SimpleQueue()
        waiting = {each.position: self._start(each, done, record=record) for each in calls}
        repeated: set[int] = set()
        results: list[Result] = []
        while waiting:
            self._scope.step_within(max(run.until for run in waiting.values()) - self._now())
            finished = self._next_finished(done, waiting.values())
            if finished is not None:
                # A finished call keeps its result, even if its time limit has passed since.
                position = finished.planned.position
                if waiting.pop(position, None) is None:
                    continue
                if isinstance(finished.outcome, NotBegun):
                    self._ledger.extend(finished.planned)
                    waiting[position] = self._start(finished.planned, done, record=record)
                elif self._resolve(finished, results, again=position not in repeated):
                    repeated.add(position)
                    waiting[position] = self._start_again(finished.planned, done, record=record)
                continue
            for run in [run for run in waiting.values() if self._now() >= run.until]:
                position = run.planned.position
                decided = self._timed_out(run, again=position not in repeated)
                if decided is None:
                    repeated.add(position)
                    waiting[position] = self._start_again(run.planned, done, record=record)
                else:
                    del waiting[position]
                    results.append(decided)
        return results

    def decide(self, planned: Planned, effect: Effect) -> Result | None:
        """The result of a call whose outcome is unknown; `None` if it may run, perhaps a second time."""
        match effect:
            case Effect.PURE | Effect.IDEMPOTENT:
                return None
            case Effect.UNSAFE:
                return self._by_probe(planned)
            case _:
                assert_never(effect)

    def _by_probe(self, planned: Planned) -> Result | None:
        tool = planned.tool
        answer: ProbeOutcome = Unknown()
        if tool is not None and tool.probe is not None:
            probe, context = tool.probe, self._context(planned, threading.Event())
            done: queue.SimpleQueue[CallThread] = queue.SimpleQueue()
            ask = partial(
                event_loop.call,
                f"the probe of {tool.name}",
                partial(probe, context),
                context.cancelled.is_set,
            )
            self._scope.step_within(planned.timeout_s)
            run = CallThread(planned, ask, self._now() + planned.timeout_s, context, done)
            try:
                found = done.get(timeout=planned.timeout_s).outcome
                answer = found if isinstance(found, Happened | DidNotHappen) else answer
            except queue.Empty:
                run.abandon(self._runtime.leaks)
                log.warning("the probe of tool %s did not return within %g s", tool.name, planned.timeout_s)
        match answer:
            case Happened(result):
                longest = tool.max_result_chars if tool else MAX_RESULT_CHARS
                return Result(planned.position, "done", storable(cut(str(result), longest)), planned.effect_id)
            case DidNotHappen():
                return None
            case Unknown():
                return Result(planned.position, "unknown", UNKNOWN_OUTCOME, planned.effect_id)
            case _:
                assert_never(answer)

    def _resolve(self, run: CallThread, results: list[Result], *, again: bool) -> bool:
        """Append the result of a call whose thread has ended. Returns True instead if the call must run again."""
        planned = run.planned
        if not isinstance(run.outcome, OutcomeUnknown) or planned.tool is None:
            results.append(outcome_result(run))
            return False
        decided = self.decide(planned, planned.tool.effect)
        if decided is None and again:
            return True
        found = decided or Result(planned.position, "unknown", UNKNOWN_OUTCOME, planned.effect_id)
        if found.status == "unknown":
            found = replace(found, text=f"{run.outcome.message}\n{found.text}")
        results.append(found)
        return False

    def _next_finished(self, done: queue.SimpleQueue[CallThread], waiting: Any) -> CallThread | None:
        left = min(run.until for run in waiting) - self._now()
        try:
            finished = done.get(timeout=max(0.0, min(left, _POLL_S)))
        except queue.Empty:
            finished = None
        if self._scope.lost:
            for run in waiting:  # the calls' threads keep running, detached from the turn
                run.abandon(self._runtime.leaks)
            raise LeaseLost
        return finished

    def _start(self, planned: Planned, done: queue.SimpleQueue[CallThread], *, record: bool) -> CallThread:
        tool = planned.runnable
        if not self._may_begin(planned):
            self._ledger.extend(planned)
        arrived, ended = threading.Event(), threading.Event()
        context, until = self._context(planned, ended), self._ledger.until(planned)

        def record_result(status: str, text: str) -> None:
            in_time = self._now() < until
            if in_time:
                arrived.set()
            if record or not in_time:
                self.record(planned, status, text, changes=context.working_variables.changes())

        def work() -> str:
            try:
                text = self._call(tool, planned, context, until)
            except OutcomeUnknown:
                raise  # there is no outcome to record
            except ToolError as error:
                record_result("failed", error.message)
                raise
            finally:
                ended.set()
            record_result("done", text)
            return text

        return CallThread(planned, work, until, context, done, arrived=arrived)

    def _call(self, tool: RunnableTool, planned: Planned, context: ToolContext, until: float) -> str:
        """Run the agent's `before_tool` hooks, the tool, and the `after_tool` hooks; returns the tool's result.

        Raises:
            ToolError: the tool failed, or a required hook rejects the call or its result.
            NotBegun: the lease or the time limit had expired before the function was called.
        """
        checked = self._hooks.check_call(planned)
        # Checked immediately before the tool runs: if the process was paused, another worker may have the session.
        if not self._may_begin(planned):
            raise NotBegun
        if checked is not planned and not self._ledger.change(checked):
            raise NotBegun
        progress.reporter.set(context.report)
        recording = self._runtime.recording
        recorded = None if recording is None else recording.answer(tool.name, checked.call.arguments)
        if recorded is not None:
            text = result_of(*recorded)
        else:
            with self._runtime.traces.calling(self._turn.turn_id, self._turn.traceparent, effect_id=planned.effect_id):
                text = guarded.call(
                    tool,
                    checked.arguments,
                    context,
                    self._runtime.breakers,
                    lease_s=until - self._now(),
                    is_over=lambda: self._now() >= until,
                )
        return self._hooks.check_result(checked, text)

    def _start_again(self, planned: Planned, done: queue.SimpleQueue[CallThread], *, record: bool) -> CallThread:
        self._ledger.extend(planned)
        return self._start(replace(planned, repeated=True), done, record=record)

    def _timed_out(self, run: CallThread, *, again: bool) -> Result | None:
        """The result of a call that exceeded its time limit; `None` if the call runs again.

        `again` tells whether another run is allowed.
        """
        planned = run.planned
        tool = planned.runnable
        log.warning("tool %s exceeded its time limit of %g s", tool.name, planned.timeout_s)
        run.abandon(self._runtime.leaks)
        guarded.note_overdue(tool, self._runtime.breakers)
        running = run.alive  # read before the probe: the thread may act after the probe and then end
        decided = self.decide(planned, tool.effect)
        if decided is None and tool.effect is Effect.UNSAFE and running:
            # The thread still runs: its effect may happen after the probe.
            return Result(planned.position, "unknown", UNKNOWN_OUTCOME, planned.effect_id)
        if decided is not None or again:
            return decided
        text = f"Error: {tool.name} did not finish within {planned.timeout_s:g} s."
        return Result(planned.position, "failed", text, planned.effect_id)

    def _may_begin(self, planned: Planned) -> bool:
        return self._scope.still_valid() and self._now() < self._ledger.until(planned)

    def record(
        self, planned: Planned, status: str, text: str, *, changes: Sequence[Change] = (), payload: Any = None
    ) -> None:
        """Record the result of a call in its row, which another worker reads if this one dies before the step."""
        try:
            self._runtime.database.run(
                queries.FINISH_EFFECT,
                {
                    "effect_id": planned.effect_id,
                    "status": status,
                    "result": storable(text),
                    "payload": None if payload is None else as_json(payload),
                    "variables": as_json(changes) if changes else None,
                },
            )
        except PerdureError as error:
            # The turn still gets the result and commits it with the step.
            log.warning(
                "the result of tool %s was not recorded in its effect row: %s", planned.call.name, loggable(error)
            )

    def _context(self, planned: Planned, ended: threading.Event) -> ToolContext:
        """The context of a call. Once it has `ended`, it reports no progress."""
        variables = WorkingVariables(self._variables)
        return ToolContext(
            user_id=user_of(self._turn.user_id),
            tenant=tenant_of(self._turn.user_id),
            session_id=self._turn.session_id,
            turn_id=self._turn.turn_id,
            effect_id=planned.effect_id,
            channel=self._turn.channel,
            cancelled=self._scope.unwanted_call(),
            working_variables=variables,
            memory=memory_of_call(self._runtime, self._turn, planned.effect_id),
            reminders=UserReminders(
                self._runtime.database,
                self._runtime.clock,
                self._runtime.settings,
                self._turn.user_id,
                self._turn.zone(self._runtime.settings.timezone).key,
                self._turn.turn_id,
                planned.effect_id,
            ),
            metadata=self._turn.own_metadata(),
            attach=partial(
                self._runtime.files.attach, self._turn.user_id, Call(planned.effect_id, self._turn.session_id)
            ),
            deps=self._scope.deps,
            report=None if self._scope.report is None else partial(self._report, planned, variables, ended),
        )

    def _report(self, planned: Planned, variables: WorkingVariables, ended: threading.Event, text: str) -> None:
        """Pass on a call's report of its progress, unless the call is over."""
        if self._scope.report is not None and not variables.revoked and not ended.is_set():
            self._scope.report(planned.call.id, planned.call.name, text)

    def _now(self) -> float:
        return self._runtime.clock.monotonic()
