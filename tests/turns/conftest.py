"""The fixture `harness`, on which every test of a turn runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.settings import Settings
from tests.conftest import RecordingWaker
from tests.turns.harness import Harness


@pytest.fixture
def harness(settings: Settings, clock: MovedClock, database: Database, waker: RecordingWaker) -> Iterator[Harness]:
    """A harness; the invariants are checked when the test is over."""
    made = Harness(settings, clock, database, waker)
    yield made
    made.check()
