"""The tool ledger: intent before, result after, and a decision where a crash came between.

Keeps the law that a tool's effect is recorded around it. The intents are committed with the
message that asks; here the calls run side by side, each in a thread of its own, and what a
crash, a lost lease or a timeout left in doubt is decided by what the tool declares: pure and
idempotent calls run again (with the same effect id), unsafe ones never: their probe settles
it, or the model is told that the outcome is unknown. Calls that wait for a person have not begun
and are in no doubt (`approvals`).

Over 500 lines on purpose: who may run a call again, and when, is decided in one place.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never, cast
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import tenant_of, user_of
from perdure.agents import Agent
from perdure.database.engine import Executor, as_json
from perdure.errors import OutcomeUnknown, PerdureError, ToolError
from perdure.hooks import CallOver, CallSeen, call_hooks
from perdure.ids import new_id
from perdure.models.protocol import ToolCall
from perdure.runtime import Runtime
from perdure.text.untrusted import cut, storable
from perdure.tools import guarded
from perdure.tools.registry import (
    MAX_RESULT_CHARS,
    DidNotHappen,
    Effect,
    Happened,
    ProbeOutcome,
    ToolContext,
    Unknown,
)
from perdure.tools.sources import RunnableTool, Toolset
from perdure.tools.variables import Change, VariableSet, WorkingVariables
from perdure.turns.calls import approvals, queries
from perdure.turns.lease.keeper import Hold, LeaseLost, TurnRef
from perdure.turns.prompt.recalling import own_memory
from perdure.turns.run.transcript import Entry

log = logging.getLogger(__name__)

_MOST_LOGGED = 10_000
"""Characters of an error's message; the traceback of one with more is not logged."""
_MOST_CAUSES = 50

MAX_CALLS = 32
"""Calls of one reply that are run; the model is told to ask for fewer beyond."""

_LOOK_UP_S = 0.5
_RECORDING_S = 5.0
"""Seconds that a result may take to be recorded, if it came in time."""

UNKNOWN_OUTCOME = (
    "The outcome of this call is unknown: it was interrupted after it had begun and is not repeated, "
    "for it may have taken effect. Check before you call it again."
)


TRIED_BEFORE = "An earlier attempt at this call was interrupted and may have taken effect."
"""Beside the failure of a repeated call: without it the model would ask again, under another effect id."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One call of a reply: either ready to run, or refused with a reason for the model.

    `repeated`: it has begun before, and nobody knows what came of that.
    """

    position: int
    call: ToolCall
    effect_id: UUID
    tool: RunnableTool | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 0
    needs_approval: bool = False
    refusal: str | None = None
    repeated: bool = False

    def intent(self) -> dict[str, Any]:
        """The row that is committed before the call begins."""
        return self._row("intended", self.timeout_s)

    def request(self, expires_s: float) -> dict[str, Any]:
        """The row of a call that waits until it, or another one of its reply, is decided."""
        return self._row("asked" if self.needs_approval else "approved", expires_s)

    def _row(self, status: str, within_s: float) -> dict[str, Any]:
        if self.tool is None:
            raise ValueError(f"the call of {self.call.name} was refused: it has no intent")
        return {
            "effect_id": self.effect_id,
            "position": self.position,
            "tool": self.tool.name,
            "arguments": self.call.arguments,
            "effect": self.tool.effect,
            "status": status,
            "timeout_s": within_s,
        }


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one call: `done`, `failed`, `denied` or `unknown`. The text is for the model."""

    position: int
    status: str
    text: str
    effect_id: UUID | None = None

    def record(self) -> dict[str, Any]:
        """The effect row's end. The text itself stands in the transcript."""
        return {"effect_id": self.effect_id, "status": self.status, "result": None}


class Interrupted(Exception):
    """A wait ended because the turn is to stop; the hold says why."""


class _NotBegun(Exception):
    """The lease, or the call's time, was over before the tool's function was called: the call is in no doubt."""


def equip(runtime: Runtime, hold: Hold, agent: Agent) -> Toolset:
    """What the agent may call in the step that begins; waits for servers that are being connected for the first time.

    They are connected side by side, so the slowest one bounds the wait.
    """
    if agent.servers:
        hold.step_within(max(server.connect_timeout_s for server in agent.servers))
    return agent.toolset(runtime.connections)


