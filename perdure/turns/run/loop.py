"""The loop: claim a session, run its turns step by step, and settle each.

    claim ─▶ ( call the model ─▶ commit ─▶ execute its calls ─▶ commit )* ─▶ settle

Read this file from top to bottom. `Runner.drain` is called by the task `turns.run`: it claims one due session after
another. `Runner.run` claims a given one, in a child process for a turn that ends its processes. Either runs the
session's turns, the oldest first (`Runner._run_session`, `Runner._run_turn`). Each turn is a loop of steps (`Turn`);
what a step does depends on the kind of agent (`OwnTurn`, or an adapter's). What stops the loop is an outcome
(`turns.outcome`), and `Leaving.leave` acts on each: it settles the turn, or leaves it to a later worker (`run.leave`).

The tenure has the session's fence. It goes only to code that reads or writes under the fence: `claim`, `keeper`,
`snapshot`, `commit`, the ledger of the calls, and `leave`. All other code gets the turn's row, and the tenure as a
`TurnScope`: the deadline of the step and the reasons to stop.

A process may be killed at any point. Everything that another worker needs is committed before the loop goes on: a
model's reply together with the intents of its tool calls, before a tool begins; the results of the calls, before the
model is called again; the reply together with the end of the turn. So the next claim finds, at the end of the
transcript, either a message of the user, results of tools or a reply that its agent has sent back, and the model is
called; or a reply with open calls, and the model is not called again for it.

A killed worker's lease expires after `lease_s`. The sweeper of any worker, which looks for such sessions each `sweep_s`
seconds, then publishes the wake-up that leads to the next claim. Each claim is a strike against the turn, and a
committed step forgets all strikes but that of the present claim: a turn with more than `max_attempts` is settled as
failed, without running again. A killed worker leaves each open call in doubt, because its intent does not tell whether
its tool had begun:

    pure, idempotent       the tool runs, perhaps for the second time, with the same effect id
    unsafe with a probe    it runs only if the probe says that nothing happened
    unsafe without one     it does not run again: the result that the model reads is that its outcome is unknown

A call that waits for an approval has a request instead of an intent, so it is in doubt only after its approval. No
database connection is held during a model call or a tool call.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable
from uuid import UUID

from perdure.agents import Agent
from perdure.database.fencing import Fence
from perdure.errors import (
    BudgetExhausted,
    IncompleteReply,
    PerdureError,
    ProviderError,
    SettingsError,
    Unavailable,
    loggable,
)
from perdure.events.writer import TurnEvents
from perdure.models.endings import why_calls_do_not_run
from perdure.models.protocol import CallAborted, ModelReply, Role, Usage
from perdure.observe.current import working_on
from perdure.runtime import Runtime
from perdure.sessions import running_queries
from perdure.settings import MemorySettings, OnUnavailable
from perdure.snapshots.snapshot import Memory
from perdure.text.tokens import BYTES_PER_TOKEN, estimate_tokens
from perdure.tools.variables import VariableSet
from perdure.turns import costs
from perdure.turns.budgets import TurnBudget
from perdure.turns.calls.handing_over import handed_over
from perdure.turns.calls.plan import Planned, plan
from perdure.turns.calls.run_calls import CallRunner, Interrupted
from perdure.turns.lease import wait_for_model
from perdure.turns.lease.claim import Claims, NeedsIsolation, Ran, Refusal, Unequipped, claim, read_again
from perdure.turns.lease.keeper import Keeper
from perdure.turns.lease.tenure import LeaseLost, Tenure
from perdure.turns.outcome import (
    AwaitsCalls,
    AwaitsDecision,
    AwaitsModel,
    Cancelled,
    Ending,
    Failed,
    HandedOver,
    Lacking,
    Outcome,
    Replied,
    ShutDown,
    Struck,
)
from perdure.turns.prompt import first_read
from perdure.turns.prompt.window import change, kept_turns, turns_budget, turns_read
from perdure.turns.run.call_model import ModelCaller
from perdure.turns.run.commit import (
    Step,
    StepCommit,
    commit_step,
    insist,
    leave_out_tools,
    read_patiently,
    wait_for_database,
)
from perdure.turns.run.instructions import instructions_of
from perdure.turns.run.judge_reply import judge
from perdure.turns.run.leave import Concluded, Leaving, Left, SliceOver, Turns
from perdure.turns.run.parallel_guards import HeldText, ParallelGuards, Refused
from perdure.turns.run.snapshot import hydrate, is_elsewhere, kept_variables, save
from perdure.turns.run.turn_hooks import TurnHooks
from perdure.turns.run.verdict import (
    Verdict,
    abandoned_verdict,
    conclude,
    keep_received,
    log_failure,
    misconfigured,
    out_of_time,
    render_error,
    result_entries,
    unknown_agent,
    unrun_verdict,
)
from perdure.turns.transcript import Entry, Transcript, reply_entry, steps_in, total_usage

log = logging.getLogger(__name__)

Answered = TypeVar("Answered")

_SLICE_S = 1.0
"""Seconds after which a session with more turns is released, so that other sessions get a worker."""

DRAIN_S = 10.0
"""Seconds after which a drain ends, so that Celery sees tasks begin and end, and other workers get a share."""

_INVITE_S = 0.25
"""Seconds between two wake-ups that the drains of a process publish for further drains, besides one for each drain."""

_MOST_LOSSES = 10
"""The most losses of the database within one turn that do not count as a failed attempt."""

_MOST_INCOMPLETE = 3
"""How many replies in a row may end before their tool calls are complete. The next ones would, too."""


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did: how many sessions it held, and of each turn that it settled, the status and the error code.

    `turn_ids` are those of the turns that ran. `refused`: the session that the wake-up named must run in a dedicated
    process.
    """

    sessions: int
    outcomes: tuple[str, ...]
    refused: NeedsIsolation | None = None
    turn_ids: tuple[UUID, ...] = field(default=(), compare=False)


