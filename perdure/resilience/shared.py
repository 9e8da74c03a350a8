"""The circuits (states of circuit breakers) that a process uses: those in Redis, or its own while Redis is unavailable.

While no call of the fleet fails, most calls need no answer of Redis: the process leases the circuit for `EXCHANGE_S`
seconds, admits calls itself, and counts their successes. A thread reports them and renews the lease. A call that fails
is reported at once, with the successes before it, and ends the lease.

The fleet is all processes that share a Redis; the fleet's circuits are the circuits in Redis. While Redis is
unavailable, one call per second tries to reach Redis again. The attempt delays that call by at most half a second. Once
Redis answers, the process uses the fleet's circuits again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from perdure.clock import Clock
from perdure.errors import Unavailable, loggable
from perdure.resilience.circuit import Admission, CallOutcome, CircuitState
from perdure.resilience.redis_circuits import FleetCircuits, Successes
from perdure.resilience.stores import CircuitAnswer, CircuitStore, OwnCircuits

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Seconds to wait before the next call to Redis after Redis did not answer."""

EXCHANGE_S = 0.5
"""Seconds for which a process leases a circuit. So long at most, the fleet does not know what its calls did."""

_MAX_UNRELEASED = 100
"""The maximum number of probe slots that a process remembers, to free them once Redis is available again.

A slot that is not remembered becomes free when its lease expires.
"""


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of a breaker's state that this process caused.

    The change applies to the whole fleet if `fleet` is true, otherwise to this process only.
    """

    name: str
    before: CircuitState
    after: CircuitState
    failures: int
    fleet: bool


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """The answer of `SharedCircuits.admit`. `fleet` is true if Redis gave the answer.

    Pass `fleet` to `settle`, so that the call's outcome reaches the store that admitted the call.
    """

    answer: CircuitAnswer
    fleet: bool


@dataclass(slots=True)
class _Lease:
    """A circuit that this process has leased until the monotonic time `until`. Not all `successes` are reported."""

    epoch: int
    until: float
    successes: int = 0
    succeeded_at: float = 0.0

    def age_ms(self, now: float) -> int:
        """The milliseconds since the last success."""
        return max(1, round((now - self.succeeded_at) * 1_000))


class SharedCircuits:
    """The circuits that a process uses. Calls `listen` in the caller's thread for each change of a circuit's state.

    A process that forks must create its own after the fork.
    """

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
        self._is_unavailable = False
        self._retry_at = 0.0
        self._unreleased: deque[tuple[str, str]] = deque(maxlen=_MAX_UNRELEASED)
        self._leases: dict[str, _Lease] = {}
        self._failures = 0
        """The number of failures that this process has reported."""
        self._exchanger: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def store(self) -> CircuitStore:
        return self._fleet or self._own

    def admit(self, name: str, call_id: str, lease_ms: int) -> FleetAnswer:
        """Admit or refuse a call. Never fails."""
        leased = self._leases.get(name)
        if leased is not None and self._clock.monotonic() < leased.until:
            return FleetAnswer(_admitted(call_id, leased.epoch), fleet=True)
        answer = self._call_fleet(name, lambda fleet: self._admit(fleet, name, call_id, lease_ms))
        if answer is not None:
            return FleetAnswer(answer, fleet=True)
        answer = self._own.admit(name, call_id, lease_ms)
        self._report(name, answer, fleet=False)
        return FleetAnswer(answer, fleet=False)

    def settle(self, name: str, admission: Admission, outcome: CallOutcome, *, fleet: bool) -> None:
        """Report a call's outcome to the store that admitted it. Never fails.

        If Redis admitted the call and is unavailable now, a failure counts in this process only. If the call was a
        probe, its slot is freed once Redis answers.
        """
        if fleet:
            if outcome is not CallOutcome.FAILED and self._count(name, admission, outcome):
                return
            if self._settle(name, admission, outcome) is None:
                self._unreleased.append((name, admission.id))
                if outcome is CallOutcome.FAILED:
                    self._fail_here(name, admission.id)
        else:
            self._report(name, self._own.settle(name, admission, outcome), fleet=False)

    def reset(self, name: str) -> bool:
        """Close the circuit `name` of the fleet and of this process; returns whether the circuit exists."""
        self.exchange()
        answer = self.store.reset(name)
        if answer is None:
            return False
        if self._fleet is not None:
            self._own.reset(name)
        self._report(name, answer, fleet=self._fleet is not None)
        return True

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            exchanger = self._exchanger
        if exchanger is not None:
            exchanger.join(2 * EXCHANGE_S)
        if self._fleet is not None:
            self.exchange()
            self._fleet.close()

    def _fail_here(self, name: str, call_id: str) -> None:
        """Count a failure of which Redis could not be told."""
        admission = self._own.admit(name, call_id, 1).admission
        if admission is not None:
            self._report(name, self._own.settle(name, admission, CallOutcome.FAILED), fleet=False)

    def _count(self, name: str, admission: Admission, outcome: CallOutcome) -> bool:
        """Count a call that did not fail, if its circuit is leased; returns whether it is."""
        with self._lock:
            leased, now = self._leases.get(name), self._clock.monotonic()
            if leased is None or now >= leased.until or leased.epoch != admission.epoch:
                return False
            if outcome is CallOutcome.SUCCEEDED:
                leased.successes, leased.succeeded_at = leased.successes + 1, now
        return True

    def _settle(self, name: str, admission: Admission, outcome: CallOutcome) -> CircuitAnswer | None:
        """Report a call's outcome, and the successes that were not reported. The circuit is leased, if it may be."""
        if outcome is CallOutcome.RELEASED:
            return self._call_fleet(name, lambda fleet: fleet.settle(name, admission, outcome))
        leased, failures = self._end_lease(name, admission, outcome)
        asked_at, successes, age_ms = self._clock.monotonic(), 0, 0
        if leased is not None and leased.epoch == admission.epoch:
            successes, age_ms = leased.successes, leased.age_ms(asked_at)
        if outcome is CallOutcome.SUCCEEDED:
            successes, age_ms = successes + 1, 0
        told, lease_ms = Successes(successes, age_ms), self._lease_ms
        answer = self._call_fleet(name, lambda fleet: fleet.settle(name, admission, outcome, told, lease_ms))
        if outcome is CallOutcome.FAILED:  # a success may have leased it again, and Redis has ended that lease
            self._end_lease(name, admission, outcome)
        elif answer is not None and answer.leased is not None:
            self._lease(name, _Lease(answer.leased, asked_at + EXCHANGE_S), failures)
        return answer

    def _end_lease(self, name: str, admission: Admission, outcome: CallOutcome) -> tuple[_Lease | None, int]:
        """The circuit's lease, which ends, and the number of failures. A call of an earlier epoch ends no lease."""
        with self._lock:
            leased = self._leases.get(name)
            if leased is not None and leased.epoch > admission.epoch:
                return None, self._failures
            self._failures += outcome is CallOutcome.FAILED
            return self._leases.pop(name, None), self._failures

    def _lease(self, name: str, leased: _Lease, failures: int) -> None:
        """Keep a lease, unless a call has failed since the number of `failures` was read."""
        with self._lock:
            if self._failures != failures or self._closed.is_set():
                return
            self._leases.setdefault(name, leased)
            if self._exchanger is None or not self._exchanger.is_alive():
                exchanger = threading.Thread(target=self._exchange_regularly, name="breakers", daemon=True)
                try:
                    exchanger.start()
                except RuntimeError as error:  # no further thread can be started: the call must not fail for it
                    log.warning("breaker %s is not leased: %s", name, loggable(error))
                    del self._leases[name]
                else:
                    self._exchanger = exchanger

    def _renew(self, name: str, leased: _Lease) -> None:
        """Report the successes of a leased circuit, and renew the lease. If it ends, reports those since then."""
        with self._lock:
            if self._leases.get(name) is not leased:
                return
            asked_at = self._clock.monotonic()
            told, leased.successes = Successes(leased.successes, leased.age_ms(asked_at)), 0
        answer = self._report_successes(name, leased.epoch, told, self._lease_ms)
        with self._lock:
            if answer is not None and answer.leased == leased.epoch:
                leased.until = asked_at + EXCHANGE_S
                return
            if self._leases.get(name) is not leased:
                return
            del self._leases[name]
            told = Successes(leased.successes, leased.age_ms(self._clock.monotonic()))
        if told.count and answer is not None:
            self._report_successes(name, leased.epoch, told, 0)

    def _report_successes(self, name: str, epoch: int, told: Successes, lease_ms: int) -> CircuitAnswer | None:
        admission = Admission("", epoch)
        return self._call_fleet(
            name, lambda fleet: fleet.settle(name, admission, CallOutcome.SUCCEEDED, told, lease_ms)
        )

    @property
    def _lease_ms(self) -> int:
        return 0 if self._closed.is_set() else round(EXCHANGE_S * 1_000)

    def _exchange_regularly(self) -> None:
        """Report successes and renew leases, until no circuit is leased."""
        while not self._closed.wait(EXCHANGE_S / 2):
            self.exchange()
            with self._lock:
                if not self._leases:
                    self._exchanger = None
                    return

    def exchange(self) -> None:
        """Report the successes of leased circuits, and renew these leases. A lease without a success expires."""
        with self._lock:
            present = list(self._leases.items())
        for name, leased in present:
            if leased.successes:
                self._renew(name, leased)
            elif self._clock.monotonic() >= leased.until:
                with self._lock:
                    if self._leases.get(name) is leased and not leased.successes:
                        del self._leases[name]

    def _admit(self, fleet: FleetCircuits, name: str, call_id: str, lease_ms: int) -> CircuitAnswer:
        """Ask the fleet's store to admit a call.

        If the answer is lost, Redis may have granted the call a probe's slot. This slot is freed once Redis answers.
        """
        try:
            return fleet.admit(name, call_id, lease_ms)
        except Unavailable:
            self._unreleased.append((name, call_id))
            raise

    def _call_fleet(self, name: str, ask: Callable[[FleetCircuits], CircuitAnswer]) -> CircuitAnswer | None:
        """Call `ask` with the fleet's store and return the answer.

        Returns `None` if Redis is not configured, does not answer, or is not called because it failed recently.
        """
        if self._fleet is None or not self._may_call():
            return None
        try:
            answer = ask(self._fleet)
        except Unavailable as error:
            self._mark_unavailable(error)
            return None
        self._mark_available()
        self._own.follow(name, answer)
        self._report(name, answer, fleet=True)
        try:
            self._free_slots(self._fleet)
        except Unavailable as error:
            # The slots of other calls were not freed. `answer` is still valid: an admitted call holds its slot.
            self._mark_unavailable(error)
        return answer

    def _free_slots(self, fleet: FleetCircuits) -> None:
        while self._unreleased:
            try:
                name, call_id = self._unreleased.popleft()
            except IndexError:  # another thread took the last entry
                return
            fleet.free(name, call_id)  # if this call fails, the slot becomes free when its lease expires

    def _may_call(self) -> bool:
        """Whether to call Redis. While Redis is unavailable, returns True to one caller per `PAUSE_S` seconds."""
        if not self._is_unavailable:
            return True
        with self._lock:
            now = self._clock.monotonic()
            if now < self._retry_at:
                return False
            self._retry_at = now + PAUSE_S
            return True

    def _mark_unavailable(self, error: Unavailable) -> None:
        with self._lock:
            new, self._is_unavailable = not self._is_unavailable, True
            self._retry_at = self._clock.monotonic() + PAUSE_S
        if new:
            log.warning("%s Until Redis answers, this process uses its own breakers.", error.message)

    def _mark_available(self) -> None:
        if not self._is_unavailable:
            return
        with self._lock:
            was, self._is_unavailable = self._is_unavailable, False
        if was:
            log.info("Redis answers: using the fleet's breakers again")

    def _report(self, name: str, answer: CircuitAnswer, *, fleet: bool) -> None:
        if answer.before is answer.after:
            return
        change = Transition(name, answer.before, answer.after, answer.failures, fleet)
        level = logging.INFO if change.after is CircuitState.CLOSED else logging.WARNING
        whose = "the fleet" if fleet else "this process"
        text = "breaker %s of %s: from %s to %s, consecutive failures: %d"
        log.log(level, text, name, whose, change.before, change.after, change.failures)
        if self._listen is None:
            return
        try:
            self._listen(change)
        except Exception:
            log.exception("the listener of breaker changes failed; the call continues")


def _admitted(call_id: str, epoch: int) -> CircuitAnswer:
    """The answer to a call whose circuit is leased."""
    return CircuitAnswer(0, CircuitState.CLOSED, CircuitState.CLOSED, 0, None, Admission(call_id, epoch))