def plan(tools: Toolset, calls: Sequence[ToolCall], runtime: Runtime) -> list[Planned]:
    """Match a reply's calls with the tools and check their arguments."""
    return [_planned(tools, position, call, runtime) for position, call in enumerate(calls)]


def _planned(tools: Toolset, position: int, call: ToolCall, runtime: Runtime) -> Planned:
    effect_id = new_id(runtime.clock)
    tool = tools.find(call.name)
    if tool is None:
        known = ", ".join(tools.names) or "none"
        return Planned(position, call, effect_id, refusal=f"There is no tool {call.name!r}. Available: {known}.")
    if position >= MAX_CALLS:
        refusal = f"Not run: at most {MAX_CALLS} calls are run for one reply. Ask again for fewer at once."
        return Planned(position, call, effect_id, refusal=refusal)
    try:
        arguments = tool.parse(call.arguments)
    except ToolError as error:
        return Planned(position, call, effect_id, refusal=error.message)
    timeout_s = tool.timeout_s or runtime.settings.turn.tool_timeout_s
    return Planned(position, call, effect_id, tool, arguments, timeout_s, tool.needs_approval(arguments))


class _Run:
    """A function under way in a thread of its own, which nobody need wait for."""

    def __init__(
        self,
        planned: Planned,
        work: Callable[[], Any],
        until: float,
        variables: WorkingVariables,
        done: queue.SimpleQueue[_Run],
        *,
        came: threading.Event | None = None,
    ) -> None:
        self.planned = planned
        self._until = until
        self._came = came or threading.Event()
        self.variables = variables
        self.outcome: Any = None
        self._work = work
        self._done = done
        self.thread = threading.Thread(target=self._go, name=f"perdure-tool-{planned.call.name[:40]}", daemon=True)
        self.thread.start()

    @property
    def until(self) -> float:
        """When its time is up; a result that `came` in time has some more, to be recorded."""
        return self._until + (_RECORDING_S if self._came.is_set() else 0.0)

    @property
    def alive(self) -> bool:
        """Whether the function is still running."""
        return self.thread.is_alive()

    def _go(self) -> None:
        try:
            self.outcome = self._work()
        except _NotBegun as error:
            self.outcome = error
        except ToolError as error:
            # The error's message may quote a user's text.
            kind = type(error.__cause__ or error).__name__
            log.info("tool %s failed: %s", self.planned.call.name, kind, exc_info=_short(error.__cause__))
            self.outcome = error
        except BaseException as error:
            log.exception("tool %s broke its thread", self.planned.call.name)
            self.outcome = ToolError(f"{type(error).__name__}: the tool broke off.")
        self._done.put(self)