class Runner:
    """Runs the turns of sessions in this process. `owner` names the process in its leases."""

    def __init__(self, runtime: Runtime, owner: str) -> None:
        self._runtime = runtime
        self._owner = owner
        self._limits = runtime.settings.turn
        self._claims = Claims(runtime, owner)
        self._leaving = Leaving(runtime, self._claims)
        self.keeper = Keeper(runtime.database, runtime.clock, self._limits)
        self._invite_at = 0.0

    def turns(self) -> Turns:
        """The numbers of turns that were settled and left since the process started."""
        return self._leaving.turns

    def start(self) -> None:
        """Start renewing leases and writing events. Call once, in the process that runs turns."""
        self.keeper.start()
        if self._runtime.events is not None:
            self._runtime.events.start()

    def close(self) -> None:
        """Stop renewing leases and writing events."""
        self.keeper.close()
        if self._runtime.events is not None:
            self._runtime.events.close()

    def run(self, session_id: UUID, *, alone: bool = False) -> Ran | Refusal:
        """Claim the session unless another worker holds it, run its turns in order, and leave it.

        A failed turn raises no exception: its failure is committed. `alone` tells that this process runs only this
        session. A turn that kills the process then harms no other turn.

        Raises:
            Unavailable: the database cannot be reached; the call may be repeated.
        """
        outcomes: list[str] = []
        while True:
            tenure = self._claims.claim(session_id, alone=alone)
            if isinstance(tenure, NeedsIsolation) and self._settle_cancelled(session_id, tenure):
                return Ran(len(outcomes) + 1, (*outcomes, Cancelled.status))
            if not isinstance(tenure, Tenure):
                return Ran(len(outcomes), tuple(outcomes)) if outcomes else tenure
            more, left = self._run_session(tenure)
            outcomes += [outcome for _, outcome in more]
            if not left.wake_up_failed:
                return Ran(len(outcomes), tuple(outcomes)) if outcomes or left.unequipped is None else left.unequipped

    def drain(self, session_id: UUID, stopping: Callable[[], bool] = lambda: False) -> Drained:
        """Run the turns of due sessions, one session after another, until none is due or the time is over.

        Called for a wake-up that names the session `session_id`. If this session needs a wake-up of its own, it is the
        first (see `Claims.draw`). Ends after `DRAIN_S` seconds, or once `stopping` returns True, with the session at
        hand. If sessions are still due then, another wake-up is published, so that the drain goes on elsewhere.

        A worker takes a wake-up for each thread that it has. So the first claim of each drain, and from time to time a
        later one of any drain of this process, wake another thread while more sessions are due. The first one does so
        for a session that the wake-up names, too: the other sessions may have no wake-up but this one.

        Raises:
            Unavailable: the database cannot be reached; the call may be repeated.
        """
        monotonic = self._runtime.clock.monotonic
        until, sessions = monotonic() + DRAIN_S, 0
        outcomes: list[str] = []
        turn_ids: list[UUID] = []
        named: UUID | None = session_id
        refused: NeedsIsolation | None = None
        while (drawn := self._claims.draw(named)).found is not None:
            if drawn.next_due is not None and (named is not None or monotonic() >= self._invite_at):
                self._invite_at = monotonic() + _INVITE_S
                self._runtime.wake.drain(*drawn.next_due)
            named = None
            left = Left()
            if isinstance(drawn.found, Tenure):
                more, left = self._run_session(drawn.found)
                sessions += 1
                outcomes += [outcome for _, outcome in more]
                turn_ids += [turn_id for turn_id, _ in more]
            elif isinstance(drawn.found, NeedsIsolation):
                if not self._settle_cancelled(drawn.session_id, drawn.found):
                    refused = drawn.found
                    break
                sessions, outcomes = sessions + 1, [*outcomes, Cancelled.status]
            if drawn.next_due is None and not left.wake_up_failed:
                break  # what came meanwhile has wake-ups of its own
            if stopping() or monotonic() >= until:
                self._invite()
                break
        return Drained(sessions, tuple(outcomes), refused, tuple(turn_ids))

    def _invite(self) -> None:
        """Wake another worker if a session is due: this one stops draining."""
        if (next_due := self._claims.next_due()) is not None:
            self._runtime.wake.drain(*next_due)

    def _run_session(self, tenure: Tenure) -> tuple[list[tuple[UUID, str]], Left]:
        """Run the turns of a claimed session, and release it.

        Returns the ids and the outcomes of the settled turns, and what is left.
        """
        settled: list[tuple[UUID, str]] = []
        left, until = Left(still_held=True), self._runtime.clock.monotonic() + _SLICE_S
        with working_on(session_id=tenure.session_id), self.keeper.keep(tenure):
            try:
                while tenure.turn is not None:
                    turn_id = tenure.turn.turn_id
                    left = self._run_turn(tenure)
                    settled += [(turn_id, left.outcome)] * left.settled
                    if not left.still_held or tenure.shutting_down or self._runtime.clock.monotonic() >= until:
                        break
                    read_patiently(self._runtime, tenure)  # begins the next turn
                if left.still_held:
                    left = self._leaving.leave(tenure, SliceOver())
            except LeaseLost:
                log.warning("session %s was claimed by another worker: this one stops running it", tenure.session_id)
                self._runtime.measures.lease_lost()
                left = Left()
        return settled, left

    def _run_turn(self, tenure: Tenure) -> Left:
        """Run the turn at hand until it is settled or left to a later worker.

        An unexpected error counts as a failed attempt; after `max_attempts`, the turn is settled as failed. If the
        database is lost, the turn begins again after its last committed step.

        Raises:
            LeaseLost: another worker has the session.
        """
        turn_id, losses = tenure.at_hand.turn_id, 0
        tenure.begin()
        while tenure.turn is not None and tenure.turn.turn_id == turn_id:
            try:
                with working_on(turn_id=turn_id):
                    return self._attempt(tenure)
            except LeaseLost:
                raise
            except Unavailable as error:
                log.warning("turn %s: the database became unavailable: %s", turn_id, loggable(error))
                if losses == _MOST_LOSSES:
                    return self._leaving.leave(tenure, Struck())
                wait_for_database(self._runtime, tenure, losses)
                losses += 1
            except Exception as error:
                log.exception("turn %s raised an error", turn_id)
                return self._leaving.leave(tenure, Struck(error))
        return Left(still_held=True)  # the turn was settled, although its commit had raised an error

    def _attempt(self, tenure: Tenure) -> Left:  # noqa: C901 (from the transcript to the settled turn)
        """Read the transcript, run the steps, write the verdict, save the snapshot, and settle the turn."""
        runtime, row = self._runtime, tenure.at_hand
        if tenure.strikes > self._limits.max_attempts:
            return self._leaving.leave(tenure, Concluded(abandoned_verdict(runtime, tenure.fence, row, tenure.strikes)))
        agent = runtime.agents.find(row.agent)
        kept = kept_turns(runtime.settings.memory, agent)
        transcript = first_read.load(runtime, row, agent, window=turns_read(kept))
        if row.verdict is not None:  # an earlier worker could not save the snapshot
            verdict, variables = Verdict.from_json(row.verdict), VariableSet(kept_variables(runtime.database, tenure))
        else:
            variables = hydrate(runtime, tenure)
            turn = self._begin(tenure, transcript, variables)
            while True:
                outcome = turn.run() if isinstance(turn, Turn) else turn
                if isinstance(outcome, Ending):
                    break
                if isinstance(outcome, HandedOver):
                    row, turn = tenure.at_hand, self._begin(tenure, transcript, variables)
                    continue
                left = self._leaving.leave(tenure, outcome)
                if not left.turn_continues:
                    if isinstance(turn, Turn):
                        turn.announce(outcome)
                    return left
            log_failure(row, outcome)
            keep_received(runtime.database, row, outcome)
            case_ids = turn.case_ids if isinstance(turn, Turn) else ()
            ending = render_error(runtime.agents, row, outcome)
            screens = runtime.agents.screens(row.agent)
            verdict = conclude(
                runtime.database, row, transcript, ending, case_ids=case_ids, screens=screens, fence=tenure.fence
            )
        saved = is_elsewhere(runtime.snapshots)
        if saved:
            refusal = save(runtime, tenure, verdict, Memory(transcript.committed_messages(kept), variables.kept()))
            if refusal is not None:
                return self._leaving.leave(tenure, refusal)
        return self._leaving.leave(tenure, Concluded(verdict, transcript, saved=saved))

    def _begin(
        self, tenure: Tenure, transcript: Transcript, variables: VariableSet
    ) -> Turn | Cancelled | Failed | Lacking:
        """The turn at hand, or the outcome with which it stops because it cannot begin."""
        row = tenure.at_hand
        agent = self._runtime.agents.find(row.agent)
        if agent is None:
            if row.cancel_requested_at is not None:
                return Cancelled()
            if not tenure.overdue:
                return Lacking(f"the agent {row.agent!r}")
            return Failed(unknown_agent(row.agent, self._limits.unknown_agent_s))
        try:
            return turn_of(self._runtime, tenure, agent, transcript, variables)
        except (PerdureError, SettingsError) as error:
            log.exception("turn %s cannot begin: its agent, model or a setting cannot be used", row.turn_id)
            return Failed(error if isinstance(error, PerdureError) else misconfigured())

    def child_left(self, session_id: UUID, unequipped: Unequipped) -> None:
        """Record that a child of this process has left the session to another worker (see `lease.claim`)."""
        self._claims.leave(session_id, unequipped, publish=False)

    def settle_killed(self, session_id: UUID, fence: Fence, turn_id: UUID, ending: Ending) -> bool:
        """Settle a turn whose process was killed while it held the session under `fence`.

        Called by the worker that killed its child process (`workers.isolated.kill`), because the turn was cancelled or
        out of time and the child no longer renewed its lease (`child_watch`).

        Returns False if another claim has raised the fence, or if the turn is not the session's oldest unsettled turn.
        If the process had committed a verdict (`queries.KEEP_UNSAVED`), it takes precedence over `ending`. The next
        claim runs the session's other turns.

        Raises:
            Unavailable: the database cannot be reached; the call may be repeated.
        """
        tenure = Tenure(session_id, fence, self._runtime.clock, self._limits.lease_s)
        try:
            read_again(self._runtime, tenure)
            return self._settle_unrun(tenure, turn_id, ending)
        except LeaseLost:
            return False

    def settle_unrun(self, session_id: UUID, turn_id: UUID, ending: Ending) -> bool:
        """Settle a turn without running it.

        Called for a cancelled turn that needs a child process, and by `child_watch` for a turn whose time has passed
        while its child processes did not start. Returns False if another worker has the session, or has settled the
        turn.
        """
        tenure = claim(self._runtime, session_id, self._owner, alone=True)
        if not isinstance(tenure, Tenure):
            return False
        try:
            return self._settle_unrun(tenure, turn_id, ending)
        except LeaseLost:
            return False

    def _settle_cancelled(self, session_id: UUID, found: NeedsIsolation) -> bool:
        """Settle a turn that needs a child process, if it is cancelled: no process is started for it."""
        return found.cancelled_id is not None and self.settle_unrun(session_id, found.cancelled_id, Cancelled())

    def _settle_unrun(self, tenure: Tenure, turn_id: UUID, ending: Ending) -> bool:
        with self.keeper.keep(tenure):
            tenure.begin_shutdown()  # so that settling the turn releases the session
            if tenure.turn is None:
                self._leaving.leave(tenure, SliceOver())
            elif tenure.turn.turn_id != turn_id:
                self._leaving.leave(tenure, ShutDown())
            else:
                self._leaving.leave(tenure, Concluded(unrun_verdict(self._runtime, tenure.fence, tenure.turn, ending)))
                return True
        return False


