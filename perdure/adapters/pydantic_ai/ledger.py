"""The tool calls of one reply, on the rows of `tool_effects`. The methods run in the turn's thread, unless they say so.

The intents are committed with the reply. The intent of a call that a capability of the agent approves is committed
before the call begins. A call begins only if this process has just committed its intent, or if the ledger shows that it
may: after a crash, a recorded result is returned, and a call in doubt is decided by its effect class and its probe, as
for perdure's own tools (`turns.calls.execute`).

A call that needs a person's decision has no intent. When pydantic-ai has run the other calls of the reply, it asks for
the decisions; the calls then become `asked`, and the turn waits without a worker. The next run of the agent finds the
decisions in the ledger. Likewise, a call that a client runs waits in its row for the result (`turns.calls.awaited`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from pydantic import ValidationError
from pydantic_ai.durable_exec import JSON_CODEC, CallToolResult
from pydantic_ai.exceptions import ToolFailed
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolApproved, ToolDefinition, ToolDenied
from pydantic_core import to_jsonable_python
from sqlalchemy import Row

from perdure.adapters.pydantic_ai import queries
from perdure.adapters.pydantic_ai.changed import Checked
from perdure.adapters.pydantic_ai.effects import AdaptedTool
from perdure.adapters.pydantic_ai.files import ResultFiles, described, descriptions
from perdure.adapters.pydantic_ai.messages import Unreadable
from perdure.agents import Agent
from perdure.database.engine import Statement, as_json
from perdure.errors import PerdureError, ToolError
from perdure.ids import new_id
from perdure.runtime import Runtime
from perdure.text.untrusted import cut, error_summary, load_object, storable_json
from perdure.tools.progress import Report
from perdure.tools.registry import MAX_RESULT_CHARS, STAFF, USER, Effect
from perdure.tools.sources import RunnableTool
from perdure.tools.variables import VariableSet
from perdure.turns.calls import approvals, awaited
from perdure.turns.calls.execute import CallExecutor
from perdure.turns.calls.hooked import ToolHooks
from perdure.turns.calls.ledger import CallLedger
from perdure.turns.calls.plan import Planned, needs_staff
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME, Result, effect_rows, recorded_result
from perdure.turns.lease.tenure import LeaseLost, Tenure
from perdure.turns.transcript import Entry

log = logging.getLogger(__name__)

_APPROVAL, _DEFERRED = "approval_required", "call_deferred"
_NOT_RUN = "Error: this call was not run."
_LATE = 0.1
"""The part of a call's time limit that may pass before the call begins; later, the limit starts anew."""
_DONE = frozenset({"tool_return", "tool_content_result"})


class Undecided(Exception):
    """A person can still decide about a call of the reply."""


class Unanswered(Exception):
    """A call of the reply waits for the result of a client."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The call may begin, and has `left_s` seconds."""

    position: int
    effect_id: UUID
    left_s: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """The result of the call, as JSON values of a `CallToolResult`."""

    payload: Any


def returned(value: Any) -> dict[str, Any]:
    """The JSON values of a `CallToolResult` for a tool that returned `value`."""
    return {"result": value, "kind": "tool_return"}


def tool_failed(message: str) -> dict[str, Any]:
    """The JSON values of a `CallToolResult` for a call that failed."""
    return {"kind": "tool_failed", "message": message}