class Ledger:
    """The tool calls of one message, for the turn that runs under `hold`."""

    def __init__(
        self, runtime: Runtime, hold: Hold, turn: TurnRef, agent: Agent, variables: VariableSet | None = None
    ) -> None:
        self._runtime = runtime
        self._hold = hold
        self._turn = turn
        self._agent = agent
        self._variables = variables or VariableSet()
        self._intended_at: dict[UUID, float] = {}
        """When each call's intent was sent to the database, by the monotonic clock: its time counts from there."""

    def perform(self, planned: Sequence[Planned], intended_at: float) -> list[Result]:
        """Run calls whose intents were committed by a statement sent at `intended_at`; results in the order asked.

        Raises:
            LeaseLost: the session is somebody else's now.
        """
        runnable = [each for each in planned if each.refusal is None]
        refused = [_refused(each) for each in planned if each.refusal is not None]
        for each in runnable:
            self._intended_at.setdefault(each.effect_id, intended_at)
        return _in_order(refused + self._run(runnable))

    def extend(self, planned: Sequence[Planned]) -> None:
        """Give calls that have not begun their full time, where their intents were committed a while ago.

        Raises:
            LeaseLost: the session is somebody else's now.
        """
        for each in planned:
            if each.refusal is None:
                self._extend(each)

    def resume(self, asking: Entry) -> list[Result]:
        """Find the results of calls that another runner began, or begin those that waited; in the order asked.

        Raises:
            LeaseLost: the session is somebody else's now.
            Interrupted: the turn is to stop while a call cannot be decided yet.
            Undecided: a person is to decide about calls first.
        """
        rows = _rows(self._runtime.database, self._turn.turn_id, asking)
        if any(row.status in approvals.UNBEGUN for row in rows.values()):
            results, again = self._begun(asking, rows)
        else:
            results, again = self._taken_over(asking, rows)
        return _in_order(_noting_changes(asking, rows, results + self._run(again)))

    def _begun(self, asking: Entry, rows: Mapping[int, Row[Any]]) -> tuple[list[Result], list[Planned]]:
        """What is settled of calls that waited for a person, and those that are begun by this."""
        planned = plan(self._tools(), _decided(asking, rows), self._runtime)
        calls = [
            replace(each, effect_id=rows[each.position].effect_id) if each.position in rows else each
            for each in planned
        ]
        runnable = [(each.effect_id, each.timeout_s) for each in calls if each.refusal is None]
        limits = self._runtime.settings.turn
        asked_at = self._now()
        approvals.begin(
            self._runtime.database,
            self._hold,
            turn_id=self._turn.turn_id,
            message_seq=asking.seq or 0,
            calls=runnable,
            lease_s=limits.lease_s,
        )
        begun = _rows(self._runtime.database, self._turn.turn_id, asking)
        again = [each for each in calls if each.refusal is None and _is_intended(begun.get(each.position))]
        self._intended_at.update(dict.fromkeys((each.effect_id for each in again), asked_at))
        running = {each.position for each in again}
        return [_settled(each, begun.get(each.position)) for each in calls if each.position not in running], again

    def _taken_over(self, asking: Entry, rows: dict[int, Row[Any]]) -> tuple[list[Result], list[Planned]]:
        """What is settled of calls that another runner began, and those that run again."""
        wait_s = max((row.undecided_s for row in rows.values() if row.status == "intended"), default=0.0)
        if wait_s > 0:
            self._wait(wait_s)
            rows = _rows(self._runtime.database, self._turn.turn_id, asking)
        self._variables.replay(_changes(rows))
        results: list[Result] = []
        again: list[Planned] = []
        for fresh in plan(self._tools(), _decided(asking, rows), self._runtime):
            found = self._known_or_again(fresh, rows.get(fresh.position))
            if isinstance(found, Result):
                results.append(found)
            else:
                again.append(found)
        for each in again:
            self._extend(each)
        return results, again

    def _known_or_again(self, fresh: Planned, row: Row[Any] | None) -> Result | Planned:
        if fresh.refusal is not None and row is None:
            return _refused(fresh)
        if row is None or row.status != "intended":
            return _as_recorded(fresh.position, row)
        if fresh.tool is None:
            return Result(fresh.position, "unknown", UNKNOWN_OUTCOME, row.effect_id)
        same = replace(fresh, effect_id=row.effect_id, needs_approval=False, repeated=True)
        return self._decide(same, Effect(row.effect)) or same

    def _decide(self, planned: Planned, effect: Effect) -> Result | None:
        """The result of a call in doubt, or None if it may run again."""
        match effect:
            case Effect.PURE | Effect.IDEMPOTENT:
                return None
            case Effect.UNSAFE:
                return self._by_probe(planned)
            case _:
                assert_never(effect)

    def _by_probe(self, planned: Planned) -> Result | None:
        answer = self._probe(planned)
        match answer:
            case Happened(result):
                longest = planned.tool.max_result_chars if planned.tool else MAX_RESULT_CHARS
                return Result(planned.position, "done", storable(cut(str(result), longest)), planned.effect_id)
            case DidNotHappen():
                return None
            case Unknown():
                return Result(planned.position, "unknown", UNKNOWN_OUTCOME, planned.effect_id)
            case _:
                assert_never(answer)

    def _probe(self, planned: Planned) -> ProbeOutcome:
        tool = planned.tool
        if tool is None or tool.probe is None:
            return Unknown()
        probe, context = tool.probe, self._context(planned)
        self._hold.step_within(planned.timeout_s)
        done: queue.SimpleQueue[_Run] = queue.SimpleQueue()
        run = _Run(planned, lambda: probe(context), self._now() + planned.timeout_s, context.working_variables, done)
        try:
            done.get(timeout=planned.timeout_s)
        except queue.Empty:
            run.variables.revoke()
            self._runtime.leaks.add(run.thread)
            log.warning("the probe of tool %s did not answer in %g s", tool.name, planned.timeout_s)
            return Unknown()
        outcome = run.outcome
        return outcome if isinstance(outcome, Happened | DidNotHappen | Unknown) else Unknown()

    def _run(self, calls: Sequence[Planned]) -> list[Result]:
        """Run calls side by side; one whose time is up is decided or begun a second time."""
        done: queue.SimpleQueue[_Run] = queue.SimpleQueue()
        waiting = {each.position: self._start(each, done, record=len(calls) > 1) for each in calls}
        repeated: set[int] = set()
        results: list[Result] = []
        while waiting:
            self._hold.step_within(max(run.until for run in waiting.values()) - self._now())
            finished = self._next(done, waiting.values())
            if finished is not None:
                # What has come in counts before any time that is up by now.
                position = finished.planned.position
                if waiting.pop(position, None) is None:
                    continue
                if isinstance(finished.outcome, _NotBegun):
                    self._extend(finished.planned)
                    waiting[position] = self._start(finished.planned, done, record=len(calls) > 1)
                elif self._came_back(finished, results, again=position not in repeated):
                    repeated.add(position)
                    waiting[position] = self._start_again(finished.planned, done, record=len(calls) > 1)
                continue
            for run in [run for run in waiting.values() if self._now() >= run.until]:
                position = run.planned.position
                decided = self._timed_out(run, again=position not in repeated)
                if decided is None:
                    repeated.add(position)
                    waiting[position] = self._start_again(run.planned, done, record=len(calls) > 1)
                else:
                    del waiting[position]
                    results.append(decided)
        return results

    def _came_back(self, run: _Run, results: list[Result], *, again: bool) -> bool:
        """Note the result of a call that has ended; True if it broke off and is to be run `again` instead."""
        planned = run.planned
        if not isinstance(run.outcome, OutcomeUnknown) or planned.tool is None:
            results.append(_ran(run))
            return False
        decided = self._decide(planned, planned.tool.effect)
        if decided is None and again:
            return True
        found = decided or Result(planned.position, "unknown", UNKNOWN_OUTCOME, planned.effect_id)
        if found.status == "unknown":
            found = replace(found, text=f"{run.outcome.message}\n{found.text}")
        results.append(found)
        return False

    def _next(self, done: queue.SimpleQueue[_Run], waiting: Any) -> _Run | None:
        left = min(run.until for run in waiting) - self._now()
        try:
            finished = done.get(timeout=max(0.0, min(left, _LOOK_UP_S)))
        except queue.Empty:
            finished = None
        if self._hold.lost:
            for run in waiting:  # their threads go on without a turn
                run.variables.revoke()
                self._runtime.leaks.add(run.thread)
            raise LeaseLost
        return finished

    def _start(self, planned: Planned, done: queue.SimpleQueue[_Run], *, record: bool) -> _Run:
        tool = planned.tool
        if tool is None:
            raise ValueError(f"the call of {planned.call.name} was refused: it cannot run")
        if not self._may_begin(planned):
            self._extend(planned)
        # A successor decides what is in doubt no earlier than this, so the call's time ends no later.
        context, until = self._context(planned), self._until(planned)
        came = threading.Event()

        def note(status: str, text: str) -> None:
            in_time = _marked(came, if_so=self._now() < until)
            if record or not in_time:
                self._finish(planned, status, text, context.working_variables.changes())

        def work() -> str:
            try:
                text = self._call(tool, planned, context, until)
            except OutcomeUnknown:
                raise  # nothing is known to be recorded
            except ToolError as error:
                note("failed", error.message)
                raise
            note("done", text)
            return text

        return _Run(planned, work, until, context.working_variables, done, came=came)

    def _call(self, tool: RunnableTool, planned: Planned, context: ToolContext, until: float) -> str:
        """What the tool returns, with the agent's hooks around it.

        Raises:
            ToolError: it failed, or a required hook refuses the call, or its result.
            _NotBegun: the lease, or the call's time, was over before the function was called.
        """
        turn = self._turn
        seen = CallSeen(
            user_of(turn.user_id),
            self._hold.session_id,
            turn.turn_id,
            planned.effect_id,
            tool.name,
            planned.arguments,
            tenant_of(turn.user_id),
        )
        # Within the call's own time: a hook that hangs must leave some of it.
        within_s = min(self._runtime.settings.turn.hook_timeout_s, planned.timeout_s / 2)
        leaks = self._runtime.leaks
        self._hooked(lambda: call_hooks(self._agent.before_tool, seen, within_s, leaks))
        # Checked last, in this thread: a process that was paused since the call was started may have a successor.
        if not self._may_begin(planned):
            raise _NotBegun
        text = guarded.call(
            tool,
            planned.arguments,
            context,
            self._runtime.breakers,
            lease_s=until - self._now(),
            is_over=lambda: self._now() >= until,
        )
        self._hooked(lambda: call_hooks(self._agent.after_tool, CallOver(seen, text), within_s, leaks))
        return text

    def _hooked(self, call: Callable[[], None]) -> None:
        try:
            call()
        except ToolError:
            raise
        except PerdureError as error:
            raise ToolError(storable(error.message)) from error

    def _start_again(self, planned: Planned, done: queue.SimpleQueue[_Run], *, record: bool) -> _Run:
        self._extend(planned)
        return self._start(replace(planned, repeated=True), done, record=record)

    def _timed_out(self, run: _Run, *, again: bool) -> Result | None:
        """What is said of a call whose time is up, or None if it may run `again`."""
        planned = run.planned
        tool = planned.tool
        if tool is None:
            raise ValueError(f"the call of {planned.call.name} was refused: it cannot time out")
        log.warning("tool %s ran for more than %g s", tool.name, planned.timeout_s)
        run.variables.revoke()
        self._runtime.leaks.add(run.thread)
        guarded.note_overdue(tool, self._runtime.breakers)
        running = run.alive  # asked before the probe: the thread may act after it and end before the next line
        decided = self._decide(planned, tool.effect)
        if decided is None and tool.effect is Effect.UNSAFE and running:
            # The probe looked before the effect, which this very thread may still bring about.
            return Result(planned.position, "unknown", UNKNOWN_OUTCOME, planned.effect_id)
        if decided is not None or again:
            return decided
        text = f"Error: {tool.name} did not finish within {planned.timeout_s:g} s."
        return Result(planned.position, "failed", text, planned.effect_id)

    def _may_begin(self, planned: Planned) -> bool:
        return self._hold.still_valid() and self._now() < self._until(planned)

    def _until(self, planned: Planned) -> float:
        return self._intended_at[planned.effect_id] + planned.timeout_s

    def _extend(self, planned: Planned) -> None:
        """Give a call its full time (again), if the lease is still ours."""
        asked_at = self._now()
        rows = self._runtime.database.run(
            queries.EXTEND_EFFECT,
            {
                **self._hold.held,
                "effect_id": planned.effect_id,
                "timeout_s": planned.timeout_s,
                "lease_s": self._runtime.settings.turn.lease_s,
            },
        )
        if not rows:
            raise LeaseLost
        self._hold.renewed(asked_at)
        self._intended_at[planned.effect_id] = asked_at

    def _finish(self, planned: Planned, status: str, text: str, changes: list[Change]) -> None:
        try:
            self._runtime.database.run(
                queries.FINISH_EFFECT,
                {
                    "effect_id": planned.effect_id,
                    "status": status,
                    "result": storable(text),
                    "variables": as_json(changes) if changes else None,
                },
            )
        except PerdureError as error:
            # The result is still handed to the turn, which commits it with the step.
            log.warning("the result of tool %s did not reach its effect row: %s", planned.call.name, error)

    def _wait(self, seconds: float) -> None:
        self._hold.step_within(seconds)
        if self._hold.stopping.wait(seconds):
            raise Interrupted

    def _context(self, planned: Planned) -> ToolContext:
        return ToolContext(
            user_id=user_of(self._turn.user_id),
            tenant=tenant_of(self._turn.user_id),
            session_id=self._hold.session_id,
            turn_id=self._turn.turn_id,
            effect_id=planned.effect_id,
            channel=self._turn.channel,
            cancelled=self._hold.unwanted,
            working_variables=WorkingVariables(self._variables),
            memory=own_memory(self._runtime, self._hold.session_id, self._turn, planned.effect_id),
        )

    def _tools(self) -> Toolset:
        return equip(self._runtime, self._hold, self._agent)

    def _now(self) -> float:
        return self._runtime.clock.monotonic()


