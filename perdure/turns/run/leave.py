"""The one way out of a session: `Leaving.leave` acts on the outcome of a turn.

It runs the statement that releases the session (all of them stand in `lease.leave_queries`), publishes the wake-ups
that follow, writes the line of the log, and counts. Nothing else releases a session that this process holds.

`settle_begun` is called by `cancel` and `accept`, for turns that no worker runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.clock import Clock
from perdure.database.engine import Executor, Statement, as_json
from perdure.database.fencing import Fence
from perdure.errors import Unavailable, loggable
from perdure.ids import new_id
from perdure.observe.measures import OTHER
from perdure.runtime import Runtime
from perdure.text.untrusted import error_summary, storable
from perdure.turns.calls.awaited import report_now
from perdure.turns.calls.children import announce_above
from perdure.turns.calls.hastening import hasten
from perdure.turns.lease import leave_queries as queries
from perdure.turns.lease import user_share
from perdure.turns.lease.claim import Claims, Unequipped
from perdure.turns.lease.tenure import LeaseLost, Tenure, TurnRow
from perdure.turns.outcome import (
    AwaitsCalls,
    AwaitsDecision,
    AwaitsModel,
    Cancelled,
    Lacking,
    NotSaved,
    ShutDown,
    Stop,
    Struck,
)
from perdure.turns.run.commit import persist
from perdure.turns.run.remember import remember
from perdure.turns.run.verdict import Verdict, conclude_begun
from perdure.turns.transcript import Transcript

log = logging.getLogger(__name__)

UNSENT_S = 5.0
"""Seconds after which a task that the broker did not accept is sent again."""

_MOST_DOUBLINGS = 3
"""The most doublings of the pause between two attempts to save a snapshot. The first pause is `sweep_s`."""


_REASONS: Mapping[type[Stop], str] = {
    ShutDown: "shutdown",
    AwaitsDecision: "approval",
    AwaitsCalls: "calls",
    AwaitsModel: "model",
    Lacking: "unequipped",
    Struck: "failed_attempt",
    NotSaved: "snapshot",
}
"""The labels of the metric `perdure_turns_left_total`."""


@dataclass(frozen=True, slots=True)
class Concluded:
    """The turn has ended with `verdict`. `transcript` is written to working memory, if this process has read it.

    `saved`: the snapshot store already has the snapshot of the tick that settling commits.
    """

    verdict: Verdict
    transcript: Transcript | None = None
    saved: bool = False


@dataclass(frozen=True, slots=True)
class SliceOver:
    """No turn runs, and other sessions shall get a worker."""


@dataclass(frozen=True, slots=True)
class Left:
    """What became of the session. `settled`: the turn at hand was settled, with `outcome`, its status and error code.

    `turn_continues`: nothing was written. The turn does not wait, since it was cancelled, its session is being ended,
    or what it waited for has come. `still_held`: this process still holds the session, which has a next turn to run.
    `wake_up_failed`: the session is released and has a turn to run, but the broker accepted no wake-up. `unequipped` is
    what this process lacks for the turn.
    """

    settled: bool = False
    outcome: str = ""
    turn_continues: bool = False
    still_held: bool = False
    wake_up_failed: bool = False
    unequipped: Unequipped | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """The numbers of turns that this process settled (as done, failed or cancelled), and left to a later worker."""

    settled: int = 0
    left: int = 0

    def __sub__(self, before: Turns) -> Turns:
        return Turns(self.settled - before.settled, self.left - before.left)


@dataclass(frozen=True, slots=True)
class Settled:
    """The state after a turn was settled: the number of the session's unsettled turns, and the delivery to publish.

    `may_end` tells that the session's end is requested and that the session has no unsettled turn left. `others_wait`
    tells that the user has queued sessions, and that the settled turn freed one of the user's places. `answers_call`
    tells that the turn answers the call of another agent that has the turn's id.
    """

    unsettled: int
    may_end: bool = False
    delivery_id: UUID | None = None
    others_wait: bool = False
    answers_call: bool = False


class Leaving:
    """Leaves the sessions of a process."""

    def __init__(self, runtime: Runtime, claims: Claims) -> None:
        self._runtime = runtime
        self._limits = runtime.settings.turn
        self._claims = claims
        self._counting = threading.Lock()
        self.turns = Turns()
        """The numbers of turns that were settled and left since the process started."""

    def leave(self, tenure: Tenure, outcome: Concluded | Stop | SliceOver) -> Left:  # noqa: C901, PLR0912 (the match)
        """Settle the turn at hand or leave it to a later worker, and release the session.

        Raises:
            LeaseLost: another worker has the session, or the database is lost for the duration of a lease.
        """
        if isinstance(outcome, SliceOver):
            return self._release(tenure)
        if isinstance(outcome, Concluded):
            return self._settle(tenure, outcome)
        turn, limits, unequipped = tenure.at_hand, self._limits, None
        match outcome:
            case ShutDown():
                row = self._stop(tenure, queries.SHUT_DOWN)
                self._runtime.wake.session(tenure.session_id, row.priority)
            case AwaitsDecision(message_seq):
                if not self._wait(tenure, queries.WAIT_APPROVAL, {"message_seq": message_seq}):
                    return Left(turn_continues=True)
                log.info("turn %s waits for a person to decide about its calls", turn.turn_id)
            case AwaitsCalls(message_seq, results):
                given: dict[str, Any] = {"message_seq": message_seq, "retry_s": UNSENT_S}
                if not self._wait(tenure, queries.WAIT_CALLS, given, results):
                    return Left(turn_continues=True)
                log.info("turn %s waits for a task, a client, an agent, the user or a time", turn.turn_id)
            case AwaitsModel(error, wait_s, spent_s, steps, model, is_paced):
                given = {"error_code": error.code, "wait_s": wait_s, "steps": steps, "model": model, "paced": is_paced}
                if not self._wait(tenure, queries.WAIT_MODEL, {**given, "spent_s": spent_s}):
                    return Left(turn_continues=True)
                level = logging.WARNING if wait_s else logging.INFO  # 0: behind earlier turns
                log.log(level, "turn %s waits %g s for a model or a budget: %s", turn.turn_id, wait_s, loggable(error))
            case Lacking(what):
                unequipped = Unequipped(what, self._stop(tenure, queries.LEAVE).priority)
                self._claims.leave(tenure.session_id, unequipped, publish=not tenure.alone)
            case NotSaved(reason):
                wakes = min(max(tenure.wakes - 1, 0), _MOST_DOUBLINGS)  # without the sweeper's wake-up
                self._stop(tenure, queries.POSTPONE, wakes=wakes, sweep_s=limits.sweep_s, error=storable(reason))
                log.error(
                    "turn %s is not answered: its snapshot is not saved: %s Retry in %g s.",
                    turn.turn_id, reason, limits.sweep_s * 2**wakes,
                )  # fmt: skip
            case Struck(failure):
                noted = None if failure is None else error_summary(failure)
                try:
                    row = self._stop(tenure, queries.STRIKE, max_attempts=limits.max_attempts, error=noted)
                except Unavailable as lost:
                    log.warning("turn %s cannot be left: %s", turn.turn_id, lost.message)
                    raise LeaseLost from lost
                log.warning(
                    "turn %s: %d of %d attempts failed; retry %s", turn.turn_id, row.strikes, limits.max_attempts,
                    "in the sweeper's next round" if row.due else f"in {limits.sweep_s * 2**row.wakes:g} s",
                )  # fmt: skip
            case _:
                assert_never(outcome)
        if turn.answers_call:
            announce_above(self._runtime, turn.turn_id)
        if not tenure.shutting_down:
            user_share.admit_next(self._runtime, turn.user_id)
        self._count(left=1)
        self._runtime.measures.left(_REASONS[type(outcome)])
        return Left(unequipped=unequipped)

    def _settle(self, tenure: Tenure, ended: Concluded) -> Left:
        left = self._settled(tenure, ended)
        code = ended.verdict.error_code
        return replace(left, settled=True, outcome=f"{ended.verdict.status}{f' {code}' if code else ''}")

    def _settled(self, tenure: Tenure, ended: Concluded) -> Left:
        """Settle the turn, and retry until the database commits; then publish the wake-ups."""
        turn, runtime = tenure.at_hand, self._runtime
        with runtime.measures.timed("settle", runtime.clock):
            settled = persist(
                runtime, tenure,
                lambda: settle(
                    runtime.database, runtime.clock, tenure.fence, turn, ended.verdict,
                    tick=tenure.tick, keep_s=0.0 if tenure.shutting_down else tenure.lease_s, saved=ended.saved,
                ),
            )  # fmt: skip
        self._count(settled=1)
        agent = turn.agent if runtime.agents.find(turn.agent) is not None else OTHER
        runtime.measures.settled(agent, ended.verdict.status, ended.verdict.error_code)
        runtime.traces.settled(turn.turn_id)
        facts = {
            "agent": turn.agent,
            "status": ended.verdict.status,
            "error_code": ended.verdict.error_code,
            "steps": ended.verdict.steps,
            "seconds": round(tenure.spent_s, 3),
        }
        log.info("turn %s is %s", turn.turn_id, ended.verdict.status, extra={"facts": facts})
        if settled is not None:
            self._tell(turn, settled)
        if ended.transcript is not None:
            try:
                remember(runtime, turn, ended.transcript, ended.verdict, token=tenure.token)
            except Exception:  # working memory may lack a turn
                log.exception("turn %s is settled, but not written to working memory", turn.turn_id)
        if settled is None:  # an earlier try had settled the turn, but its result was lost: the next read has the rest
            return Left(still_held=True)
        if settled.may_end:  # only now: ending the session removes its working memory
            runtime.wake.ending(tenure.session_id)
        if settled.unsettled and tenure.shutting_down:
            return self._release(tenure)
        return Left(still_held=settled.unsettled > 0)

    def _tell(self, turn: TurnRow, settled: Settled) -> None:
        """Wake those who wait for the settled turn: the user's queued sessions, its receiver, and the asking agent."""
        if settled.others_wait:
            user_share.admit_next(self._runtime, turn.user_id)
        if settled.delivery_id is not None:
            self._runtime.wake.delivery(settled.delivery_id)
        if settled.answers_call:
            report_now(self._runtime, turn.turn_id)

    def _release(self, tenure: Tenure) -> Left:
        """Release a session of which no turn runs."""
        rows = self._runtime.database.run(queries.RELEASE, {**tenure.fenced, "woken": not tenure.shutting_down})
        if rows and rows[0].may_end:
            self._runtime.wake.ending(tenure.session_id)
        if not rows or rows[0].unsettled == 0:
            return Left()
        if rows[0].queued:
            user_share.admit_next(self._runtime, UserKey(rows[0].user_id))
            return Left()
        is_woken = self._runtime.wake.drain(tenure.session_id, rows[0].priority)
        return Left(wake_up_failed=not is_woken and not tenure.shutting_down)

    def _stop(self, tenure: Tenure, statement: Statement, **given: Any) -> Row[Any]:
        rows = self._runtime.database.run(statement, _at_hand(tenure, given))
        if not rows:
            raise LeaseLost
        return rows[0]

    def _wait(
        self,
        tenure: Tenure,
        statement: Statement,
        given: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]] = (),
    ) -> bool:
        """Release the session until what the turn waits for comes, and wake its delivery. False: it does not wait."""
        parameters = _at_hand(tenure, {"delivery_id": new_id(self._runtime.clock), **given})
        with self._runtime.database.transaction(statement.name) as transaction:
            if not transaction.run(queries.LOCK, tenure.fenced):
                raise LeaseLost
            if results:
                transaction.run(queries.RECORD_RESULTS, {**parameters, "results": as_json(list(results))})
            rows = transaction.run(statement, parameters)
            if rows and tenure.at_hand.additions.names:
                hasten(transaction, tenure.session_id)
            is_cancelled = not rows and bool(transaction.run(queries.IS_CANCELLED, parameters))
        if is_cancelled:
            tenure.cancel(tenure.at_hand.turn_id)
        if rows and rows[0].delivery_id is not None:
            self._runtime.wake.delivery(rows[0].delivery_id)
        return bool(rows)

    def _count(self, *, settled: int = 0, left: int = 0) -> None:
        with self._counting:
            self.turns = Turns(self.turns.settled + settled, self.turns.left + left)


