"""Commits a step: one statement writes its messages, intents, tool results and changed working variables.

An intent records that a tool call may have begun. The statement (`queries.STEP`) is conditional on the fence and on the
session's tick. A reply is committed with the intents of its tool calls before a tool begins. Results are committed
before the model is called again. Called by the step loop (`react`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from perdure.database.engine import as_json
from perdure.runtime import Runtime
from perdure.tools.variables import VariableSet
from perdure.turns.calls.result_values import Result
from perdure.turns.lease.claim import Claimed, LeaseLost, TurnRef
from perdure.turns.lease.hold import Hold
from perdure.turns.run import queries
from perdure.turns.run.retry_commit import persist
from perdure.turns.run.transcript import Entry, Transcript


@dataclass(frozen=True, slots=True)
class Step:
    """The content of one commit, except working variables. `asks` tells that the last entry requests tool calls."""

    entries: Sequence[Entry]
    asks: bool = False
    intents: Sequence[dict[str, object]] = ()
    results: Sequence[Result] = ()


class StepCommit:
    """Commits the steps of one turn, and adds them to its transcript.

    `spent_s` returns the turn's run time in seconds, over all workers that ran the turn.
    """

    def __init__(
        self,
        runtime: Runtime,
        hold: Hold,
        ref: TurnRef,
        transcript: Transcript,
        variables: VariableSet,
        *,
        spent_s: Callable[[], float],
    ) -> None:
        self._runtime = runtime
        self._hold = hold
        self._ref = ref
        self._transcript = transcript
        self._variables = variables
        self._spent_s = spent_s
        self.sent_at = 0.0
        """The monotonic time at which the last successful statement was sent."""

    def commit(self, step: Step) -> bool:
        """Commit a step. Returns False if a try raised an error although it had committed the step.

        Raises:
            LeaseLost: another worker has the session.
            Unavailable: the database refuses the commit.
        """
        variables = self._variables.changed()
        parameters = self._parameters(step, variables)
        done = persist(self._runtime, self._hold, self._ref.turn_id, lambda: self._write(parameters))
        if isinstance(done, Claimed):
            if done.turn is None or done.turn.turn_id != self._ref.turn_id:
                raise LeaseLost  # another runner has settled the turn
            base, cancelled_at = self._transcript.last_seq(self._ref.first_seq), done.turn.cancel_requested_at
        else:
            base, cancelled_at = done.base, done.cancel_requested_at
        self._hold.tick += 1
        self._transcript.committed(step.entries, base)
        self._variables.committed(variables)
        if cancelled_at is not None:
            self._hold.cancel(self._ref.turn_id)
        return not isinstance(done, Claimed)

    def _write(self, parameters: dict[str, object]) -> Row[Any]:
        sent_at = self._runtime.clock.monotonic()
        rows = self._runtime.database.run(queries.STEP, {**parameters, "spent_s": self._spent_s()})
        if not rows:
            raise LeaseLost
        self._hold.renewed(sent_at)
        self.sent_at = sent_at
        return rows[0]

    def _parameters(self, step: Step, variables: dict[str, Any] | None) -> dict[str, object]:
        return {
            **self._hold.held,
            "tick": self._hold.tick,
            "lease_s": self._runtime.settings.turn.lease_s,
            "turn_id": self._ref.turn_id,
            "channel": self._ref.channel,
            "asks": step.asks,
            "added": len(step.entries),
            "messages": as_json([entry.record(position) for position, entry in enumerate(step.entries, start=1)]),
            "intents": as_json(list(step.intents)),
            "results": as_json([result.record() for result in step.results if result.effect_id]),
            "variables": None if variables is None else as_json(variables),
        }
