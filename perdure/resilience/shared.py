"""The fleet's circuits while Redis answers, this process's own while it does not.

When Redis answers again, its state counts. An unavailable Redis costs one call of the process half a second, and the
others nothing until it is asked again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from perdure.clock import Clock
from perdure.errors import Unavailable
from perdure.resilience.circuit import Admission, Outcome, State
from perdure.resilience.redis_circuits import FleetCircuits
from perdure.resilience.stores import Answer, CircuitStore, OwnCircuits

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Seconds for which a Redis that did not answer is left alone."""

_MOST_LEFT = 100
"""Slots of probes that are remembered while Redis is away; others are freed by their leases."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A breaker changed its state by an event in this process. `fleet` says that all workers see it."""

    name: str
    before: State
    after: State
    failures: int
    fleet: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """What an admission was asked of, and its answer: only there does its outcome count."""

    answer: Answer
    fleet: bool


class SharedCircuits:
    """Circuits that calls go by. `listen` is told of each change of state, in the caller's thread."""

    def __init__(
        self,
        own: OwnCircuits,
        fleet: FleetCircuits | None,
        clock: Clock,
        listen: Callable[[Transition], None] | None,
    ) -> None:
        self._own = own
        self._fleet = fleet
        self._clock = clock
        self._listen = listen
        self._lock = threading.Lock()
        self._is_away = False
        self._away_until = 0.0
        self._left: deque[tuple[str, str]] = deque(maxlen=_MOST_LEFT)

    @property
    def store(self) -> CircuitStore:
        """The circuits that operators mean: the fleet's, if there is one."""
        return self._fleet or self._own

    def admit(self, name: str, call_id: str, lease_ms: int) -> Asked:
        """Let a call through, or not. Never fails."""
        answer = self._ask_fleet(name, lambda fleet: self._admitted(fleet, name, call_id, lease_ms))
        if answer is not None:
            return Asked(answer, fleet=True)
        answer = self._own.admit(name, call_id, lease_ms)
        self._tell(name, answer, fleet=False)
        return Asked(answer, fleet=False)

    def settle(self, name: str, admission: Admission, outcome: Outcome, *, fleet: bool) -> None:
        """Tell whoever admitted the call what became of it. Never fails.

        If that was Redis and it is gone, the outcome is lost; a probe's slot is free when it is back.
        """
        if fleet:
            if self._ask_fleet(name, lambda circuits: circuits.settle(name, admission, outcome)) is None:
                self._left.append((name, admission.id))
        else:
            self._tell(name, self._own.settle(name, admission, outcome), fleet=False)

    def reset(self, name: str) -> bool:
        """Close a circuit, for the fleet and here; whether there is one of that name.

        Raises:
            Unavailable: Redis cannot be reached.
        """
        answer = self.store.reset(name)
        if answer is None:
            return False
        if self._fleet is not None:
            self._own.reset(name)
        self._tell(name, answer, fleet=self._fleet is not None)
        return True

    def close(self) -> None:
        """Close the connections to Redis."""
        if self._fleet is not None:
            self._fleet.close()

    def _admitted(self, fleet: FleetCircuits, name: str, call_id: str, lease_ms: int) -> Answer:
        """The fleet's answer; one that was lost may have been a probe's slot, which nobody would use."""
        try:
            return fleet.admit(name, call_id, lease_ms)
        except Unavailable:
            self._left.append((name, call_id))
            raise

    def _ask_fleet(self, name: str, ask: Callable[[FleetCircuits], Answer]) -> Answer | None:
        """The fleet's answer, or None while it is out of reach."""
        if self._fleet is None or not self._may_ask():
            return None
        try:
            answer = ask(self._fleet)
        except Unavailable as error:
            self._note_away(error)
            return None
        self._note_back()
        self._own.follow(name, answer)
        self._tell(name, answer, fleet=True)
        try:
            self._free_slots(self._fleet)
        except Unavailable as error:  # the answer stands: a call that was let through holds its slot
            self._note_away(error)
        return answer

    def _free_slots(self, fleet: FleetCircuits) -> None:
        while self._left:
            try:
                name, call_id = self._left.popleft()
            except IndexError:  # another thread took the last one
                return
            fleet.free(name, call_id)  # if that fails, the slot is freed by its lease

    def _may_ask(self) -> bool:
        """Whether to ask Redis. After a pause one caller does, and the others do not wait for what it finds."""
        if not self._is_away:
            return True
        with self._lock:
            now = self._clock.monotonic()
            if now < self._away_until:
                return False
            self._away_until = now + PAUSE_S
            return True

    def _note_away(self, error: Unavailable) -> None:
        with self._lock:
            new, self._is_away = not self._is_away, True
            self._away_until = self._clock.monotonic() + PAUSE_S
        if new:
            log.warning("%s Until it answers, this process goes by breakers of its own.", error.message)

    def _note_back(self) -> None:
        if not self._is_away:
            return
        with self._lock:
            was, self._is_away = self._is_away, False
        if was:
            log.info("Redis answers: the breakers are the fleet's again")

    def _tell(self, name: str, answer: Answer, *, fleet: bool) -> None:
        if answer.before is answer.after:
            return
        change = Transition(name, answer.before, answer.after, answer.failures, fleet)
        level = logging.INFO if change.after is State.CLOSED else logging.WARNING
        whose = "the fleet" if fleet else "this process"
        text = "breaker %s of %s: from %s to %s, failures in a row: %d"
        log.log(level, text, name, whose, change.before, change.after, change.failures)
        if self._listen is None:
            return
        try:
            self._listen(change)
        except Exception:
            log.exception("who listens to the breakers failed; the call goes on")
