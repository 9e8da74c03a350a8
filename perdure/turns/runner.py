"""Running a session: claim it, run its turns in order, settle each, give it back.

What a Celery task calls, and all that it calls. Every way in which a run can end is one of
the outcomes below; a turn that fails is no exception here, since its failure is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never
from uuid import UUID

from perdure.errors import BudgetExhausted, PerdureError, SettingsError, Unavailable, reworded
from perdure.runtime import Runtime
from perdure.snapshots.snapshot import Memory
from perdure.tools.variables import VariableSet
from perdure.turns import parking, queries
from perdure.turns.incoming import DEFAULT_PRIORITY
from perdure.turns.lease import (
    Claimed,
    Hold,
    Keeper,
    LeaseLost,
    NeedsIsolation,
    NotNeeded,
    TurnRef,
    begin_next,
    claim,
    is_claimable,
)
from perdure.turns.parking import Delayed
from perdure.turns.react import Parked, Stop, Turn, Waiting
from perdure.turns.remembering import remember
from perdure.turns.saving import NotSaved, hydrate, is_elsewhere, kept_variables, save
from perdure.turns.settlement import Ending, Failed, Settled, Tenure, Verdict, conclude, settle
from perdure.turns.transcript import Transcript
from perdure.untrusted import storable

log = logging.getLogger(__name__)

_LOCKED_TRIES = 3
_LOCKED_PAUSE_S = 0.02
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 3.0
_LONGEST_PAUSE_REFUSED_S = 30.0
_MOST_DOUBLINGS = 3
"""Of the pause between two attempts to save a snapshot, which begins with that of the sweeper."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The session was ours; so many turns were settled before it was given back."""

    settled: int


Outcome = Ran | NotNeeded | NeedsIsolation


@dataclass(frozen=True, slots=True)
class _LostSight:
    """The database was away in the middle of a turn that had taken `spent_s` under lease by then."""

    turn_id: UUID
    spent_s: float


@dataclass(frozen=True, slots=True)
class Turns:
    """How many turns ended here: answered, cancelled or failed for good; or left for somebody else to go on with."""

    settled: int = 0
    parked: int = 0

    def __sub__(self, before: Turns) -> Turns:
        return Turns(self.settled - before.settled, self.parked - before.parked)