def recorded(executor: Executor, turn_id: UUID, asking: Entry) -> tuple[list[Result], list[Change]]:
    """The results of a message's calls, as far as their rows have one (the others are unknown).

    And what those calls changed of the working variables, which no step has committed yet.
    """
    rows = _rows(executor, turn_id, asking)
    results = [_as_recorded(position, rows.get(position)) for position in range(len(asking.tool_calls))]
    return _noting_changes(asking, rows, results), _changes(rows)


def _rows(executor: Executor, turn_id: UUID, asking: Entry) -> dict[int, Row[Any]]:
    rows = executor.run(queries.EFFECTS_OF_STEP, {"turn_id": turn_id, "message_seq": asking.seq})
    return {row.position: row for row in rows}


def _changes(rows: Mapping[int, Row[Any]]) -> list[Change]:
    return [cast("Change", tuple(change)) for row in rows.values() for change in row.variables or ()]


def _decided(asking: Entry, rows: Mapping[int, Row[Any]]) -> list[ToolCall]:
    """The calls with the arguments that are run: a person may have changed the model's own."""
    return [
        replace(call, arguments=rows[position].arguments) if position in rows else call
        for position, call in enumerate(asking.tool_calls)
    ]


def _noting_changes(asking: Entry, rows: Mapping[int, Row[Any]], results: Iterable[Result]) -> list[Result]:
    """The results; where a person changed the arguments, the model is told with which it was run."""
    noted = []
    for result in results:
        row = rows.get(result.position)
        if row is not None and row.arguments != asking.tool_calls[result.position].arguments:
            text = f"A person changed the arguments of this call to {row.arguments}\n{result.text}"
            noted.append(replace(result, text=text))
        else:
            noted.append(result)
    return noted