@runtime_checkable
class RunsItsTurns(Protocol):
    """An agent of another library, which decides what its turns do."""

    def begin_turn(self, runtime: Runtime, tenure: Tenure, transcript: Transcript, variables: VariableSet) -> Turn:
        """The turn at hand. It begins after the last step in `transcript`.

        Raises:
            PerdureError, SettingsError: the agent or its model cannot be used.
        """
        ...


def turn_of(runtime: Runtime, tenure: Tenure, agent: Agent, transcript: Transcript, variables: VariableSet) -> Turn:
    """The turn at hand of `agent`.

    Raises:
        PerdureError, SettingsError: the agent or its model cannot be used.
    """
    if not agent.is_own and isinstance(agent, RunsItsTurns):
        return agent.begin_turn(runtime, tenure, transcript, variables)
    return OwnTurn(runtime, tenure, agent, transcript, variables)


class Turn(ABC):
    """The turn at hand, from its last committed step until it ends or stops. A subclass knows what a step is.

    Attributes:
        transcript: The messages of the session's last turns and of this one, with each step that `run` commits.
    """

    def __init__(
        self, runtime: Runtime, tenure: Tenure, agent: Agent, transcript: Transcript, variables: VariableSet
    ) -> None:
        settings = runtime.settings.turn
        self.transcript = transcript
        self._runtime = runtime
        self._tenure = tenure
        self._row = tenure.at_hand
        self._agent = agent
        self._variables = variables
        self._max_steps = agent.max_steps or settings.max_steps
        self._timeout_s = agent.timeout_s or settings.timeout_s
        self._waits_for_models = (agent.on_unavailable or settings.on_unavailable) == OnUnavailable.PARK
        committed = sum(entry.seq is not None for entry in transcript.present)
        place = (self._row.turn_id, tenure.session_id, tenure.token, committed)
        self._events = TurnEvents(*place) if runtime.events is None else runtime.events.open(*place)
        tenure.report = self._events.progress
        self._hooks = TurnHooks(runtime, tenure, self._row, agent, transcript)
        self._is_screening = any(each.parallel for each in agent.guards) and bool(transcript.uncommitted)
        judges = agent.judges_replies or self._row.additions.output is not None
        self._text = HeldText(self._events, is_shown=not judges, is_held=self._is_screening)
        self._guards = ParallelGuards(tenure, self._hooks, self._text)
        self._budget = TurnBudget(
            runtime.database, runtime.clock, runtime.settings, tenure,
            lambda: self._cost(transcript.present, with_others=False),
        )  # fmt: skip
        self._has_earlier_replies = steps_in(transcript.present) > 0
        self._unstored: Callable[[], Entry] | None = None
        """Makes the entry of the model's last reply, until a commit has stored it."""
        if self._row.cancel_requested_at is not None:
            tenure.cancel(self._row.turn_id)

    @property
    @abstractmethod
    def case_ids(self) -> tuple[str, ...]:
        """The ids of the cases in the prompt."""

    @property
    @abstractmethod
    def _model_name(self) -> str:
        """The name of the turn's model, as the turns that wait for it know it."""

    @property
    @abstractmethod
    def _called_at_s(self) -> float:
        """The turn's run time at the beginning of the last model call."""

    @property
    @abstractmethod
    def _prompt_tokens(self) -> int:
        """An estimate of the tokens of the last prompt."""

    @abstractmethod
    def _step(self) -> Outcome | None:
        """Take a step, and commit it; returns `None` if the turn continues.

        Raises:
            CallAborted, Interrupted: the turn must stop, or the model broke off its answer.
            PerdureError: the model failed.
        """

    def run(self) -> Outcome:
        """Run steps until the turn ends or stops. May be called again if the turn goes on after a stop.

        Raises:
            LeaseLost: another worker has the session.
            Unavailable: the database cannot be reached; the transcript must be read again.
        """
        self._events.state("running")
        try:
            outcome = self._run_steps()
        except Unavailable:
            raise  # the turn goes on
        except Exception:
            with suppress(LeaseLost):
                self._settle_budget()
            raise
        self._settle_budget(outcome)
        return outcome

    def _run_steps(self) -> Outcome:
        outcome: Outcome | None = self._before_first_step()
        while outcome is None:
            outcome = self._why_stop() or self._try_step()
        return self._end(outcome) if isinstance(outcome, Ending) else outcome

    def _settle_budget(self, outcome: Outcome | None = None) -> None:
        """Free what the turn has reserved and not used. A reply of the model counts even if it is not stored.

        If the database stays unavailable, the amount stays reserved: the turn must not be lost for it.
        """
        replies, charged = (outcome.last_step(), outcome.charged()) if isinstance(outcome, Ending) else ([], [])
        if not replies and self._unstored is not None:
            replies = [self._unstored()]
        cost = costs.spent([*replies, *charged], self._agent, self._runtime.settings)
        settle = partial(self._budget.settle, cost, self._text.streamed_chars // BYTES_PER_TOKEN)
        try:
            insist(self._runtime, self._tenure, settle)
        except Unavailable as error:
            log.warning("turn %s: what it reserved of its budget stays reserved: %s", self._row.turn_id, error.message)

    def announce(self, outcome: Outcome) -> None:
        """Tell those who follow the turn that it waits."""
        if isinstance(outcome, AwaitsDecision):
            self._events.state("waiting_approval")
        elif isinstance(outcome, AwaitsCalls):
            self._events.state("parked")
            if self._runtime.events is not None:  # a request may wait for the calls that it is to run
                self._runtime.events.announce(self._row.turn_id, followed=False)

    def _before_first_step(self) -> Outcome | None:
        """Wait behind older turns that wait for the model, and call the hooks and guards before a turn.

        The user's messages are committed after them, and they then do not run again.
        """
        stopping = self._tenure.stopping.is_set()
        may_wait = self._waits_for_models and not stopping and self.transcript.open_reply() is None
        if may_wait and wait_for_model.overtakes(self._runtime.database, self._row, self._model_name):
            busy = ProviderError("Earlier turns wait for the model.", transient=True)
            return AwaitsModel(busy, 0, self._tenure.spent_s, self.transcript.steps, self._model_name)
        if not self._agent.screens or not self.transcript.uncommitted or stopping:
            return None
        failed = self._hooks.before()
        if failed is not None:
            return self._why_stop() or failed
        if not self._is_screening:
            self._commit(Step(self.transcript.uncommitted))
        return None

    def _why_stop(self) -> Cancelled | ShutDown | Failed | None:
        """The reason not to take another step, if there is one."""
        if self._tenure.lost:
            raise LeaseLost
        if self._tenure.cancelled:
            return Cancelled()
        if self._tenure.shutting_down:
            return ShutDown()
        if self._tenure.spent_s >= self._timeout_s:
            return Failed(out_of_time(self._timeout_s))
        limit = None if self.transcript.open_reply() is not None else self._limit_reached()
        return None if limit is None else Failed(BudgetExhausted(f"I could not finish within {limit}, so I stopped."))

    def _limit_reached(self, added: Sequence[Entry] = ()) -> str | None:
        """The limit that the turn reaches, if there is one. `added` are all entries that are to be committed next."""
        present = self.transcript.present
        if added:
            present = [*(entry for entry in present if entry.seq is not None), *added]
        agent, used = self._agent, total_usage(present) or Usage()
        if steps_in(present) >= self._max_steps:
            return f"{self._max_steps} steps"
        if agent.max_tokens is not None and used.input_tokens + used.output_tokens >= agent.max_tokens:
            return f"{agent.max_tokens:,} tokens"
        if agent.max_cost is not None and self._cost(present) >= Decimal(str(agent.max_cost)):
            return f"{agent.max_cost} US dollars"
        row, runtime = self._row, self._runtime
        if added or not row.answers_call:
            return None
        return costs.limit_above(runtime.database, row.turn_id, runtime.settings, runtime.agents)

    def _cost(self, present: Sequence[Entry], *, with_others: bool = True) -> Decimal:
        """What the turn has cost with the entries `present`; `with_others`: and other agents that answered its calls.

        Rows are read only if such an agent, or a guard that judged an answer, used tokens, or if the turn had replies
        when this process began it, or when it was handed over: another agent may have written them.
        """
        runtime, read = self._runtime, Decimal()
        if self._has_earlier_replies or any(each.role is Role.TOOL and each.usage is not None for each in present):
            read = costs.spent_in_all(
                runtime.database, self._row.turn_id, runtime.settings, runtime.agents, with_others=with_others
            )
            present = [each for each in present if each.seq is None and each.role is not Role.TOOL]
        return read + costs.spent(present, self._agent, runtime.settings)

    def _try_step(self) -> Outcome | None:
        """Take a step; returns `None` if the turn continues. If the model is unavailable, the turn may wait for it."""
        try:
            return self._step()
        except Refused as error:
            return self._why_stop() or error.failed
        except (CallAborted, Interrupted) as error:
            broken = ProviderError("The model broke off its answer.")
            broken.__cause__ = error
            return self._why_stop() or Failed(broken)
        except Unavailable:
            raise
        except SettingsError:
            log.exception("turn %s cannot go on: its agent cannot be used", self._row.turn_id)
            return Failed(misconfigured())
        except PerdureError as error:
            return self._wait_or_fail(error)

    def _wait_or_fail(self, error: PerdureError) -> AwaitsModel | Failed:
        """Wait for a budget or for a model, if the error allows it."""
        if isinstance(error, BudgetExhausted):
            waits_for, wait_s, may_wait, spent_s = error.setting or "", error.wait_s, True, self._tenure.spent_s
        else:
            waits_for, spent_s = self._model_name, self._called_at_s
            wait_s = wait_for_model.pause_s(error, self._runtime.settings.breaker.cooldown_s)
            now = self._runtime.clock.now()
            stepped_at = self.transcript.stepped_at(now)
            may_wait = self._waits_for_models and wait_for_model.may_wait(self._row, now, stepped_at)
        if wait_s is None or not may_wait or self._tenure.spent_s >= self._timeout_s:
            return Failed(error)
        is_paced = not isinstance(error, BudgetExhausted)
        return AwaitsModel(error, wait_s, spent_s, self.transcript.steps, waits_for, is_paced)

    def _let_leave(self, limits: MemorySettings) -> None:
        """Let the turns leave the prompts that no longer fit `limits`, and plan which leave next.

        Called before the turn's first prompt. Most turns run no statement here.

        Raises:
            LeaseLost: another worker has the session.
            Unavailable: the database cannot be reached.
        """
        transcript = self.transcript
        if self._runtime.recording is not None:
            return
        asked = [entry for entry in transcript.present if entry.role is Role.USER]
        changed = partial(
            change,
            [*transcript.turns[:-1], asked],
            transcript.running,
            kept=kept_turns(self._runtime.settings.memory, self._agent),
            budget=turns_budget(limits),
        )
        running = changed()
        if running is not None and running.extractive:
            turn_ids = [each[0].turn_id for each in transcript.turns[:-1]]
            rows = self._runtime.database.run(running_queries.FORGOTTEN, {"turn_ids": turn_ids})
            running = changed(forgotten={row.turn_id for row in rows})
        if running is None:
            return
        first = next((entry.seq for entry in transcript.turns[0] if entry.seq is not None), 1)
        kept = {"from_seq": first, "to_seq": running.to_seq, "summary": running.text, "extractive": running.extractive}
        if not self._runtime.database.run(
            running_queries.KEEP, {**self._tenure.fenced, **kept, "next_seq": running.next_seq}
        ):
            raise LeaseLost
        transcript.leave(running)

    def _screened(  # noqa: C901 (each way in which the call may end)
        self, ask: Callable[[], Answered], entry_of: Callable[[Answered], Entry]
    ) -> Answered:
        """Call the model with `ask`. Meanwhile, the parallel input guards judge the user's message.

        `entry_of` is the entry of an answer, which counts with its usage if a guard refuses the message.

        Raises:
            Refused: a guard refuses the message.
            Interrupted: the turn must stop.
            Exception: raised by `ask`.
        """
        if not self._is_screening:
            return self._billed(ask, entry_of)
        transcript = self.transcript
        self._guards.start(shows_at_once=transcript.original is None)
        made: Answered | None = None
        failure: Exception | None = None
        try:
            made = self._billed(ask, entry_of)
        except (LeaseLost, Unavailable, Interrupted):
            raise
        except CallAborted:
            if not self._guards.has_refused:
                raise
        except Exception as error:  # noqa: BLE001 (raised again)
            failure = error
        refusal = self._guards.wait()
        if self._guards.usage is not None:
            transcript.charge(self._guards.usage)
        if refusal is not None:
            rejected = self._cancelled_reply() if made is None else entry_of(made)
            raise Refused(Failed(refusal, rejected=(rejected,)))
        self._is_screening, transcript.is_screened = False, True
        if made is None or transcript.original is not None:
            self._commit(Step(transcript.uncommitted))
        self._text.release()
        if failure is not None:
            raise failure
        assert made is not None  # noqa: S101 (neither an answer nor an error)
        return made

    def _billed(self, ask: Callable[[], Answered], entry_of: Callable[[Answered], Entry]) -> Answered:
        """Call the model with `ask`, and tell the budget how the call ended."""
        try:
            made = ask()
        except Exception as error:
            self._budget.ended(error)
            raise
        self._budget.ended()
        self._unstored = partial(entry_of, made)
        return made

    def _cancelled_reply(self) -> Entry:
        """What counts for a call of the model that a guard cancelled: an estimate, as its provider reports nothing."""
        used = Usage(self._prompt_tokens, estimate_tokens(self._text.held))
        return Entry(self._row.turn_id, Role.ASSISTANT, "", usage=used)

    def _commit(self, step: Step) -> StepCommit:
        """Commit a step and announce its messages; see `commit_step`."""
        committed = commit_step(self._runtime, self._tenure, self.transcript, self._variables, step)
        self._text.streamed_chars, self._unstored = 0, None
        self._events.committed(len(step.entries) + committed.joined)
        return committed

    def _commit_round(self, step: Step) -> StepCommit:
        """Commit a step after which the model is called: the waiting messages that steer the turn join it.

        No message joins a turn that has no further step. The hooks and guards before a turn must see each message
        before a model does, so none joins if the agent has one: each then begins a turn of its own.
        """
        is_guarded = bool(self._agent.before_turn or self._agent.guards)
        joins = not is_guarded and self._limit_reached(step.entries) is None and self._tenure.spent_s < self._timeout_s
        return self._commit(replace(step, joins=joins))

    def _refuse(self, reply: Entry, refusal: str) -> None:
        """Commit a reply of which no call runs."""
        refused = result_entries(reply, [f"Error: {refusal}"] * len(reply.tool_calls))
        self._commit_round(Step([*self.transcript.uncommitted, reply, *refused]))

    def _with_unstored(self, ending: Ending) -> Ending:
        """A failure with the model's last reply, if that is not stored: the turn's usage has what the budget counts."""
        if self._unstored is None or not isinstance(ending, Failed) or ending.rejected:
            return ending
        return replace(ending, rejected=(self._unstored(),))

    def _end(self, ending: Ending) -> Ending:
        """Call the guards and hooks after a turn. Text that was streamed, and is not the turn's reply, is withdrawn."""
        shown = ending.reply.content if isinstance(ending, Replied) else None
        ending = self._with_unstored(self._hooks.after(ending))
        if isinstance(ending, Failed) or (isinstance(ending, Replied) and ending.reply.content != shown):
            self._events.rewind()
        return ending


class OwnTurn(Turn):
    """A turn of perdure's own agents. A step is a model call, with the calls of its reply."""

    def __init__(
        self, runtime: Runtime, tenure: Tenure, agent: Agent, transcript: Transcript, variables: VariableSet
    ) -> None:
        super().__init__(runtime, tenure, agent, transcript, variables)
        costs.check_prices(agent, runtime.settings)
        self._model = ModelCaller(
            runtime, tenure, self._row, agent, transcript,
            text=self._text, guards=self._guards, timeout_s=self._timeout_s,
            on_left_out=partial(leave_out_tools, runtime, tenure),
            instructions=lambda: self._row.additions.instructed(instructions_of(runtime, tenure, self._hooks)),
            let_leave=self._let_leave, budget=self._budget,
        )  # fmt: skip
        self._calls = CallRunner(runtime, tenure, agent, variables, screen=self._screen)
        self._incomplete = 0

    @property
    def case_ids(self) -> tuple[str, ...]:
        return self._model.case_ids

    @property
    def _model_name(self) -> str:
        return self._model.name

    @property
    def _called_at_s(self) -> float:
        return self._model.called_at_s

    @property
    def _prompt_tokens(self) -> int:
        return self._model.prompt_tokens

    def _before_first_step(self) -> Outcome | None:
        if not self._tenure.stopping.is_set():
            try:
                self._hooks.make_deps()
            except Unavailable:
                raise
            except PerdureError as error:
                return Failed(error)
        return super()._before_first_step()

    def _step(self) -> Outcome | None:
        """Call the model and execute the calls of its reply, or go on with a reply whose calls are open."""
        open_reply = self.transcript.open_reply()
        return self._call_model() if open_reply is None else self._execute(open_reply)

    def _call_model(self) -> Outcome | None:
        """Call the model. A reply that requests calls is committed with their intents, before a call begins.

        A reply that is no output of the agent is committed, and the model is called again.
        """
        made = self._screened(self._model.call, self._entry_of)
        reply = self._entry_of(made)
        if not reply.tool_calls:
            judged = judge(reply, self._hooks)
            if isinstance(judged, Entry):
                self._commit_round(Step([*self.transcript.uncommitted, judged]))
                return None
            return judged
        refusal = why_calls_do_not_run(made)
        if refusal is not None:
            self._refuse(reply, refusal)
            self._incomplete += 1
            if self._incomplete == _MOST_INCOMPLETE:
                raise IncompleteReply(f"The model's replies broke off {_MOST_INCOMPLETE} times in a row, so I stopped.")
            return None
        self._incomplete = 0
        if self._tenure.shutting_down:
            raise Interrupted  # no time is left to run the tools: without a commit, the model is asked again
        planned = plan(self._model.tools, reply.tool_calls, self._runtime)
        runnable = [each for each in planned if each.refusal is None]
        waits = any(each.needs_approval for each in runnable)
        expires_s = self._runtime.settings.approval.expires_s
        intents = [each.request(expires_s) if waits else each.intent() for each in runnable]
        committed = self._commit(Step([*self.transcript.uncommitted, reply], runs_tools=True, intents=intents))
        open_reply = self.transcript.open_reply()
        if waits or open_reply is None or self._tenure.unwanted.is_set():
            return None
        self._calls.intended(planned, committed.sent_at)
        return self._execute(open_reply, planned)

    def _screen(self, answer: str, spend: Callable[[Usage], None]) -> str:
        """What the input guards let pass of the user's answer to a question.

        Raises:
            Refused: a guard refuses the answer.
        """
        try:
            return self._hooks.screen(answer, spend)
        except PerdureError as error:
            raise Refused(Failed(error)) from error

    def _entry_of(self, made: ModelReply) -> Entry:
        return replace(reply_entry(self._row.turn_id, made, self.transcript.call_ids), prompt=self._model.record)

    def _execute(self, open_reply: Entry, planned: Sequence[Planned] | None = None) -> Outcome | None:
        """Execute the calls of the message `open_reply`, and commit their results.

        `planned` are the calls whose intents this step has just committed: none of them has begun. `None`: the turn
        found the reply open, so the ledger tells which calls are in doubt, and which wait for a decision.
        """
        answered = self._calls.answer(open_reply, planned)
        if not isinstance(answered, Sequence):
            return answered
        agent, results = handed_over(self._agent, open_reply, answered)
        entries = result_entries(open_reply, [each.text for each in results], [each.used for each in results])
        step = Step(entries, results=results, agent=agent)
        if agent is not None:
            self._commit(step)  # a message that steers the turn joins the other agent's
            return HandedOver()
        self._commit_round(step)
        return None
