"""The agent's hooks around a call, as values and calls for the turn at hand.

`before` and `after` are for a call that runs outside the worker: before its task is sent, and before its result enters
the transcript. `check_call` and `check_result` are for a call that runs in the worker, native or adapted: they run in
the call's thread and count towards its time limit. After a crash, a hook may run again.

Arguments that a hook has changed are checked like those of a model, and recorded before the call begins
(`ledger.CallLedger.change`). What a person approves are the arguments before this change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import tenant_of, user_of
from perdure.agents import Agent
from perdure.errors import PerdureError, ToolError
from perdure.hooks import ApprovalWaiting, ToolCalled, ToolCalling, call_hooks
from perdure.runtime import Runtime
from perdure.text.untrusted import load_object, storable
from perdure.tools.around import copied
from perdure.turns.calls.plan import Planned, with_arguments
from perdure.turns.calls.result_values import Result
from perdure.turns.lease.tenure import TurnRow, TurnScope
from perdure.turns.transcript import Entry


@dataclass(frozen=True, slots=True)
class ToolHooks:
    """Calls the agent's hooks `before_tool`, `after_tool` and `on_approval_waiting`, for the turn `turn`."""

    runtime: Runtime
    scope: TurnScope
    turn: TurnRow
    agent: Agent

    def calling(self, effect_id: UUID, tool: str, arguments: Mapping[str, Any]) -> ToolCalling:
        """What a hook sees of a call."""
        turn = self.turn
        user, tenant, metadata = user_of(turn.user_id), tenant_of(turn.user_id), turn.own_metadata()
        return ToolCalling(user, turn.session_id, turn.turn_id, effect_id, tool, arguments, tenant, metadata)

    def before(self, planned: Planned) -> Planned | Result:
        """Call the `before_tool` hooks.

        Returns the call, with the arguments as the hooks changed them, or a failed result if a required hook rejects
        it.
        """
        hooks, within_s = self.agent.before_tool, self.runtime.settings.turn.hook_timeout_s
        if not hooks:
            return planned
        self.scope.step_within(within_s * len(hooks))
        try:
            return with_arguments(planned, self._changed(planned, within_s), self.runtime)
        except PerdureError as error:
            return Result(planned.position, "failed", f"Error: {storable(error.message)}", planned.effect_id)

    def after(self, planned: Planned, result: Result) -> Result:
        """Call the `after_tool` hooks.

        Returns the result as the hooks changed it, or a failed result if a required hook rejects it.
        """
        hooks, within_s = self.agent.after_tool, self.runtime.settings.turn.hook_timeout_s
        if result.status != "done" or not hooks:
            return result
        self.scope.step_within(within_s * len(hooks))
        try:
            seen = ToolCalled(self._seen(planned), result.text)
            return replace(result, text=call_hooks(hooks, seen, within_s, self.runtime.leaks).result)
        except PerdureError as error:
            return replace(result, status="failed", text=f"Error: {storable(error.message)}")

    def check_call(self, planned: Planned) -> Planned:
        """Call the `before_tool` hooks in the call's thread; returns the call with the arguments as they changed them.

        Raises:
            ToolError: a required hook rejects the call, or the changed arguments are invalid.
        """
        return with_arguments(planned, self.changed_arguments(planned), self.runtime)

    def changed_arguments(self, planned: Planned) -> Mapping[str, Any]:
        """The arguments as the `before_tool` hooks changed them; `planned.arguments` itself if they changed none.

        Those that they did not change are the values of `planned.arguments` themselves.

        Raises:
            ToolError: a required hook rejects the call.
        """
        try:
            return self._changed(planned, self._within_s(planned))
        except ToolError:
            raise
        except PerdureError as error:
            raise ToolError(storable(error.message)) from error

    def _changed(self, planned: Planned, within_s: float) -> Mapping[str, Any]:
        """The arguments as the `before_tool` hooks changed them. Each hook gets a copy, which it may change in place.

        Raises:
            PerdureError: a required hook rejects the call.
        """
        arguments: Mapping[str, Any] = planned.arguments
        for hook in self.agent.before_tool:
            seen = self.calling(planned.effect_id, planned.call.name, copied(arguments))
            changed = call_hooks([hook], seen, within_s, self.runtime.leaks)
            if changed is not seen:
                arguments = _merged(arguments, seen.arguments, changed.arguments)
        return arguments

    def check_result(self, planned: Planned, text: str) -> str:
        """Call the `after_tool` hooks in the call's thread; returns the result as they changed it.

        Raises:
            ToolError: a required hook rejects the result.
        """
        seen, hooks = ToolCalled(self._seen(planned), text), self.agent.after_tool
        try:
            return call_hooks(hooks, seen, self._within_s(planned), self.runtime.leaks).result
        except ToolError:
            raise
        except PerdureError as error:
            raise ToolError(storable(error.message)) from error

    def _seen(self, planned: Planned) -> ToolCalling:
        return self.calling(planned.effect_id, planned.call.name, copied(planned.arguments))

    def _within_s(self, planned: Planned) -> float:
        # A hook that hangs must not use up the call's time limit.
        return min(self.runtime.settings.turn.hook_timeout_s, planned.timeout_s / 2)

    def waiting(self, open_reply: Entry, rows: Mapping[int, Row[Any]]) -> None:
        """Call the `on_approval_waiting` hooks for the calls of the message `open_reply` that wait for a person.

        Raises:
            PerdureError: a required hook failed.
        """
        hooks, within_s = self.agent.on_approval_waiting, self.runtime.settings.turn.hook_timeout_s
        for position, row in rows.items():
            if row.status == "asked":
                call = open_reply.tool_calls[position]
                self.scope.step_within(within_s * len(hooks))
                seen = self.calling(row.effect_id, call.name, load_object(call.arguments))
                call_hooks(hooks, ApprovalWaiting(seen, call.id, row.approver), within_s, self.runtime.leaks)


def _merged(before: Mapping[str, Any], shown: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments `after` a hook that saw `shown`, a copy of `before`, with the unchanged values of `before`.

    Returns `before` itself if all values are unchanged.
    """
    merged = {
        name: before[name] if name in before and _is_same(value, shown[name], before[name]) else value
        for name, value in after.items()
    }
    is_same = merged.keys() == before.keys() and all(merged[name] is before[name] for name in merged)
    return before if is_same else merged


def _is_same(value: Any, shown: Any, before: Any) -> bool:
    if type(value) is type(before) and _are_equal(value, before):
        return True
    # Without an equality that copies keep, the value that was shown counts as unchanged.
    return value is shown and not _are_equal(copied({"": before})[""], before)


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 (a class may forbid it, as those of arrays do)
        return one is other
