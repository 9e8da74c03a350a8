"""The fixtures of the turn tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure import sleep_until
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.settings import Settings
from tests.conftest import RecordingWaker
from tests.turns.awaiting import charge, export, look, refund
from tests.turns.broker import Broker
from tests.turns.harness import Harness


@pytest.fixture
def harness(settings: Settings, clock: MovedClock, database: Database, waker: RecordingWaker) -> Iterator[Harness]:
    """A harness that checks the invariants of the database after the test."""
    made = Harness(settings, clock, database, waker)
    yield made
    made.check()


@pytest.fixture
def broker(harness: Harness) -> Broker:
    """The harness's task queue. The fixture gives the agent Celery tools, an ordinary tool and `sleep_until`."""
    made = Broker()
    harness.calls = made
    harness.equip(export, charge, refund, look, sleep_until)
    return made
