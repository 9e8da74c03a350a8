"""The stage that every test of a turn's life plays on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.settings import Settings
from tests.conftest import RecordingWaker
from tests.turns.stage import Stage


@pytest.fixture
def stage(settings: Settings, clock: MovedClock, database: Database, waker: RecordingWaker) -> Iterator[Stage]:
    """A stage; what must hold whatever happened is checked when the test is over."""
    made = Stage(settings, clock, database, waker)
    yield made
    made.check()
