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
from perdure.hooks import ApprovalWaiting, Hooks, Seen, ToolCalled, ToolCalling, call_hooks
from perdure.runtime import Runtime
from perdure.text.untrusted import load_object, storable
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
            changed = call_hooks(hooks, self._seen(planned), within_s, self.runtime.leaks)
            return with_arguments(planned, changed.arguments, self.runtime)
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

        Raises:
            ToolError: a required hook rejects the call.
        """
        return self._check(planned, self.agent.before_tool, self._seen(planned)).arguments

    def check_result(self, planned: Planned, text: str) -> str:
        """Call the `after_tool` hooks in the call's thread; returns the result as they changed it.

        Raises:
            ToolError: a required hook rejects the result.
        """
        return self._check(planned, self.agent.after_tool, ToolCalled(self._seen(planned), text)).result

    def _seen(self, planned: Planned) -> ToolCalling:
        return self.calling(planned.effect_id, planned.call.name, planned.arguments)

    def _check(self, planned: Planned, hooks: Hooks[Seen], seen: Seen) -> Seen:
        # A hook that hangs must not use up the call's time limit.
        within_s = min(self.runtime.settings.turn.hook_timeout_s, planned.timeout_s / 2)
        try:
            return call_hooks(hooks, seen, within_s, self.runtime.leaks)
        except ToolError:
            raise
        except PerdureError as error:
            raise ToolError(storable(error.message)) from error

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