class Calls:
    """The calls of the message `open_reply`. `names` are the ids by which pydantic-ai knows them, in their order."""

    def __init__(  # noqa: PLR0917 (the parts of a turn)
        self,
        runtime: Runtime,
        tenure: Tenure,
        agent: Agent,
        variables: VariableSet,
        open_reply: Entry,
        parts: Sequence[ToolCallPart],
        planned: Mapping[int, Planned],
        files: ResultFiles,
    ) -> None:
        self.open_reply = open_reply
        self._runtime = runtime
        self._tenure = tenure
        self._agent = agent
        self._positions = {part.tool_call_id: position for position, part in enumerate(parts)}
        self._planned = dict(planned)
        self._hooks = hooks = ToolHooks(runtime, tenure, tenure.at_hand, agent)
        self._ledger = CallLedger(runtime, tenure)
        self._executor = CallExecutor(
            runtime, tenure, tenure.at_hand, hooks=hooks, ledger=self._ledger, variables=variables
        )
        self._files = files
        self._rows: dict[int, Row[Any]] = {}
        self._is_own = False
        """Whether this process has committed the reply."""
        self._fresh: set[int] = set()
        """The positions of calls whose intents this process has just committed, and that have not begun."""
        self._begun_here: set[int] = set()
        """The positions of calls that this process has begun. A wrapper of a toolset may run a call again."""
        self._repeated: set[int] = set()
        self._statuses: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        """The results that tools returned. A processor of the history may drop those that the model was to receive."""
        self._shown: dict[int, dict[str, Any]] = {}
        """The results that tools returned, as they are recorded: with references to their files."""
        self._unrecorded: dict[int, tuple[str, str, Any]] = {}
        """The results of calls that have ended, and whose rows do not have them."""
        self._lost: dict[int, str] = {}
        """The results of calls of tools that this worker lacks."""
        self._until = 0.0
        """The monotonic time by which the calls that have begun end."""

    def committed(self, at: float | None) -> None:
        """The intents were committed by a statement sent at the monotonic time `at`; `None`: some time ago.

        Raises:
            LeaseLost: another worker has the session.
        """
        self._is_own = True
        self._fresh = set(self._planned)
        if at is None:
            for planned in self._planned.values():
                self._ledger.extend(planned)
        else:
            self._ledger.intended(self._planned.values(), at)

    def read(self) -> float:
        """Read the rows, which an earlier worker may have written; returns the seconds until all can be decided."""
        self._rows = self.rows()
        for position, row in self._rows.items():
            self._planned[position] = replace(self._planned_at(position), effect_id=row.effect_id)
        begun = [row for row in self._rows.values() if row.status == "intended" and row.waits_for is None]
        return max((row.undecided_s for row in begun), default=0.0)

    def results(self, texts: Mapping[str, tuple[str, str]]) -> tuple[list[str], list[Result]]:
        """The text of each call, and the results for the rows. `texts` has what pydantic-ai tells the model."""
        shown, results = [], []
        self._unrecorded.clear()
        for name, position in self._positions.items():
            status, text = texts.get(name, ("failed", self._texts.get(position, _NOT_RUN)))
            text = self._lost.get(position, "\n".join(filter(None, [text, *descriptions(self._shown.get(position))])))
            shown.append(text)
            known = self._rows.get(position) or self._planned.get(position)
            if known is not None:
                results.append(Result(position, self._statuses.get(position, status), text, known.effect_id))
        return shown, results

    def lacks(self, tools: Collection[str]) -> str | None:
        """The name of a tool that another worker called and that is not among `tools`; `None` if there is none.

        pydantic-ai tells the model that there is no such tool. The rows say what is known of the call.
        """
        missing = [
            position
            for position, row in self._rows.items()
            if row.approver is None
            and position not in self._statuses
            and self._planned[position].call.name not in tools
        ]
        for position in missing:
            row = self._rows[position]
            self._statuses[position] = "unknown" if row.status == "intended" else row.status
            self._lost[position] = UNKNOWN_OUTCOME if row.status == "intended" else row.result or ""
        return self._planned[missing[0]].call.name if missing else None

    def begin(  # noqa: PLR0911 (a table)
        self, name: str, arguments: Mapping[str, Any], definition: ToolDefinition | None, *, approved: bool
    ) -> Begin | Recorded:
        """Begin the call that pydantic-ai knows as `name`, or return its result. `approved`: a person approved it.

        A call that this process has begun before begins again, with the same row: its tool's last result counts.

        Raises:
            LeaseLost: another worker has the session.
            Unreadable: the installed pydantic-ai cannot read the result, and another worker may.
        """
        position = self._positions[name]
        row, planned = self._rows.get(position), self._equipped(position, definition, approved=approved)
        if planned is None:  # no intent: the agent of the worker that committed the reply had no such tool
            return Recorded(tool_failed("this tool was not available when it was called."))
        if approved and row is not None and position not in self._begun_here:  # a person may have edited it
            planned = replace(planned, call=replace(planned.call, arguments=row.arguments))
        self._planned[position] = planned = replace(planned, arguments=dict(arguments))
        if position in self._fresh:
            self._fresh.discard(position)
            return self._begun(planned)
        if row is not None and row.status == "intended" and row.waits_for is not None:
            return Recorded(row.payload)
        if row is None or position in self._begun_here:
            self._statuses.pop(position, None)
            self._ledger.extend(planned, queries.REPEAT)
            return self._begun(planned)
        if row.approver is not None and not approved:
            return Recorded({"kind": _APPROVAL} if row.payload is None else row.payload)
        if row.status != "intended":
            self._statuses[position] = row.status
            return Recorded(self._recorded(row))
        return self._decided(position, Effect(row.effect))

    def has(self, name: str) -> bool:
        """Whether pydantic-ai knows a call of the reply as `name`."""
        return name in self._positions

    def reporter(self, position: int) -> Report | None:
        """Takes the reports of a call's progress, until its result is known."""
        call, to = self._planned[position].call, self._tenure.report

        def pass_on(text: str) -> None:
            if to is not None and position not in self._statuses:
                to(call.id, call.name, text)

        return None if to is None else pass_on

    def overdue(self, position: int, *, running: bool, message: str | None = None) -> Begin | Recorded:
        """The call did not end within its time limit, or its tool reports an unknown outcome with `message`."""
        planned = self._planned[position]
        log.warning("tool %s %s", planned.call.name, message or "exceeded its time limit")
        tool = planned.tool
        effect = Effect.UNSAFE if tool is None else tool.effect
        if effect is Effect.UNSAFE and running:
            # The tool still runs: its effect may happen after a probe.
            return self._unknown(position, message)
        if position in self._repeated:
            if effect is Effect.UNSAFE:
                return self._unknown(position, message)
            self._statuses[position] = "failed"
            text = f"Error: {planned.call.name} did not finish within {planned.timeout_s:g} s."
            return Recorded(returned(text))
        return self._decided(position, effect, message)

    def check_call(self, position: int, checked: Checked) -> Mapping[str, Any] | Recorded:
        """Call the `before_tool` hooks, in a thread of the call, and record the arguments that they change.

        Returns the arguments of the call, or the result of a call that a hook rejects. `checked` checks what they
        changed.
        """
        planned = self._planned[position]
        try:
            arguments = self._hooks.changed_arguments(planned)
            if arguments is planned.arguments:
                return arguments
            found = checked(planned.call.arguments, planned.arguments, arguments)
            self._check_approver(position, planned, found.written)
        except ToolError as error:
            return Recorded(tool_failed(error.message))
        changed = replace(planned, call=replace(planned.call, arguments=found.text), arguments=dict(found.arguments))
        if not self._ledger.change(changed):
            return Recorded(tool_failed("this call was not run."))  # the turn is another worker's
        self._planned[position] = changed
        return found.arguments

    def _check_approver(self, position: int, planned: Planned, arguments: Mapping[str, Any]) -> None:
        """Check the approval of a call whose arguments a hook has changed: `arguments`, as they are written.

        Raises:
            ToolError: the user had to approve the call, and staff must approve it with these arguments.
        """
        row, tool = self._rows.get(position), planned.tool
        if row is not None and row.approver == USER and tool is not None and tool.approver_of(arguments) == STAFF:
            raise needs_staff(planned.call.name)

    def recorded(self, position: int) -> dict[str, Any] | None:
        """The result of a call in the recording that the runtime replays; `None` if the tool runs."""
        call, recording = self._planned[position].call, self._runtime.recording
        found = None if recording is None else recording.answer(call.name, call.arguments)
        if found is None:
            return None
        status, text = found
        return returned(text) if status == "done" else tool_failed(text)

    def check_result(self, position: int, payload: dict[str, Any]) -> dict[str, Any]:
        """Cut a long result, and call the `after_tool` hooks, in a thread of the call; returns the call's result.

        The run goes on with what its row can hold, as a run that continues the turn does.
        """
        payload = storable_json(payload)
        if payload.get("kind") not in _DONE:
            return payload
        planned = self._planned[position]
        self._shown.pop(position, None)
        try:
            payload, recorded = self._files.take(payload, planned.effect_id)
        except PerdureError as error:
            return tool_failed(f"The tool {planned.call.name} ran, but its file cannot be stored: {error.message}")
        text = _text(recorded)
        longest = MAX_RESULT_CHARS if planned.tool is None else planned.tool.max_result_chars
        if len(text) > longest and not descriptions(recorded):
            text = cut(text, longest)
            payload = recorded = returned(text)
        try:
            shown = self._hooks.check_result(planned, text)
        except ToolError as error:
            return tool_failed(error.message)
        if shown != text:
            return returned(shown)
        self._shown[position] = recorded
        return payload

    def finish(self, position: int, payload: dict[str, Any]) -> None:
        """Record the result of a call, if other calls of the reply may outlast it, or that it waits for a client.

        The result of an only call is committed with the round, or by `keep`.

        Raises:
            LeaseLost: the call is deferred, and another worker has the session.
        """
        kind = payload.get("kind")
        if kind == _APPROVAL:
            return
        if kind == _DEFERRED:
            planned = self._planned[position]
            self._wait(queries.DEFER, [self._row(position, planned.runnable, storable_json(payload))])
            return
        self._statuses[position] = status = "done" if kind in _DONE else "failed"
        payload = self._shown.get(position, payload)
        self._texts[position] = text = _text(payload)
        self._unrecorded[position] = status, text, payload
        if len(self._positions) > 1:
            self.keep()

    def keep(self) -> None:
        """Record the results that are known, because the run ends before their round is committed."""
        while self._unrecorded:
            position, (status, text, payload) = self._unrecorded.popitem()
            self._record(position, status, text, payload)

    def failed(self, position: int, error: BaseException) -> None:
        """Record that the tool raised an error, which ends the run."""
        self._statuses[position] = "failed"
        self._record(position, "failed", error_summary(error), None)

    def decide(self, requests: DeferredToolRequests, definitions: Mapping[str, ToolDefinition]) -> DeferredToolResults:
        """The decisions about calls that wait for a person, and the results of calls that a client runs.

        Raises:
            Undecided: a call can still be decided.
            Unanswered: a call has no result yet.
            LeaseLost: another worker has the session.
        """
        self._rows = self.rows()
        deferred = [part for part in requests.calls if self._is_deferred(part)]
        if deferred:
            self._wait(
                queries.DEFER,
                [self._to_defer(part, definitions, requests.metadata.get(part.tool_call_id)) for part in deferred],
            )
            self._fresh -= {self._positions[part.tool_call_id] for part in deferred}
            self._rows = self.rows()
        asked = [self._to_ask(part, definitions) for part in requests.approvals if self._must_ask(part, definitions)]
        if asked:
            self._wait(queries.ASK, asked)
            raise Undecided
        try:
            answers = {part.tool_call_id: self._answer(part) for part in requests.calls}
        except Unanswered:
            if any(row.status == "asked" and row.undecided_s > 0 for row in self._rows.values()):
                raise Undecided from None
            raise
        statuses = {row.status for row in self._rows.values()}
        if statuses & approvals.UNBEGUN:
            self._begin_approved()
        decisions = {part.tool_call_id: self._decision(part) for part in requests.approvals}
        return requests.build_results(approvals=decisions, calls=answers)

    @property
    def waits(self) -> bool:
        """Whether a call waits for a client."""
        rows = self.rows().values()
        return any(row.status == "intended" and row.waits_for is not None for row in rows)

    @property
    def runs_tools(self) -> bool:
        """Whether each call of the reply is one of a tool that acts: no call is the run's output."""
        return len(self._planned) == len(self._positions)

    def close(self, results: Sequence[Result]) -> None:
        """Record the results of the last round, which the settlement of the turn does not write."""
        for result in results:
            self._record(result.position, result.status, result.text, None)

    def close_unbegun(self) -> None:
        """Record that calls did not run whose intents were committed, because the run ended before they began."""
        for position in self._fresh:
            self._record(position, "failed", "this call was not run.", None)
        self._fresh = set()

    def _is_deferred(self, part: ToolCallPart) -> bool:
        """Whether the call waits for a client from now on: a hook or a wrapper may defer a call that has an intent."""
        row = self._rows.get(self._positions[part.tool_call_id])
        return row is None or (row.status == "intended" and row.waits_for is None)

    def _to_defer(
        self, part: ToolCallPart, definitions: Mapping[str, ToolDefinition], metadata: object
    ) -> dict[str, Any]:
        shown = to_jsonable_python(metadata, bytes_mode="base64", serialize_unknown=True)
        payload = storable_json({"kind": _DEFERRED, "metadata": shown})
        return self._row(self._positions[part.tool_call_id], _declared(part, definitions), payload)

    def _must_ask(self, part: ToolCallPart, definitions: Mapping[str, ToolDefinition]) -> bool:
        """Whether the call waits for a person from now on, or for staff after the turn's user has approved it."""
        row = self._rows.get(self._positions[part.tool_call_id])
        if row is None or (row.status == "intended" and row.approver is None):
            return True
        if row.status != "approved" or row.approver == STAFF:
            return False
        if _declared(part, definitions).approver_of(_object(row.arguments)) != STAFF:
            return False
        # `approvals.decide` has let only staff approve a call if the agent declares it, or if its arguments are edited
        # and the agent declares nothing.
        seen = self._agent.find_tool(part.tool_name)
        return not self._is_edited(row) if seen is None else seen.approver_of(_object(row.arguments)) != STAFF

    def _is_edited(self, row: Row[Any]) -> bool:
        return bool(row.arguments != self.open_reply.tool_calls[row.position].arguments)

    def _to_ask(self, part: ToolCallPart, definitions: Mapping[str, ToolDefinition]) -> dict[str, Any]:
        tool, position = _declared(part, definitions), self._positions[part.tool_call_id]
        known = self._rows.get(position)
        arguments = part.args_as_json_str() if known is None else known.arguments
        return {**self._row(position, tool), "approver": tool.approver_of(_object(arguments))}

    def _row(self, position: int, tool: RunnableTool, payload: Any = None) -> dict[str, Any]:
        """The row of a call that waits."""
        known = self._rows.get(position) or self._planned.get(position)
        return {
            "effect_id": new_id(self._runtime.clock) if known is None else known.effect_id,
            "position": position,
            "tool": tool.name,
            "arguments": self.open_reply.tool_calls[position].arguments,
            "effect": tool.effect,
            "payload": payload,
        }

    def _wait(self, statement: Statement, calls: Sequence[Mapping[str, Any]]) -> None:
        rows = self._runtime.database.run(
            statement,
            {
                **self._tenure.fenced,
                "lease_s": self._tenure.lease_s,
                "turn_id": self._tenure.at_hand.turn_id,
                "message_seq": self.open_reply.seq,
                "expires_s": self._runtime.settings.approval.expires_s,
                "calls": as_json(list(calls)),
            },
        )
        if not rows:
            raise LeaseLost

    def _intended(self, position: int, definition: ToolDefinition) -> Planned:
        """Commit the intent of a call that was to wait for a decision; returns the call.

        Raises:
            LeaseLost: another worker has the session.
        """
        planned = self._planned[position] = self._with_tool(self._plan(position), definition)
        at = self._runtime.clock.monotonic()
        self._wait(queries.INTEND, [{**self._row(position, planned.runnable), "timeout_s": planned.timeout_s}])
        self._tenure.renewed(at)
        self._ledger.intended([planned], at)
        self._fresh.add(position)
        return planned

    def _begin_approved(self) -> None:
        unbegun = {
            position: replace(self._planned_at(position), effect_id=row.effect_id)
            for position, row in self._rows.items()
            if row.status in approvals.UNBEGUN
        }
        if not self._ledger.begin(self.open_reply.seq or 0, list(unbegun.values())):
            raise Undecided
        self._rows = self.rows()
        for position, planned in unbegun.items():
            if self._rows[position].status == "intended":
                self._planned[position] = planned
                self._fresh.add(position)

    def _answer(self, part: ToolCallPart) -> Any:
        """The result of a call that a client runs, as pydantic-ai takes it.

        Raises:
            Unanswered: there is none yet.
        """
        position = self._positions[part.tool_call_id]
        row = self._rows[position]
        found: Result | Planned | None = recorded_result(position, row)
        if row.status == "intended":
            turn = self._tenure.at_hand
            found = awaited.resume(self._runtime, self._tenure, turn, row, self._planned_at(position))
        if not isinstance(found, Result):
            raise Unanswered
        self._statuses[position] = found.status
        return ToolFailed(found.text.removeprefix("Error: ")) if found.status == "failed" else found.text

    def _decision(self, part: ToolCallPart) -> ToolApproved | ToolDenied:
        position = self._positions[part.tool_call_id]
        row = self._rows[position]
        if row.status == "denied":
            self._statuses[position] = "denied"
            return ToolDenied(row.result or approvals.DENIED)
        return ToolApproved(override_args=_object(row.arguments) if self._is_edited(row) else None)

    def _planned_at(self, position: int) -> Planned:
        return self._planned.get(position) or self._plan(position)

    def _plan(self, position: int) -> Planned:
        """The call, whose tool is not known yet."""
        call, timeout_s = self.open_reply.tool_calls[position], self._runtime.settings.turn.tool_timeout_s
        return Planned(position, call, new_id(self._runtime.clock), timeout_s=timeout_s)

    def _equipped(self, position: int, definition: ToolDefinition | None, *, approved: bool) -> Planned | None:
        """The call with its tool; `None` if it has no intent and may have none."""
        planned = self._planned.get(position)
        if definition is None:
            return planned
        if planned is None:  # a capability of the agent has approved the call
            return self._intended(position, definition) if self._is_own or approved else None
        if planned.tool is not None:
            return planned
        equipped = self._with_tool(planned, definition)
        if position in self._fresh and equipped.timeout_s != planned.timeout_s:  # the row has the limit of all tools
            self._ledger.extend(equipped)
        return equipped

    def _with_tool(self, planned: Planned, definition: ToolDefinition) -> Planned:
        tool = AdaptedTool.of(definition.name, definition.metadata, definition.timeout)
        return replace(planned, tool=tool, timeout_s=tool.timeout_s or self._runtime.settings.turn.tool_timeout_s)

    def _begun(self, planned: Planned) -> Begin:
        """Begin the call. A call that begins late, such as after one that runs alone, has its whole time limit."""
        now = self._runtime.clock.monotonic()
        self._begun_here.add(planned.position)
        is_late = self._ledger.until(planned) - now < planned.timeout_s * (1 - _LATE)
        if is_late or not self._tenure.still_valid():
            self._ledger.extend(planned)
        left_s = self._ledger.until(planned) - now
        self._until = max(self._until, now + left_s)  # of the calls that run side by side, the longest
        self._tenure.step_within(self._until - now)
        return Begin(planned.position, planned.effect_id, left_s)

    def _decided(self, position: int, effect: Effect, message: str | None = None) -> Begin | Recorded:
        planned = self._planned[position] = replace(self._planned[position], repeated=True)
        decided = self._executor.decide(planned, effect)
        if decided is None:
            self._repeated.add(position)
            self._ledger.extend(planned)
            return self._begun(planned)
        if decided.status == "unknown":
            return self._unknown(position, message)
        self._statuses[position] = decided.status
        return Recorded(returned(decided.text))

    def _unknown(self, position: int, message: str | None) -> Recorded:
        self._statuses[position] = "unknown"
        return Recorded(returned(UNKNOWN_OUTCOME if message is None else f"{message}\n{UNKNOWN_OUTCOME}"))

    def _record(self, position: int, status: str, text: str, payload: Any) -> None:
        self._executor.record(self._planned[position], status, text, payload=storable_json(payload))

    def _recorded(self, row: Row[Any]) -> Any:
        """The result of a call that has ended, as JSON values of a `CallToolResult`.

        Raises:
            Unreadable: the installed pydantic-ai cannot read it, and another worker may.
        """
        if row.payload is not None:
            payload = self._files.restored(row.payload)
            try:
                JSON_CODEC.load(CallToolResult, payload)
            except ValidationError as error:
                if not self._tenure.overdue:
                    raise Unreadable from error
            else:
                self._shown[row.position] = row.payload
                return payload
        if row.status == "unknown":
            return returned(UNKNOWN_OUTCOME)
        text = row.result or ""
        return returned(text) if row.status == "done" else tool_failed(text)

    def rows(self) -> dict[int, Row[Any]]:
        """The rows of the calls, by position."""
        return effect_rows(self._runtime.database, self._tenure.at_hand.turn_id, self.open_reply)


def _text(payload: Mapping[str, Any]) -> str:
    """The text of a `CallToolResult`: of what the tool returned, or of its error. It describes the stored files."""
    found = payload.get("result") if payload.get("kind") in _DONE else payload.get("message")
    found = storable_json(described(found))
    return found if isinstance(found, str) else as_json(found)


def _declared(part: ToolCallPart, definitions: Mapping[str, ToolDefinition]) -> AdaptedTool:
    found = definitions.get(part.tool_name)
    return AdaptedTool.of(part.tool_name, None if found is None else found.metadata)


def _object(arguments: str) -> dict[str, Any]:
    try:
        return load_object(arguments)
    except ValueError:
        return {}
