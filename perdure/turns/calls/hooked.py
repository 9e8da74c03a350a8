"""The agent's hooks around a call that runs outside the worker.

`before` runs before the task is sent. `after` runs before the result enters the transcript. After a crash, a hook may
run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from perdure.access.tenants import tenant_of, user_of
from perdure.agents import Agent
from perdure.errors import PerdureError
from perdure.hooks import ApprovalWaiting, Hooks, Seen, ToolCalled, ToolCalling, call_hooks
from perdure.models.protocol import ToolCall
from perdure.runtime import Runtime
from perdure.text.untrusted import load_object, storable
from perdure.turns.calls.plan import Planned
from perdure.turns.calls.result_values import Result
from perdure.turns.lease.tenure import Tenure


@dataclass(frozen=True, slots=True)
class ToolHooks:
    """Calls the agent's hooks `before_tool` and `after_tool`, for the turn at hand."""

    runtime: Runtime
    tenure: Tenure
    agent: Agent

    def before(self, planned: Planned) -> Result | None:
        """Call the `before_tool` hooks. Returns a failed result if a required hook rejects the call, else `None`."""
        refused = self._call(self.agent.before_tool, lambda: self._seen(planned))
        return None if refused is None else Result(planned.position, "failed", f"Error: {refused}", planned.effect_id)

    def after(self, planned: Planned, result: Result) -> Result:
        """Call the `after_tool` hooks. Returns `result`, or a failed result if a required hook rejects it."""
        if result.status != "done":
            return result
        refused = self._call(self.agent.after_tool, lambda: ToolCalled(self._seen(planned), result.text))
        return result if refused is None else replace(result, status="failed", text=f"Error: {refused}")

    def waiting(self, call: ToolCall, effect_id: UUID, approver: str) -> None:
        """Call the `on_approval_waiting` hooks for a call.

        Raises:
            PerdureError: a required hook failed.
        """
        hooks, within_s = self.agent.on_approval_waiting, self.runtime.settings.turn.hook_timeout_s
        self.tenure.step_within(within_s * len(hooks))
        seen = self._calling(effect_id, call.name, load_object(call.arguments))
        call_hooks(hooks, ApprovalWaiting(seen, call.id, approver), within_s, self.runtime.leaks)

    def _call(self, hooks: Hooks[Seen], seen: Callable[[], Seen]) -> str | None:
        if not hooks:
            return None
        within_s = self.runtime.settings.turn.hook_timeout_s
        self.tenure.step_within(within_s * len(hooks))
        try:
            call_hooks(hooks, seen(), within_s, self.runtime.leaks)
        except PerdureError as error:
            return storable(error.message)
        return None

    def _seen(self, planned: Planned) -> ToolCalling:
        return self._calling(planned.effect_id, planned.call.name, planned.arguments)

    def _calling(self, effect_id: UUID, tool: str, arguments: Mapping[str, Any]) -> ToolCalling:
        turn = self.tenure.at_hand
        user, tenant, metadata = user_of(turn.user_id), tenant_of(turn.user_id), turn.own_metadata()
        return ToolCalling(user, self.tenure.session_id, turn.turn_id, effect_id, tool, arguments, tenant, metadata)
