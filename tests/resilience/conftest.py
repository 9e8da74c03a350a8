"""Fixtures for stores of circuits with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.clock import MovedClock
from perdure.resilience.circuit import Policy
from perdure.resilience.redis_circuits import FleetCircuits
from perdure.resilience.stores import CircuitStore, OwnCircuits

POLICY = Policy(failure_threshold=3, cooldown_ms=60_000, half_open_max_probes=2)


def ahead_ms(clock: MovedClock) -> int:
    """Milliseconds by which the test moved its clock."""
    return round(clock.offset.total_seconds() * 1_000)


@pytest.fixture(params=["own", "fleet"])
def store(request: pytest.FixtureRequest, clock: MovedClock) -> Iterator[CircuitStore]:
    """A store of circuits. Each test runs twice: with a process's own store, and with the fleet's store in Redis."""
    if request.param == "own":
        yield OwnCircuits(POLICY, clock)
        return
    fleet = FleetCircuits(request.getfixturevalue("redis_url"), POLICY, lambda: ahead_ms(clock))
    yield fleet
    fleet.close()
