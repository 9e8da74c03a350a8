"""The fleet's circuits while Redis is available, this process's own otherwise.

When Redis is available again, its state counts. An unavailable Redis costs one call of the process half a second, and
the others nothing until the next attempt to reach it.
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
"""Seconds between two attempts to reach an unavailable Redis."""

_MOST_LEFT = 100
"""The most probe slots that are remembered for freeing while Redis is unavailable; others are freed by their leases."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of a breaker's state by an event in this process. `fleet`: all workers see it."""

    name: str
    before: State
    after: State
    failures: int
    fleet: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """The store that answered an admission, and its answer. The outcome counts only there."""

    answer: Answer
    fleet: bool


class SharedCircuits:
    """The circuits that calls use. `listen` is called with each change of state, in the caller's thread."""

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
        """The circuits for operators: the fleet's, if there is a Redis."""
        return self._fleet or self._own

    def admit(self, name: str, call_id: str, lease_ms: int) -> Asked:
        """Admit a call, or refuse it. Never fails."""
        answer = self._ask_fleet(name, lambda fleet: self._admitted(fleet, name, call_id, lease_ms))
        if answer is not None:
            return Asked(answer, fleet=True)
        answer = self._own.admit(name, call_id, lease_ms)
        self._tell(name, answer, fleet=False)
        return Asked(answer, fleet=False)

    def settle(self, name: str, admission: Admission, outcome: Outcome, *, fleet: bool) -> None:
        """Record the outcome in the store that admitted the call. Never fails.

        If that is Redis and it is unavailable, the outcome is lost; a probe's slot is freed when Redis is available
        again.
        """
        if fleet:
            if self._ask_fleet(name, lambda circuits: circuits.settle(name, admission, outcome)) is None:
                self._left.append((name, admission.id))
        else:
            self._tell(name, self._own.settle(name, admission, outcome), fleet=False)

    def reset(self, name: str) -> bool:
        """Close a circuit, for the fleet and here; returns whether it existed.

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
        """The fleet's answer. If the answer is lost, the slot of a possible probe is freed later."""
        try:
            return fleet.admit(name, call_id, lease_ms)
        except Unavailable:
            self._left.append((name, call_id))
            raise

    def _ask_fleet(self, name: str, ask: Callable[[FleetCircuits], Answer]) -> Answer | None:
        """The fleet's answer, or `None` while Redis is unavailable."""
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
        except Unavailable as error:  # the answer stands: an admitted call holds its slot
            self._note_away(error)
        return answer

    def _free_slots(self, fleet: FleetCircuits) -> None:
        while self._left:
            try:
                name, call_id = self._left.popleft()
            except IndexError:  # another thread took the last one
                return
            fleet.free(name, call_id)  # if that fails, the lease frees the slot

    def _may_ask(self) -> bool:
        """Whether to try Redis. After a pause one caller does, and the others do not wait for it."""
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
            log.warning("%s Until Redis is available, this process uses breakers of its own.", error.message)

    def _note_back(self) -> None:
        if not self._is_away:
            return
        with self._lock:
            was, self._is_away = self._is_away, False
        if was:
            log.info("Redis is available: the fleet shares its breakers again")

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
            log.exception("a listener of the breakers failed; the call continues")
