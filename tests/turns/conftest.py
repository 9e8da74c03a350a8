"""The fixture `harness` of the turn tests."""

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
    """A harness whose invariants are checked after the test."""
    made = Harness(settings, clock, database, waker)
    yield made
    made.check()
