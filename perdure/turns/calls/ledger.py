"""The rows of the calls of the turn at hand, written under the session's fence, and the calls' time limits.

A call's time limit runs from the time at which its intent was sent to the database. So it never ends later than the
row's `decide_at`, after which another worker may resolve the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from perdure.database.engine import Statement, as_json
from perdure.runtime import Runtime
from perdure.text.untrusted import storable
from perdure.tools.delegation import AgentTool
from perdure.turns.calls import queries
from perdure.turns.calls.approvals import ENDED, EXPIRED
from perdure.turns.calls.plan import Planned
from perdure.turns.calls.result_values import Result
from perdure.turns.lease.tenure import LeaseLost, Tenure


class CallLedger:
    """Begins calls, and restarts their time limits."""

    def __init__(self, runtime: Runtime, tenure: Tenure) -> None:
        self._runtime = runtime
        self._tenure = tenure
        self._intended_at: dict[UUID, float] = {}

    def until(self, planned: Planned) -> float:
        """The monotonic time at which a call's time limit ends."""
        return self._intended_at[planned.effect_id] + planned.timeout_s

    def intended(self, calls: Iterable[Planned], at: float) -> None:
        """Start the time limits of `calls` at `at`, the monotonic time at which their intents were sent."""
        for each in calls:
            self._intended_at[each.effect_id] = max(at, self._intended_at.get(each.effect_id, at))

    def extend(self, planned: Planned, statement: Statement = queries.EXTEND_EFFECT) -> None:
        """Restart a call's time limit, and renew the lease.

        Raises:
            LeaseLost: another worker has the session.
        """
        asked_at = self._runtime.clock.monotonic()
        rows = self._runtime.database.run(
            statement,
            {
                **self._tenure.fenced,
                "effect_id": planned.effect_id,
                "timeout_s": planned.timeout_s,
                "lease_s": self._tenure.lease_s,
            },
        )
        if not rows:
            raise LeaseLost
        self._tenure.renewed(asked_at)
        self._intended_at[planned.effect_id] = asked_at

    def delegate(self, planned: Planned, tool: AgentTool, probe_s: float) -> Result | None:
        """Ask the agent of a call whose intent is committed, unless it was asked before. Probe it after `probe_s`.

        Returns a failed result if too many agents have delegated above this one, otherwise `None`.

        Raises:
            LeaseLost: another worker has the session; nothing was written.
        """
        most = self._runtime.settings.turn.delegation_depth
        rows = self._runtime.database.run(
            queries.DELEGATE,
            {
                **self._tenure.fenced,
                "effect_id": planned.effect_id,
                "turn_id": self._tenure.at_hand.turn_id,
                "agent": tool.agent_name,
                "task": storable(planned.arguments["task"]),
                "most": most,
                "probe_s": probe_s,
            },
        )
        if not rows:
            raise LeaseLost
        if rows[0].too_deep:
            text = f"Error: {tool.name} was not asked: agents delegate to one another at most {most} times in a chain."
            return Result(planned.position, "failed", text, planned.effect_id)
        if rows[0].is_new:
            self._runtime.wake.session(planned.effect_id, rows[0].priority)
        return None

    def change(self, planned: Planned) -> bool:
        """Record the arguments that a hook has changed, before the call begins.

        Returns False if another worker has the session, or the call has a result. Nothing is written then.
        """
        given = {"effect_id": planned.effect_id, "arguments": planned.call.arguments}
        return bool(self._runtime.database.run(queries.CHANGE_ARGUMENTS, {**self._tenure.fenced, **given}))

    def begin(self, message_seq: int, calls: Sequence[Planned]) -> bool:
        """Begin the approved calls among `calls`, and start their time limits.

        Denies undecided calls if the approval has expired or the session's end is requested. Returns False, and begins
        no call, if a person can still decide about a call.

        Raises:
            LeaseLost: another worker has the session; nothing was written.
        """
        asked_at = self._runtime.clock.monotonic()
        rows = self._runtime.database.run(
            queries.BEGIN_APPROVED,
            {
                **self._tenure.fenced,
                "lease_s": self._tenure.lease_s,
                "turn_id": self._tenure.at_hand.turn_id,
                "message_seq": message_seq,
                "calls": as_json([{"effect_id": each.effect_id, "timeout_s": each.timeout_s} for each in calls]),
                "expired": EXPIRED,
                "ended": ENDED,
            },
        )
        if not rows:
            raise LeaseLost
        if rows[0].undecided:
            return False
        self.intended(calls, asked_at)
        return True
