"""The step loop (ReAct): ask the model, run the tools it asks for, ask again.

Keeps the law "save, then act": a reply is committed, with the intents of its tool calls,
before a tool begins, and the tools' results before the model is asked again. No connection
is held while a model or a tool is at work.
"""

from __future__ import annotations

from dataclasses import dataclass

from perdure.agents import Agent
from perdure.database.engine import as_json
from perdure.errors import (
    BudgetExhausted,
    DeadlineExceeded,
    InvalidResponse,
    PerdureError,
    ProviderError,
    Unavailable,
)
from perdure.models.protocol import CallAborted, Model, ModelCall, ModelReply, ModelRequest
from perdure.runtime import Runtime
from perdure.tools.variables import VariableSet
from perdure.turns import queries
from perdure.turns.briefing import brief
from perdure.turns.effects import Interrupted, Ledger, Planned, Result, plan
from perdure.turns.lease import Hold, LeaseLost, TurnRef
from perdure.turns.settlement import Cancelled, Ending, Failed, Replied
from perdure.turns.transcript import Entry, Transcript, result_of, said


@dataclass(frozen=True, slots=True)
class Parked:
    """The worker shuts down: another one goes on from what is committed."""


class Turn:
    """One turn under one lease, from wherever its transcript stands to its ending."""

    def __init__(
        self,
        runtime: Runtime,
        hold: Hold,
        ref: TurnRef,
        transcript: Transcript,
        spent_s: float,
        *,
        variables: VariableSet | None = None,
    ) -> None:
        self.ref = ref
        self.transcript = transcript
        self._runtime = runtime
        self._hold = hold
        self._began = runtime.clock.monotonic() - spent_s
        self._agent: Agent = runtime.agents.get(ref.agent)
        self._model: Model = runtime.models(self._agent.model or runtime.settings.model)
        self._briefing: str | None = None
        self._tools = tuple(tool.schema() for tool in self._agent.tool_list)
        self._variables = variables or VariableSet()
        self._ledger = Ledger(runtime, hold, ref, self._agent, self._variables)
        self._max_steps = self._agent.max_steps or runtime.settings.turn.max_steps
        self._timeout_s = self._agent.timeout_s or runtime.settings.turn.timeout_s
        self._planned: list[Planned] | None = None
        if ref.cancel_requested_at is not None:
            hold.cancel(ref.turn_id)

    @property
    def spent_s(self) -> float:
        """Seconds under lease, over all the runners that the turn has had."""
        return self._runtime.clock.monotonic() - self._began

    def run(self) -> Ending | Parked:
        """Step until the turn ends.

        Raises:
            LeaseLost: the session is somebody else's now.
            Unavailable: the database cannot be reached; what is committed must be read again.
        """
        while True:
            ending = self._over()
            if ending is not None:
                return ending
            try:
                reply = self._step()
            except (CallAborted, Interrupted) as error:
                if not self._hold.stopping.is_set():
                    return Failed(_broken_off(error))
                continue  # the hold says why, at the head of the loop
            except Unavailable:
                raise
            except PerdureError as error:
                return Failed(error)
            if reply is not None:
                return Replied(reply)

    def _over(self) -> Ending | Parked | None:
        if self._hold.lost:
            raise LeaseLost
        if self._hold.cancelled:
            return Cancelled()
        if self._planned is not None:
            return None  # intents are committed: their calls are run before anything else ends the turn
        if self._hold.draining:
            return Parked()
        if self.spent_s >= self._timeout_s:
            return Failed(DeadlineExceeded(f"I could not finish within {self._timeout_s:g} seconds, so I stopped."))
        if self.transcript.steps >= self._max_steps and self.transcript.asking() is None:
            return Failed(BudgetExhausted(f"I could not finish within {self._max_steps} steps, so I stopped."))
        return None

    def _step(self) -> Entry | None:
        """One step; returns the reply that ends the turn, if this step brought it."""
        asking = self.transcript.asking()
        if asking is not None:
            self._answer(asking)
            return None
        reply = said(self.ref.turn_id, self._query())
        if not reply.tool_calls:
            return reply
        if self._hold.draining:
            raise Interrupted  # the process leaves: its successor asks again, and has the time to run the tools
        self._ask(reply)
        return None

    def _query(self) -> ModelReply:
        limit_s = min(self._runtime.settings.model_timeout_s, max(self._timeout_s - self.spent_s, 0.001))
        call = ModelCall(self._runtime.clock, limit_s)
        if self._briefing is None:
            self._briefing = brief(self._runtime.database, self._agent, self.ref)
        request = ModelRequest(self.transcript.prompt(self._briefing), self._tools)
        self._hold.step_within(limit_s)
        with self._hold.calling(call):
            try:
                reply = self._model.respond(request, call)
            except Unavailable as error:  # here that word means the database, which is asked again without end
                raise ProviderError(error.message) from error
        if not reply.content.strip() and not reply.tool_calls:
            raise InvalidResponse("The model's answer was empty.")
        return reply

    def _ask(self, asking: Entry) -> None:
        planned = plan(self._agent, asking.tool_calls, self._runtime)
        intents = [each.intent() for each in planned if each.refusal is None]
        self._commit([*self.transcript.uncommitted, asking], asks=True, intents=intents)
        self._planned = planned

    def _answer(self, asking: Entry) -> None:
        planned, self._planned = self._planned, None
        results = self._ledger.resume(asking) if planned is None else self._ledger.perform(planned)
        entries = [
            result_of(self.ref.turn_id, call, result.text)
            for call, result in zip(asking.tool_calls, results, strict=True)
        ]
        self._commit(entries, asks=False, results=results)

    def _commit(
        self,
        entries: list[Entry],
        *,
        asks: bool,
        intents: list[dict[str, object]] | None = None,
        results: list[Result] | None = None,
    ) -> None:
        asked_at = self._runtime.clock.monotonic()
        variables = self._variables.changed()
        rows = self._runtime.database.run(
            queries.STEP,
            {
                "session_id": self._hold.session_id,
                "token": self._hold.token,
                "lease_s": self._runtime.settings.turn.lease_s,
                "turn_id": self.ref.turn_id,
                "channel": self.ref.channel,
                "asks": asks,
                "spent_s": self.spent_s,
                "added": len(entries),
                "messages": as_json([entry.record(position) for position, entry in enumerate(entries, start=1)]),
                "intents": as_json(intents or []),
                "results": as_json([result.record() for result in results or [] if result.effect_id]),
                "variables": None if variables is None else as_json(variables),
            },
        )
        if not rows:
            raise LeaseLost
        self._hold.renewed(asked_at)
        self.transcript.committed(entries, rows[0].base)
        self._variables.committed(variables)
        if rows[0].cancel_requested_at is not None:
            self._hold.cancel(self.ref.turn_id)


def _broken_off(error: Exception) -> PerdureError:
    """A model said that its call was ended, and nobody had ended it."""
    broken = ProviderError("The model broke off.")
    broken.__cause__ = error
    return broken