class Runner:
    """Runs the turns of sessions in this process. `owner` names it in the lease."""

    def __init__(self, runtime: Runtime, owner: str) -> None:
        self._runtime = runtime
        self._owner = owner
        self._limits = runtime.settings.turn
        self._turns = Turns()
        self._counting = threading.Lock()
        self.keeper = Keeper(runtime.database, runtime.clock, self._limits)

    def turns(self) -> Turns:
        """How many turns have ended here so far."""
        return self._turns

    def start(self) -> None:
        """Begin to keep leases. Call once, in the process that runs turns."""
        self.keeper.start()

    def close(self) -> None:
        """Stop keeping leases."""
        self.keeper.close()

    def run(self, session_id: UUID, *, alone: bool = False) -> Outcome:
        """Run what the session has to run, if nobody else does.

        `alone` says that this process is the session's own and may be killed by it.

        Raises:
            Unavailable: the database cannot be reached; nothing was begun.
        """
        found = self._claim(session_id, alone=alone)
        if not isinstance(found, Claimed):
            return found
        with self.keeper.holding(found) as hold:
            return Ran(self._run_turns(found, hold))

    def _claim(self, session_id: UUID, *, alone: bool) -> Claimed | NotNeeded | NeedsIsolation:
        found = claim(self._runtime.database, session_id, self._owner, self._limits, alone=alone)
        for _ in range(_LOCKED_TRIES):
            if not isinstance(found, NotNeeded) or not is_claimable(self._runtime.database, session_id, self._limits):
                break
            time.sleep(_LOCKED_PAUSE_S)  # somebody held the row for the length of a commit
            found = claim(self._runtime.database, session_id, self._owner, self._limits, alone=alone)
        return found

    def _run_turns(self, claimed: Claimed, hold: Hold) -> int:
        settled, losses = 0, 0
        try:
            while claimed.turn is not None:
                left = self._run_turn(claimed, claimed.turn, hold)
                if isinstance(left, _LostSight):
                    claimed = self._look_again(hold, left, losses)
                    losses += 1
                    continue
                self._count(left)
                if isinstance(left, Parked):
                    return settled
                settled, losses = settled + 1, 0
                if left.unsettled == 0:
                    return settled
                if hold.draining:
                    break
                claimed = self._find_again(hold)
            self._release(hold)
        except LeaseLost:
            log.warning("session %s was taken over; nothing more is written here", hold.session_id)
        return settled

    def _count(self, ended: Settled | Parked) -> None:
        with self._counting:
            if isinstance(ended, Parked):
                self._turns = replace(self._turns, parked=self._turns.parked + 1)
            else:
                self._turns = replace(self._turns, settled=self._turns.settled + 1)

    def _run_turn(self, claimed: Claimed, ref: TurnRef, hold: Hold) -> Settled | Parked | _LostSight:
        """Run one turn to its commit, or until the database is lost sight of."""
        hold.begin(ref.turn_id)
        began = self._runtime.clock.monotonic() - claimed.spent_s
        try:
            return self._run_to_its_end(claimed, ref, hold, began)
        except Unavailable as error:
            log.warning("turn %s: %s", ref.turn_id, error.message)
            return _LostSight(ref.turn_id, self._runtime.clock.monotonic() - began)
        except LeaseLost:
            raise
        except Exception:
            log.exception("turn %s met an error; it will be tried again", ref.turn_id)
            return self._park(hold, ref, began, forgiven=False)

    def _run_to_its_end(self, claimed: Claimed, ref: TurnRef, hold: Hold, began: float) -> Settled | Parked:
        window = self._runtime.settings.memory.working_turns
        transcript = Transcript.load(self._runtime.database, hold.session_id, ref, window=window)
        if ref.held is not None:
            variables = VariableSet(kept_variables(self._runtime.database, claimed))
            verdict = Verdict.from_json(ref.held)
        else:
            variables = hydrate(self._runtime, claimed, hold)
            ending, case_ids = self._ending(claimed, ref, hold, transcript, variables)
            if isinstance(ending, Stop):
                return self._stop(hold, ref, began, ending)
            _report(ref, ending)
            ending = self._worded(ref, ending)
            verdict = conclude(self._runtime.database, hold.session_id, ref, transcript, ending, case_ids=case_ids)
        memory = Memory(transcript.committed_messages(), variables.kept())
        ended = self._end(claimed, ref, hold, verdict, memory)
        if isinstance(ended, Settled):
            remember(self._runtime, hold.session_id, hold.token, turn=ref, transcript=transcript, verdict=verdict)
            if ended.may_end:  # behind what is remembered, which whoever ends the session removes
                self._runtime.wake.ending(hold.session_id)
        return ended

    def _ending(
        self, claimed: Claimed, ref: TurnRef, hold: Hold, transcript: Transcript, variables: VariableSet
    ) -> tuple[Ending | Stop, Sequence[str]]:
        """How the turn ends or stops, and the cases of the CaseBank that its model was told of."""
        if claimed.strikes > self._limits.max_attempts and ref.cancel_requested_at is None:
            return Failed(_given_up(self._limits.max_attempts)), ()
        try:
            turn = Turn(self._runtime, hold, ref, transcript, claimed.spent_s, variables=variables)
        except (PerdureError, SettingsError) as error:
            log.exception("turn %s cannot begin", ref.turn_id)
            return Failed(error if isinstance(error, PerdureError) else _misconfigured()), ()
        return turn.run(), turn.case_ids

    def _worded(self, ref: TurnRef, ending: Ending) -> Ending:
        """A failure in the agent's own words, where it has some."""
        agent = next((each for each in self._runtime.agents if each.name == ref.agent), None)
        if not isinstance(ending, Failed) or agent is None or agent.error_messages is None:
            return ending
        try:
            sentence = agent.error_messages.find(ending.error.code, ref.language)
        except Exception:
            log.exception("agent %s has no words for %s", agent.name, ending.error.code)
            return ending
        return Failed(reworded(ending.error, sentence)) if sentence else ending

    def _end(self, claimed: Claimed, ref: TurnRef, hold: Hold, verdict: Verdict, memory: Memory) -> Settled | Parked:
        """Settle a turn, once its snapshot is saved where it must be. `memory` is as of the last commit."""
        saved = is_elsewhere(self._runtime.snapshots)
        if saved:
            try:
                save(self._runtime, hold, ref, verdict, memory)
            except NotSaved as error:
                return self._put_off(claimed, ref, hold, str(error))
        settled = settle(
            self._runtime.database,
            self._runtime.clock,
            Tenure(hold.session_id, hold.token, self._limits.lease_s),
            turn=ref,
            verdict=verdict,
            keep=not hold.draining,
            saved=saved,
        )
        log.info("turn %s is %s", ref.turn_id, verdict.status)
        if settled.delivery_id is not None:
            self._runtime.wake.delivery(settled.delivery_id)
        return settled

    def _stop(self, hold: Hold, ref: TurnRef, began: float, stop: Stop) -> Parked:
        """Leave a turn where it is, for whoever goes on with it."""
        match stop:
            case Parked():
                return self._park(hold, ref, began, forgiven=True)
            case Waiting():
                log.info("turn %s waits for a person to decide about its calls", ref.turn_id)
                return Parked()
            case Delayed(error, wait_s):
                log.warning("turn %s waits %g s for a model: %s: %s", ref.turn_id, wait_s, error.code, error.message)
                if parking.park(self._runtime.database, hold, ref, stop):
                    self._runtime.wake.session(hold.session_id, DEFAULT_PRIORITY)
                return Parked()
            case _:
                assert_never(stop)

    def _put_off(self, claimed: Claimed, ref: TurnRef, hold: Hold, reason: str) -> Parked:
        """Give the session back with its turn held; the sweeper wakes it later and later."""
        wakes = min(claimed.kept.wakes, _MOST_DOUBLINGS)
        rows = self._runtime.database.run(
            queries.PUT_OFF,
            {
                "session_id": hold.session_id,
                "token": hold.token,
                "turn_id": ref.turn_id,
                "wakes": wakes,
                "error": storable(reason),
            },
        )
        if not rows:
            raise LeaseLost
        again_s = self._limits.sweep_s * 2**wakes
        log.error("turn %s is not answered, for it is not saved: %s Again in %g s.", ref.turn_id, reason, again_s)
        return Parked()

    def _park(self, hold: Hold, ref: TurnRef, began: float, *, forgiven: bool) -> Parked:
        rows = self._runtime.database.run(
            queries.PARK,
            {
                "session_id": hold.session_id,
                "token": hold.token,
                "turn_id": ref.turn_id,
                "spent_s": self._runtime.clock.monotonic() - began,
                "forgiven": forgiven,
            },
        )
        if not rows:
            raise LeaseLost
        if forgiven:
            self._runtime.wake.session(hold.session_id, DEFAULT_PRIORITY)
        return Parked()

    def _release(self, hold: Hold) -> None:
        rows = self._runtime.database.run(queries.RELEASE, {"session_id": hold.session_id, "token": hold.token})
        if rows and rows[0].unsettled > 0:
            self._runtime.wake.session(hold.session_id, DEFAULT_PRIORITY)
        if rows and rows[0].may_end:
            self._runtime.wake.ending(hold.session_id)

    def _look_again(self, hold: Hold, lost: _LostSight, losses: int) -> Claimed:
        """Where the session stands now: at once the first time, then less and less often.

        A database that answers and yet refuses the commit (its disk is full) would otherwise
        have the model asked again without a pause and without an end.
        """
        since = self._runtime.clock.monotonic()
        if losses:
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(losses, 10), _LONGEST_PAUSE_REFUSED_S)
            hold.step_within(pause_s)
            time.sleep(pause_s)
        found = self._find_again(hold)
        if found.turn is None or found.turn.turn_id != lost.turn_id:
            return found
        return replace(found, spent_s=lost.spent_s + self._runtime.clock.monotonic() - since)

    def _find_again(self, hold: Hold) -> Claimed:
        """The session's oldest unsettled turn, for as long as the token is ours.

        Raises:
            LeaseLost: it is not ours any more, or the database stays away for a whole lease.
        """
        until = self._runtime.clock.monotonic() + self._limits.lease_s
        pause_s = _FIRST_PAUSE_S
        while not hold.lost:
            hold.step_within(pause_s)
            asked_at = self._runtime.clock.monotonic()
            try:
                found = begin_next(self._runtime.database, hold.session_id, hold.token, self._limits)
            except Unavailable:
                if self._runtime.clock.monotonic() >= until:
                    break
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            else:
                hold.renewed(asked_at)
                return found
        raise LeaseLost


def _report(ref: TurnRef, ending: Ending) -> None:
    """What only this process knows of an ending: the error behind it."""
    if isinstance(ending, Failed):
        error = ending.error
        log.warning("turn %s failed: %s: %s", ref.turn_id, error.code, error.message, exc_info=error.__cause__)


def _given_up(attempts: int) -> PerdureError:
    return BudgetExhausted(f"I tried this {attempts} times without getting anywhere, so I gave up.")


def _misconfigured() -> PerdureError:
    return PerdureError("I cannot answer: this installation is not set up for it. The operator's log says why.")
