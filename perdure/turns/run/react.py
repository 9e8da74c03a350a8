"""The step loop (ReAct): call the model, run the tool calls of its reply, call the model again.

Each reply and each round of tool results is committed before the loop continues (`commit_step`). The loop holds no
database connection during a model call or a tool call.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import assert_never

from perdure.access.tenants import tenant_of, user_of
from perdure.agents import Agent
from perdure.errors import (
    BudgetExhausted,
    ContextTooLong,
    DeadlineExceeded,
    IncompleteReply,
    PerdureError,
    ProviderError,
    Unavailable,
    loggable,
)
from perdure.events.writer import TurnEvents
from perdure.hooks import Hooks, Seen, TurnEnding, TurnStarted, call_hooks
from perdure.memory.sections.budget import estimate_tokens
from perdure.models.endings import checked, why_calls_do_not_run
from perdure.models.protocol import CallAborted, Model, ModelCall, ModelReply, ModelRequest, Role, ToolSchema
from perdure.runtime import Runtime
from perdure.settings import OnUnavailable
from perdure.tools.sources import Toolset
from perdure.tools.variables import VariableSet
from perdure.turns.calls import approvals, awaited
from perdure.turns.calls.approvals import Undecided
from perdure.turns.calls.awaited import Awaiting
from perdure.turns.calls.plan import Planned, equip, plan
from perdure.turns.calls.run_calls import CallRunner, Interrupted, MissingTool
from perdure.turns.lease import wait_for_model
from perdure.turns.lease.claim import LeaseLost, TurnRef
from perdure.turns.lease.hold import Hold
from perdure.turns.prompt.system_message import Briefing, brief, halved, offered
from perdure.turns.run.commit_step import Step, StepCommit
from perdure.turns.run.settle import Cancelled, Ending, Failed, Replied, closings
from perdure.turns.run.transcript import Entry, Transcript, said

log = logging.getLogger(__name__)

_MOST_INCOMPLETE = 3
"""How many replies in a row may end before their tool calls are complete. The next ones would, too."""

_MOST_HALVINGS = 2
"""How often a turn's prompt is built again with half of the budgets, because it is too long for the model."""


@dataclass(frozen=True, slots=True)
class Parked:
    """The turn is not settled. A worker will continue the turn after the turn's last committed step.

    `Turn.run` returns this if the worker shuts down.
    """


@dataclass(frozen=True, slots=True)
class Waiting:
    """Tool calls wait for a person's decision. The session is already released."""


@dataclass(frozen=True, slots=True)
class Asleep:
    """Tool calls wait for a task or a time. The session is already released."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """This process lacks `what`: the turn's agent, or the tool of a call that an earlier worker committed."""

    what: str


Stop = Parked | Waiting | Asleep | Lacking | wait_for_model.Delayed