def _marked(event: threading.Event, *, if_so: bool) -> bool:
    if if_so:
        event.set()
    return if_so


def _short(error: BaseException | None) -> BaseException | None:
    """An error whose traceback may be logged: none of those behind it has a message of megabytes."""
    each = error
    for _ in range(_MOST_CAUSES):
        if each is None:
            return error
        if len(str(each)) > _MOST_LOGGED:
            return None
        each = each.__cause__ or each.__context__
    return None


def _is_intended(row: Row[Any] | None) -> bool:
    return row is not None and row.status == "intended"


def _settled(planned: Planned, row: Row[Any] | None) -> Result:
    """The result of a call that is not begun: denied, or refused before or after it was decided."""
    if row is not None and row.status == "denied":
        return _as_recorded(planned.position, row)
    if row is None and planned.refusal is None:  # it could not be run when it was asked, and was shown to nobody
        return _as_recorded(planned.position, None)
    return replace(_refused(planned), effect_id=None if row is None else row.effect_id)


def _ran(run: _Run) -> Result:
    planned = run.planned
    if isinstance(run.outcome, PerdureError):
        text = f"Error: {run.outcome.message}"
        if planned.repeated and planned.tool is not None and planned.tool.effect is Effect.IDEMPOTENT:
            text = f"{text}\n{TRIED_BEFORE}"
        return Result(planned.position, "failed", text, planned.effect_id)
    return Result(planned.position, "done", str(run.outcome), planned.effect_id)


def _refused(planned: Planned) -> Result:
    return Result(planned.position, "failed", f"Error: {planned.refusal}")


def _as_recorded(position: int, row: Row[Any] | None) -> Result:
    if row is None:
        return Result(position, *outcome_of(None, None))
    return Result(position, *outcome_of(row.status, row.result), row.effect_id)


def outcome_of(status: str | None, result: str | None) -> tuple[str, str]:
    """Status and text of the result of a call whose effect row says so; `status` is None if it has no row."""
    match status:
        case "done":
            return "done", result or ""
        case "failed":
            return "failed", f"Error: {result or 'it failed.'}"
        case "denied":
            return "denied", result or approvals.DENIED
        case None | "asked" | "approved":
            return "failed", "Error: this call was not run."
        case _:
            return "unknown", UNKNOWN_OUTCOME


def _in_order(results: list[Result]) -> list[Result]:
    return sorted(results, key=lambda result: result.position)
