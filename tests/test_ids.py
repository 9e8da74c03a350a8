"""Identifiers sort by creation time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import RFC_4122

from perdure.clock import SystemClock
from perdure.ids import first_id, new_id, new_id_of

BEGIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Stepping(SystemClock):
    """A clock that advances by `step` at each reading."""

    def __init__(self, step: timedelta) -> None:
        self._step, self._now = step, BEGIN

    def now(self) -> datetime:
        self._now += self._step
        return self._now


def test_ids_of_one_millisecond_sort_as_they_were_made() -> None:
    """Ids made within one millisecond sort in the order of their creation."""
    clock = Stepping(timedelta(microseconds=1))
    made = [new_id(clock) for _ in range(3000)]
    assert made == sorted(made)
    assert {(each.version, each.variant) for each in made} == {(7, RFC_4122)}
    milliseconds = int(BEGIN.timestamp() * 1000)
    assert [made[0].int >> 80, made[-1].int >> 80] == [milliseconds, milliseconds + 3]


def test_ids_of_one_moment_differ() -> None:
    """Ids made at the same time differ, because 62 bits of each id are random."""
    clock = Stepping(timedelta(0))
    assert len({new_id(clock) for _ in range(1000)}) == 1000


def test_the_id_of_an_old_thing_sorts_by_its_time() -> None:
    """An imported turn is as old as its first message. Times before 1970 are those of 1970."""
    years = [1, 1969, 1970, 2024, 2026, 9999]
    made = [new_id_of(datetime(year, 1, 2, tzinfo=UTC)) for year in years]
    assert made[2:] == sorted(made[2:])
    assert max(made[:2]) < first_id(datetime(1970, 1, 2, tzinfo=UTC)) <= made[2]
