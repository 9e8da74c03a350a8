"""A clock that starts at a known time, and a schedule entry for the tests."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Row

from perdure.clock import MovedClock
from perdure.database.engine import Database, Statement
from perdure.settings import Settings, TurnSettings
from perdure.timetable.cadence import Every
from perdure.timetable.entry import ScheduleEntry

START = datetime(2027, 3, 1, 12, 0, 30, tzinfo=UTC)

HOURLY = ScheduleEntry("hourly", Every(60), "tests.hourly", "maintenance")

Ask = Callable[..., Any]


def move_to(clock: MovedClock, when: datetime) -> None:
    """Set the clock, and with it the database's clock, to `when`."""
    clock.advance(when - clock.now())


@pytest.fixture
def clock() -> MovedClock:
    """A clock that starts at `START`."""
    made = MovedClock()
    move_to(made, START)
    return made


@pytest.fixture
def limits(settings: Settings) -> TurnSettings:
    """The settings of turns: leases of 30 s, a sweep every 5 s."""
    return settings.turn


@pytest.fixture
def ask(database: Database) -> Ask:
    """A function that runs a query: `ask(sql, name=value)` returns the rows."""

    def run(sql: str, **parameters: Any) -> list[Row[Any]]:
        return list(database.run(Statement(f"tests.{abs(hash(sql))}", sql), parameters))

    return run


def hours(number: float) -> timedelta:
    """A timedelta of hours."""
    return timedelta(hours=number)


def seconds(number: float) -> timedelta:
    """A timedelta of seconds."""
    return timedelta(seconds=number)
