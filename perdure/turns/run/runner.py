"""Running a session: claim it, run its turns in order, settle each, release it.

Called by the task `turns.run`, and by the isolated process (`workers/isolated`). `Runner.run` returns a `RunOutcome`.
A failed turn raises no exception: its failure is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never
from uuid import UUID

from sqlalchemy import Row

from perdure.database.engine import Statement
from perdure.database.fencing import Fence
from perdure.errors import PerdureError, SettingsError, Unavailable, loggable
from perdure.runtime import Runtime
from perdure.snapshots.snapshot import Memory
from perdure.text.untrusted import error_summary, storable
from perdure.tools.variables import VariableSet
from perdure.turns.inbox.incoming import DEFAULT_PRIORITY
from perdure.turns.lease import passing_queries, queries, user_share, wait_for_model
from perdure.turns.lease.claim import (
    Claim,
    Claimed,
    LeaseLost,
    NeedsIsolation,
    NotNeeded,
    Queued,
    TurnRef,
    Unequipped,
    begin_next,
    claim,
    is_claimable,
)
from perdure.turns.lease.hold import Hold
from perdure.turns.lease.keeper import Keeper
from perdure.turns.lease.passing import Passing
from perdure.turns.lease.wait_for_model import Delayed
from perdure.turns.run.failures import (
    held_verdict,
    log_failure,
    misconfigured,
    out_of_attempts,
    render_error,
    unknown_agent,
    with_start_error,
)
from perdure.turns.run.react import Asleep, Lacking, Parked, Stop, Turn, Waiting
from perdure.turns.run.remember import remember
from perdure.turns.run.retry_commit import find_again, persist
from perdure.turns.run.settle import (
    Cancelled,
    Ending,
    Failed,
    Settled,
    Tenure,
    Verdict,
    conclude,
    conclude_unread,
    settle,
)
from perdure.turns.run.snapshot import NotSaved, hydrate, is_elsewhere, kept_variables, save
from perdure.turns.run.transcript import Transcript

log = logging.getLogger(__name__)

_LOCKED_TRIES = 3
_LOCKED_PAUSE_S = 0.02
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_REFUSED_S = 30.0
_MOST_LOSSES = 10
"""The most database outages within one turn that do not count as a failed attempt."""
_SLICE_S = 1.0
"""Seconds after which a session with more turns is released, so that other sessions get a worker."""
_MOST_DOUBLINGS = 3
"""The most doublings of the pause between two attempts to save a snapshot. The first pause is `sweep_s`."""


@dataclass(frozen=True, slots=True)
class Ran:
    """This process claimed the session, and settled `settled` turns before it released the session."""

    settled: int


RunOutcome = Ran | NotNeeded | NeedsIsolation | Queued | Unequipped


@dataclass(frozen=True, slots=True)
class _DatabaseLost:
    """The database became unavailable when the turn had run for `spent_s` seconds."""

    turn_id: UUID
    spent_s: float


@dataclass(frozen=True, slots=True)
class Turns:
    """The numbers of turns that this process settled (as done, failed or cancelled), and parked for another worker."""

    settled: int = 0
    parked: int = 0

    def __sub__(self, before: Turns) -> Turns:
        return Turns(self.settled - before.settled, self.parked - before.parked)


class Runner:
    """Runs the turns of sessions in this process. `owner` names the process in its leases."""

    def __init__(self, runtime: Runtime, owner: str) -> None:
        self._runtime = runtime
        self._owner = owner
        self._limits = runtime.settings.turn
        self._turns = Turns()
        self._counting = threading.Lock()
        self._passing = Passing(runtime)
        self.keeper = Keeper(runtime.database, runtime.clock, self._limits)

    def turns(self) -> Turns:
        """The numbers of turns that were settled and parked since the process started."""
        return self._turns

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

    def run(self, session_id: UUID, *, alone: bool = False) -> RunOutcome:
        """Claim the session unless another worker holds it, run and settle its turns in order, and release it.

        `alone` tells that this process runs only this session. A turn that kills the process then harms no other turn.

        Raises:
            Unavailable: the database cannot be reached; the call may be repeated.
        """
        settled = 0
        if self._passing.has_left(session_id):
            return NotNeeded()
        while True:
            found = self._claim(session_id, alone=alone)
            if isinstance(found, NeedsIsolation) and found.cancelled and self.settle_unrun(session_id, Cancelled()):
                return Ran(settled + 1)
            outcome: RunOutcome
            if isinstance(found, Claimed):
                with self.keeper.holding(found) as hold:
                    count, then = self._run_turns(found, hold)
                settled += count
                if then is True:
                    continue
                outcome = then or Ran(settled)
            else:
                outcome = found
            if isinstance(outcome, Unequipped):
                self._passing.leave(session_id, outcome, publish=not alone)
            return Ran(settled) if settled else outcome

    def leave(self, session_id: UUID, lacking: Unequipped) -> None:
        """Record that a child of this process has left the session to another worker (see `passing`)."""
        self._passing.leave(session_id, lacking, publish=False)

    def _claim(self, session_id: UUID, *, alone: bool) -> Claim:
        database, limits, agents = self._runtime.database, self._limits, [each.name for each in self._runtime.agents]
        for tries_left in reversed(range(_LOCKED_TRIES + 1)):
            found = claim(database, session_id, self._owner, limits, alone=alone, agents=agents)
            if not tries_left or not isinstance(found, NotNeeded) or not is_claimable(database, session_id, limits):
                break
            time.sleep(_LOCKED_PAUSE_S)  # another transaction holds the lock of the row until its commit
        return found

    def _run_turns(self, claimed: Claimed, hold: Hold) -> tuple[int, bool | Unequipped]:
        """Run the session's turns, the oldest first.

        Returns the number of settled turns, and whether to claim the session again because the broker accepted no
        wake-up; or what this process lacks for the next turn.
        """
        settled, losses = 0, 0
        until = self._runtime.clock.monotonic() + _SLICE_S
        try:
            while (turn := claimed.turn) is not None:
                left = self._run_turn(claimed, turn, hold)
                if isinstance(left, _DatabaseLost):
                    if losses < _MOST_LOSSES:
                        claimed = self._reread_session(hold, left, losses)
                        losses += 1
                        continue
                    left = self._strike(hold, turn, left.spent_s)
                self._count_end(turn, left, hold)
                if not isinstance(left, Settled):
                    return settled, left if isinstance(left, Unequipped) else False
                settled, losses = settled + 1, 0
                if left.unsettled == 0:
                    return settled, False
                if hold.draining or self._runtime.clock.monotonic() >= until:
                    break
                claimed = find_again(self._runtime, hold)
            return settled, self._release(hold) and not hold.draining
        except LeaseLost:
            log.warning("session %s was claimed by another worker: this one stops running it", hold.session_id)
        return settled, False

    def _run_turn(self, claimed: Claimed, ref: TurnRef, hold: Hold) -> Settled | Parked | Unequipped | _DatabaseLost:
        """Run one turn until it is settled or parked, or until the database is unavailable.

        Any other error counts as a failed attempt; after `max_attempts` the turn is settled as failed.

        Raises:
            LeaseLost: another worker has the session.
        """
        hold.begin(ref.turn_id)
        hold.tick = claimed.kept.tick
        began = self._runtime.clock.monotonic() - claimed.spent_s
        try:
            if claimed.strikes > self._limits.max_attempts:
                return self._abandon(claimed, ref, hold)
            return self._run_and_settle(claimed, ref, hold, began)
        except Unavailable as error:
            log.warning("turn %s: the database became unavailable: %s", ref.turn_id, error.message)
            return _DatabaseLost(ref.turn_id, self._runtime.clock.monotonic() - began)
        except LeaseLost:
            raise
        except Exception as error:
            log.exception("turn %s raised an error", ref.turn_id)
            return self._strike(hold, ref, self._runtime.clock.monotonic() - began, error)

    def _run_and_settle(
        self, claimed: Claimed, ref: TurnRef, hold: Hold, began: float
    ) -> Settled | Parked | Unequipped:
        """Read the transcript, run the step loop, save the snapshot, settle the turn and write working memory."""
        window = self._runtime.settings.memory.working_turns
        transcript = Transcript.load(self._runtime.database, hold.session_id, ref, window=window)
        ended = self._verdict(claimed, ref, hold, transcript)
        if isinstance(ended, Stop):
            return self._stop(hold, ref, began, ended)
        verdict, variables = ended
        saved = is_elsewhere(self._runtime.snapshots)
        if saved:
            try:
                save(self._runtime, hold, ref, verdict, Memory(transcript.committed_messages(), variables.kept()))
            except NotSaved as error:
                return self._postpone(claimed, ref, hold, str(error))
        settled = self._settle(ref, hold, verdict, saved=saved)
        try:
            remember(self._runtime, hold.session_id, hold.token, turn=ref, transcript=transcript, verdict=verdict)
        except Exception:  # working memory may lack a turn
            log.exception("turn %s is settled, but not written to working memory", ref.turn_id)
        if settled.may_end:  # only now: ending the session removes its working memory
            self._runtime.wake.ending(hold.session_id)
        return settled

    def _verdict(
        self, claimed: Claimed, ref: TurnRef, hold: Hold, transcript: Transcript
    ) -> tuple[Verdict, VariableSet] | Stop:
        """The turn's verdict and working variables, or the reason why the turn stops.

        Runs the step loop, unless an earlier runner has left a held verdict.
        """
        if ref.held is not None:
            variables = VariableSet(kept_variables(self._runtime.database, claimed))
            return Verdict.from_json(ref.held), variables
        variables = hydrate(self._runtime, claimed, hold)
        ending, case_ids = self._ending(claimed, ref, hold, transcript, variables)
        if isinstance(ending, Stop):
            return ending
        log_failure(ref, ending)
        ending = render_error(self._runtime.agents, ref, ending)
        verdict = conclude(self._runtime.database, hold.session_id, ref, transcript, ending, case_ids=case_ids)
        return verdict, variables

    def _ending(
        self, claimed: Claimed, ref: TurnRef, hold: Hold, transcript: Transcript, variables: VariableSet
    ) -> tuple[Ending | Stop, Sequence[str]]:
        """Run the step loop; returns its result, and the ids of the cases in the prompt."""
        if self._runtime.agents.find(ref.agent) is None:
            if ref.cancel_requested_at is not None:
                return Cancelled(), ()
            if not claimed.overdue:
                return Lacking(f"the agent {ref.agent!r}"), ()
            return Failed(unknown_agent(ref.agent, self._limits.unknown_agent_s)), ()
        try:
            turn = Turn(
                self._runtime, hold, ref, transcript, claimed.spent_s, variables=variables, overdue=claimed.overdue
            )
        except (PerdureError, SettingsError) as error:
            log.exception("turn %s cannot begin: its agent, model or a setting cannot be used", ref.turn_id)
            return Failed(error if isinstance(error, PerdureError) else misconfigured()), ()
        return turn.run(), turn.case_ids

    def _settle(self, ref: TurnRef, hold: Hold, verdict: Verdict, *, saved: bool) -> Settled:
        """Settle a turn, and retry until the database commits; then publish the resulting wake-ups."""

        def commit() -> Settled:
            return settle(
                self._runtime.database,
                self._runtime.clock,
                Tenure(hold.session_id, hold.fence, self._limits.lease_s, hold.tick),
                turn=ref,
                verdict=verdict,
                keep=not hold.draining,
                saved=saved,
            )

        settled = persist(self._runtime, hold, ref.turn_id, commit)
        log.info("turn %s is %s", ref.turn_id, verdict.status)
        if isinstance(settled, Claimed):  # an earlier try had settled the turn, but its result was lost
            return Settled(unsettled=1, may_end=False, delivery_id=None)
        if settled.others_wait:
            user_share.admit_next(self._runtime, ref.user_id)
        if settled.delivery_id is not None:
            self._runtime.wake.delivery(settled.delivery_id)
        return settled

    def _stop(self, hold: Hold, ref: TurnRef, began: float, stop: Stop) -> Parked | Unequipped:
        """Leave an unsettled turn to the next worker."""
        match stop:
            case Parked():
                return self._park(hold, ref, began)
            case Lacking(lacks):
                given = {"spent_s": self._runtime.clock.monotonic() - began}
                return Unequipped(lacks, self._release_turn(passing_queries.LEAVE, hold, ref, given).priority)
            case Waiting():
                log.info("turn %s waits for a person to decide about its calls", ref.turn_id)
                return Parked()
            case Asleep():
                log.info("turn %s waits for a task or a time", ref.turn_id)
                return Parked()
            case Delayed(error, wait_s):
                level = logging.WARNING if wait_s else logging.INFO  # 0: behind earlier turns
                log.log(level, "turn %s waits %g s for a model: %s", ref.turn_id, wait_s, loggable(error))
                if wait_for_model.park(self._runtime.database, hold, ref, stop):
                    self._runtime.wake.session(hold.session_id, DEFAULT_PRIORITY)
                return Parked()
            case _:
                assert_never(stop)

    def _park(self, hold: Hold, ref: TurnRef, began: float) -> Parked:
        """Release the session during a turn, without counting an attempt."""
        self._release_turn(queries.PARK, hold, ref, {"spent_s": self._runtime.clock.monotonic() - began})
        self._runtime.wake.session(hold.session_id, DEFAULT_PRIORITY)
        return Parked()

    def _postpone(self, claimed: Claimed, ref: TurnRef, hold: Hold, reason: str) -> Parked:
        """Release the session, because its snapshot was not saved. The verdict stays held.

        The sweeper wakes the session after a pause that doubles each time, up to a limit.
        """
        wakes = min(claimed.kept.wakes, _MOST_DOUBLINGS)
        rows = self._runtime.database.run(
            queries.POSTPONE,
            {
                **hold.held,
                "turn_id": ref.turn_id,
                "wakes": wakes,
                "error": storable(reason),
            },
        )
        if not rows:
            raise LeaseLost
        again_s = self._limits.sweep_s * 2**wakes
        log.error("turn %s is not answered: its snapshot is not saved: %s Retry in %g s.", ref.turn_id, reason, again_s)
        return Parked()

    def _strike(self, hold: Hold, ref: TurnRef, spent_s: float, error: Exception | None = None) -> Parked:
        """Release the session after an error. The sweeper's pause before the next attempt doubles with each error.

        Raises:
            LeaseLost: another worker has the session, or the database is unavailable and the lease expires.
        """
        try:
            given = {"spent_s": spent_s, "max_attempts": self._limits.max_attempts}
            if error is not None:
                noted = {"turn_id": ref.turn_id, "error": error_summary(error)}
                self._runtime.database.run(queries.NOTE_ERROR, noted)
            row = self._release_turn(queries.STRIKE, hold, ref, given)
        except Unavailable as lost:
            log.warning("turn %s cannot be parked: %s", ref.turn_id, lost.message)
            raise LeaseLost from lost
        again = "in the sweeper's next round" if row.due else f"in {self._limits.sweep_s * 2**row.wakes:g} s"
        log.warning(
            "turn %s: %d of %d attempts failed; retry %s", ref.turn_id, row.strikes, self._limits.max_attempts, again
        )
        return Parked()

    def _abandon(self, claimed: Claimed, ref: TurnRef, hold: Hold) -> Settled:
        """Settle a turn that is out of attempts: with its held verdict, or as failed or cancelled.

        Does not read data that may have caused the failures.
        """
        verdict = held_verdict(ref) if claimed.strikes == self._limits.max_attempts + 1 else None
        if verdict is None:
            failed = render_error(self._runtime.agents, ref, Failed(out_of_attempts(self._limits.max_attempts)))
            ending = failed if ref.cancel_requested_at is None else Cancelled()
            log.error("turn %s is abandoned after %d attempts", ref.turn_id, self._limits.max_attempts)
            verdict = with_start_error(ref, conclude_unread(self._runtime.database, hold.session_id, ref, ending))
        settled = self._settle(ref, hold, verdict, saved=False)
        if settled.may_end:
            self._runtime.wake.ending(hold.session_id)
        return settled

    def _count_end(self, turn: TurnRef, ended: Settled | Parked | Unequipped, hold: Hold) -> None:
        """Count a turn that was settled or parked. For a parked turn, also admit the user's next session."""
        parked = not isinstance(ended, Settled)
        if parked and not hold.draining:
            user_share.admit_next(self._runtime, turn.user_id)
        with self._counting:
            if parked:
                self._turns = replace(self._turns, parked=self._turns.parked + 1)
            else:
                self._turns = replace(self._turns, settled=self._turns.settled + 1)

    def _reread_session(self, hold: Hold, lost: _DatabaseLost, losses: int) -> Claimed:
        """Read the session's state again: at once after the first outage, after a growing pause for each later outage.

        Without a pause, the runner would call the model in an endless loop while the database answers but refuses each
        commit, for example because its disk is full.
        """
        since = self._runtime.clock.monotonic()
        if losses:
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(losses, 10), _LONGEST_PAUSE_REFUSED_S)
            hold.step_within(pause_s)
            time.sleep(pause_s)
        found = find_again(self._runtime, hold)
        if found.turn is None or found.turn.turn_id != lost.turn_id:
            return found
        return replace(found, spent_s=lost.spent_s + self._runtime.clock.monotonic() - since)

    def _release(self, hold: Hold) -> bool:
        """Release the session; returns whether this process must run the session's next turns.

        That is the case if the session has turns to run, but the broker does not accept the session's wake-up.
        """
        rows = self._runtime.database.run(queries.RELEASE, {**hold.held, "woken": not hold.draining})
        if rows and rows[0].may_end:
            self._runtime.wake.ending(hold.session_id)
        if not rows or rows[0].unsettled == 0:
            return False
        if rows[0].queued:
            user_share.admit_next(self._runtime, rows[0].user_id)
            return False
        return not self._runtime.wake.session(hold.session_id, rows[0].priority)

    def _release_turn(self, statement: Statement, hold: Hold, ref: TurnRef, given: dict[str, Any]) -> Row[Any]:
        rows = self._runtime.database.run(statement, {**hold.held, "turn_id": ref.turn_id, **given})
        if not rows:
            raise LeaseLost
        return rows[0]

    def settle_killed(self, session_id: UUID, fence: Fence, turn_id: UUID, ending: Ending) -> bool:
        """Settle a turn whose process was killed while it held the session under `fence`.

        Returns False if another claim has raised the fence, or if the turn is not the session's oldest unsettled turn.
        If the process had committed a held verdict (`queries.HOLD`), the verdict takes precedence over `ending`. The
        next claim runs the session's other turns.

        Raises:
            Unavailable: the database cannot be reached; the call may be repeated.
        """
        try:
            found = begin_next(self._runtime.database, session_id, fence, self._limits)
            with self.keeper.holding(found) as hold:
                hold.drain()  # so that settling the turn releases the session
                return self._settle_killed(found, hold, turn_id, ending)
        except LeaseLost:
            return False

    def settle_unrun(self, session_id: UUID, ending: Ending) -> bool:
        """Settle the session's oldest turn without running it; returns False if another worker has the session."""
        found = claim(self._runtime.database, session_id, self._owner, self._limits, alone=True)
        if not isinstance(found, Claimed) or found.turn is None:
            return False
        return self.settle_killed(session_id, found.fence, found.turn.turn_id, ending)

    def _settle_killed(self, found: Claimed, hold: Hold, turn_id: UUID, ending: Ending) -> bool:
        ref = found.turn
        if ref is None:
            self._release(hold)
            return False
        if ref.turn_id != turn_id:
            self._park(hold, ref, self._runtime.clock.monotonic() - found.spent_s)
            return False
        if ref.cancel_requested_at is not None:
            ending = Cancelled()
        ending = render_error(self._runtime.agents, ref, ending)
        verdict = held_verdict(ref) or with_start_error(
            ref, conclude_unread(self._runtime.database, hold.session_id, ref, ending)
        )
        settled = self._settle(ref, hold, verdict, saved=False)
        if settled.unsettled:
            self._runtime.wake.session(hold.session_id, DEFAULT_PRIORITY)
        if settled.may_end:
            self._runtime.wake.ending(hold.session_id)
        return True