def settle(
    executor: Executor,
    clock: Clock,
    fence: Fence,
    turn: TurnRow,
    verdict: Verdict,
    *,
    tick: int | None = None,
    keep_s: float = 0.0,
    saved: bool = False,
) -> Settled:
    """Settle the turn `turn` of a session that the caller holds under `fence`.

    One statement commits the turn's last messages, its outcome and its delivery, and records the use of the cases in
    the prompt. No channel receives a reply before this commit. If the session has more turns, its lease is kept for
    `keep_s` seconds; 0 releases it. This commit begins a new tick. `saved`: the snapshot store already has the snapshot
    of that tick. `tick` is the session's present tick; `None`: the caller has locked the session's row.

    Raises:
        LeaseLost: another worker has the session; nothing was written.
    """
    rows = executor.run(
        queries.SETTLE,
        {
            **fence.on(turn.session_id),
            "tick": tick,
            "lease_s": keep_s,
            "keep": keep_s > 0,
            "turn_id": turn.turn_id,
            "channel": turn.channel,
            "added": len(verdict.messages),
            "messages": as_json(verdict.messages),
            "status": verdict.status,
            "steps": verdict.steps,
            "usage": None if verdict.usage is None else as_json(verdict.usage),
            "data": None if verdict.data is None else as_json(verdict.data),
            "error_code": verdict.error_code,
            "error_message": verdict.error_message,
            "replied": verdict.replied,
            "variables": None if verdict.variables is None else as_json(verdict.variables),
            "saved": saved,
            "case_ids": verdict.case_ids,
            "delivery_id": new_id(clock),
        },
    )
    if not rows:
        raise LeaseLost
    row = rows[0]
    return Settled(row.unsettled, row.may_end, row.delivery_id, row.others_wait, row.answers_call)


def settle_begun(executor: Executor, clock: Clock, fence: Fence, turn: TurnRow, agents: Agents) -> Settled:
    """Settle as cancelled a turn that has begun, and that this process did not run.

    The caller has raised the session's fence to `fence` and holds the lock of its row.
    """
    verdict = conclude_begun(executor, turn, Cancelled(), screens=agents.screens(turn.agent))
    return settle(executor, clock, fence, turn, verdict)


def _at_hand(tenure: Tenure, given: Mapping[str, Any]) -> dict[str, Any]:
    return {**tenure.fenced, "turn_id": tenure.at_hand.turn_id, "spent_s": tenure.spent_s, **given}