class Turn:
    """Runs one turn under one lease. Begins after the last step in the transcript."""

    def __init__(
        self,
        runtime: Runtime,
        hold: Hold,
        ref: TurnRef,
        transcript: Transcript,
        spent_s: float,
        *,
        variables: VariableSet | None = None,
        overdue: bool = False,
    ) -> None:
        self.ref = ref
        self.transcript = transcript
        self._runtime = runtime
        self._hold = hold
        self._began = runtime.clock.monotonic() - spent_s
        self._agent: Agent = runtime.agents.get(ref.agent)
        self._model_name = self._agent.model or runtime.settings.model
        self._model: Model = runtime.models(self._model_name)
        self._briefing: Briefing | None = None
        self._limits = runtime.settings.memory
        self._halvings = 0
        self._fallback_waits = False
        self._incomplete = 0
        self._tools = Toolset()
        self._schemas: tuple[ToolSchema, ...] = ()
        self._offered: tuple[ToolSchema, ...] = ()
        self._variables = variables or VariableSet()
        self._events = self._open_events()
        self._steps = StepCommit(runtime, hold, ref, transcript, self._variables, spent_s=lambda: self.spent_s)
        self._calls = CallRunner(
            runtime, hold, ref, self._agent, self._variables,
            commit=lambda entries, results: self._commit(Step(entries, results=results)), overdue=overdue,
        )  # fmt: skip
        self._max_steps = self._agent.max_steps or runtime.settings.turn.max_steps
        self._timeout_s = self._agent.timeout_s or runtime.settings.turn.timeout_s
        self._planned: list[Planned] | None = None
        self._before_call_s = spent_s
        if ref.cancel_requested_at is not None:
            hold.cancel(ref.turn_id)

    @property
    def spent_s(self) -> float:
        """The turn's run time in seconds, over all workers that ran the turn."""
        return self._runtime.clock.monotonic() - self._began

    @property
    def case_ids(self) -> tuple[str, ...]:
        """The ids of the cases in the prompt."""
        return () if self._briefing is None else self._briefing.case_ids

    def run(self) -> Ending | Stop:
        """Run steps until the turn ends or stops.

        Raises:
            LeaseLost: another worker has the session.
            Unavailable: the database cannot be reached; the transcript must be read again.
        """
        self._events.state("running")
        left = self._give_way() or self._call_before_hooks() or self._loop()
        if isinstance(left, Stop):
            return left
        ending = self._call_after_hooks(left)
        if isinstance(ending, Failed):
            self._events.rewind()
        return ending

    def _give_way(self) -> wait_for_model.Delayed | None:
        """The wait behind older turns that wait for the model; `None` if the turn may run."""
        if not self._may_park or self._hold.stopping.is_set() or self.transcript.asking() is not None:
            return None
        if not wait_for_model.overtakes(self._runtime.database, self.ref, self._model_name):
            return None
        busy = ProviderError("Earlier turns wait for the model.", transient=True)
        return wait_for_model.Delayed(busy, 0, self.spent_s, self.transcript.steps, self._model_name)

    @property
    def _may_park(self) -> bool:
        setting = self._runtime.settings.turn.on_unavailable
        return (self._agent.on_unavailable or setting) == OnUnavailable.PARK

    def _loop(self) -> Ending | Stop:
        while True:
            ending = self._stop_reason()
            if ending is not None:
                return ending
            left = self._step_or_stop()
            if left is not None:
                return left

    def _call_before_hooks(self) -> Failed | None:
        """Call the `before_turn` hooks; returns a failure if a required hook rejects the turn.

        If no required hook rejects the turn, this commits the user's messages. The hooks then do not run again.

        Raises:
            LeaseLost: another worker has the session.
        """
        uncommitted = self.transcript.uncommitted
        if not self._agent.before_turn or not uncommitted or self._hold.stopping.is_set():
            return None
        try:
            self._call_hooks(self._agent.before_turn, self._seen())
        except PerdureError as error:
            return Failed(error)
        self._commit(Step(uncommitted))
        return None

    def _call_hooks(self, hooks: Hooks[Seen], seen: Seen) -> None:
        within_s = self._runtime.settings.turn.hook_timeout_s
        self._hold.step_within(within_s * len(hooks))
        call_hooks(hooks, seen, within_s, self._runtime.leaks)

    def _call_after_hooks(self, ending: Ending) -> Ending:
        """Call the `after_turn` hooks; returns the ending, or a failure if a required hook rejects the reply."""
        match ending:
            case Replied(reply):
                over = TurnEnding(self._seen(), "done", reply.content)
            case Failed(error):
                over = TurnEnding(self._seen(), "failed", error.message)
            case Cancelled():
                over = TurnEnding(self._seen(), "cancelled", None)
            case _:
                assert_never(ending)
        try:
            self._call_hooks(self._agent.after_turn, over)
        except PerdureError as error:
            return Failed(error, rejected=ending.reply) if isinstance(ending, Replied) else ending
        return ending

    def _seen(self) -> TurnStarted:
        ref = self.ref
        text = "\n".join(entry.content for entry in self.transcript.present if entry.role is Role.USER)
        user, tenant = user_of(ref.user_id), tenant_of(ref.user_id)
        return TurnStarted(
            user, self._hold.session_id, ref.turn_id, ref.agent, ref.channel, text, tenant, ref.own_metadata()
        )

    def _step_or_stop(self) -> Ending | Stop | None:
        """Take one step; returns `None` if the turn continues."""
        try:
            reply = self._step()
        except Undecided:
            return self._wait_for_approval()
        except Awaiting as awaiting:
            return self._wait_for_calls(awaiting)
        except MissingTool as missing:
            return Lacking(str(missing))
        except (CallAborted, Interrupted) as error:
            # If the turn is being stopped, the loop's next check returns the reason.
            return None if self._hold.stopping.is_set() else Failed(_aborted_call(error))
        except Unavailable:
            raise
        except PerdureError as error:
            return self._delay(error) or Failed(error)
        return None if reply is None else Replied(reply)

    def _wait_for_calls(self, awaiting: Awaiting) -> Asleep | None:
        """Release the session until the turn's calls have results or are due; `None` if the turn continues now."""
        asking = self.ref.turn_id, self._seq_of_calls()
        waits = awaited.wait(self._runtime, self._hold, asking, awaiting.results, self.spent_s)
        if waits is approvals.Waits.CANCELLED:
            self._hold.cancel(self.ref.turn_id)
        if waits is not approvals.Waits.YES:
            return None
        self._events.state("parked")
        return Asleep()

    def _seq_of_calls(self) -> int:
        """The `seq` of the message whose tool calls have no results yet."""
        asking = self.transcript.asking()
        if asking is None or asking.seq is None:
            raise LookupError("no call is open")
        return asking.seq

    def _wait_for_approval(self) -> Waiting | Failed | None:
        """Release the session until a person has decided about the turn's calls.

        Returns `None`, without a release, if the turn is cancelled or its session is being ended, and a failure if a
        required hook fails.
        """
        seq = self._seq_of_calls()
        if (asking := self.transcript.asking()) is not None:
            try:
                self._calls.announce(asking)
            except PerdureError as error:
                return Failed(error)
        waits = approvals.wait(self._runtime, self._hold, self.ref.turn_id, seq, self.spent_s)
        if waits is approvals.Waits.CANCELLED:
            self._hold.cancel(self.ref.turn_id)
        if waits is not approvals.Waits.YES:
            return None
        self._events.state("waiting_approval")
        return Waiting()

    def _delay(self, error: PerdureError) -> wait_for_model.Delayed | None:
        """The wait for a model after `error`; `None` if the turn fails with `error` instead."""
        if not self._may_park:
            return None
        wait_s = wait_for_model.pause_s(error, self._runtime.settings.breaker.cooldown_s)
        if wait_s is None or self.spent_s >= self._timeout_s:
            return None
        if not wait_for_model.may_wait(self.ref, self._runtime.clock):
            return None
        return wait_for_model.Delayed(error, wait_s, self._before_call_s, self.transcript.steps, self._model_name)

    def _stop_reason(self) -> Ending | Parked | None:
        if self._hold.lost:
            raise LeaseLost
        if self._hold.cancelled:
            return Cancelled()
        if self._planned is not None:
            return None  # committed calls run before the turn can stop
        if self._hold.draining:
            return Parked()
        if self.spent_s >= self._timeout_s:
            return Failed(out_of_time(self._timeout_s))
        if self.transcript.steps >= self._max_steps and self.transcript.asking() is None:
            return Failed(BudgetExhausted(f"I could not finish within {self._max_steps} steps, so I stopped."))
        return None

    def _step(self) -> Entry | None:
        """Take one step; returns the reply if it ends the turn."""
        asking = self.transcript.asking()
        if asking is not None:
            self._run_calls(asking)
            return None
        made = self._call_model()
        reply = said(self.ref.turn_id, made, self.transcript.call_ids)
        if not reply.tool_calls:
            return reply
        refusal = why_calls_do_not_run(made)
        if refusal is not None:
            refused = closings(self.ref.turn_id, reply, [f"Error: {refusal}"] * len(reply.tool_calls))
            self._commit(Step([*self.transcript.uncommitted, reply, *refused]))
            self._incomplete += 1
            if self._incomplete == _MOST_INCOMPLETE:
                raise IncompleteReply(f"The model's replies broke off {_MOST_INCOMPLETE} times in a row, so I stopped.")
            return None
        self._incomplete = 0
        if self._hold.draining:
            raise Interrupted  # this process has no time left to run the tools; the next worker asks the model again
        self._commit_calls(reply)
        return None

    def _commit(self, step: Step) -> bool:
        """Commit a step and announce its messages; see `StepCommit.commit`."""
        at_once = self._steps.commit(step)
        self._events.committed(len(step.entries))
        return at_once

    def _open_events(self) -> TurnEvents:
        committed = sum(entry.seq is not None for entry in self.transcript.present)
        place = (self.ref.turn_id, self._hold.session_id, self._hold.token, committed)
        return TurnEvents(*place) if self._runtime.events is None else self._runtime.events.open(*place)

    def _call_model(self) -> ModelReply:
        """The model's reply. If the prompt is too long for the model, it is built again with smaller budgets.

        Raises:
            ContextTooLong: after `_MOST_HALVINGS`, or if a smaller budget leaves nothing out.
        """
        request = self._request()
        while True:
            try:
                return self._respond(request)
            except ContextTooLong as error:
                self._events.rewind()
                log.info("turn %s: its prompt is too long: %s", self.ref.turn_id, loggable(error))
                request = self._smaller_request(request, error)

    def _request(self) -> ModelRequest:
        if self._briefing is None:
            self._briefing = brief(
                self._runtime, self._hold, self._agent, self.ref, self.transcript, limits=self._limits
            )
        self._load_tools()
        return ModelRequest(self.transcript.prompt(self._briefing.text, self._limits.budget_working), self._offered)

    def _smaller_request(self, before: ModelRequest, error: ContextTooLong) -> ModelRequest:
        """The prompt under half of the budgets. The turn's later prompts keep the smaller budgets.

        If it cannot be smaller, the same prompt is for the fallback, if the model has one.

        Raises:
            ContextTooLong: `error`, because nothing is left to try.
        """
        while self._halvings < _MOST_HALVINGS:
            self._halvings += 1
            self._limits = halved(self._limits, sum(estimate_tokens(each.content) for each in before.messages))
            self._briefing = None
            request = self._request()
            if request != before:
                return request
        if self._fallback_waits:
            return before
        raise error

    def _respond(self, request: ModelRequest) -> ModelReply:
        self._before_call_s = self.spent_s
        # The time limit for the model and its fallbacks together. Each of them also has a time limit of its own.
        limit_s = max(self._timeout_s - self._before_call_s, 0.001)
        call = ModelCall(self._runtime.clock, limit_s, self._events.delta, self._events.rewind)
        call.may_shorten = self._halvings < _MOST_HALVINGS
        self._hold.step_within(limit_s)
        with self._hold.calling(call):
            try:
                return checked(self._model.respond(request, call))
            except Unavailable as error:  # the runner would take `Unavailable` for a database error and retry
                raise ProviderError(error.message) from error
            finally:
                self._fallback_waits = call.fallback_waits

    def _load_tools(self) -> None:
        """Read the agent's tools before each model call, because an MCP server's tools may change between two steps."""
        self._tools = equip(self._runtime, self._hold, self._agent)
        schemas = self._tools.schemas()
        if schemas != self._schemas:  # so that tools beyond the budget are logged once
            self._schemas = schemas
            self._offered = offered(self._agent, schemas, self._runtime.settings.memory.budget_tools)

    def _commit_calls(self, asking: Entry) -> None:
        planned = plan(self._tools, asking.tool_calls, self._runtime)
        runnable = [each for each in planned if each.refusal is None]
        waits = any(each.needs_approval for each in runnable)
        expires_s = self._runtime.settings.approval.expires_s
        intents = [each.request(expires_s) if waits else each.intent() for each in runnable]
        at_once = self._commit(Step([*self.transcript.uncommitted, asking], asks=True, intents=intents))
        if not (waits or at_once):
            self._calls.extend(planned)
        self._planned = None if waits else planned

    def _run_calls(self, asking: Entry) -> None:
        planned, self._planned = self._planned, None
        self._calls.answer(asking, planned, self._steps.sent_at)


def out_of_time(limit_s: float) -> DeadlineExceeded:
    """The error of a turn that has reached its time limit."""
    return DeadlineExceeded(f"I could not finish within {limit_s:g} seconds, so I stopped.")


def _aborted_call(error: Exception) -> PerdureError:
    """The error for a model that reported its call as aborted, although the engine had not aborted the call."""
    broken = ProviderError("The model broke off its answer.")
    broken.__cause__ = error
    return broken
