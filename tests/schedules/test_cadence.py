"""The slots of cadences in zones with ordinary and unusual clock changes, such as half-hour changes or skipped days."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perdure.timetable.cadence import AtTimes, Cadence, Every, instant, times_every

ZONES = {
    name: ZoneInfo(name)
    for name in (
        "UTC",
        "Europe/Berlin",
        "America/New_York",
        "Australia/Lord_Howe",  # clocks change by half an hour
        "Africa/Casablanca",  # clocks change before and after Ramadan
        "Pacific/Apia",  # had no 30 December 2011
        "Pacific/Kwajalein",  # had no 21 August 1993
        "America/Havana",  # clocks change at midnight
        "America/St_Johns",  # clocks went back at 00:01, to the end of the previous day
    )
}
MINUTE = timedelta(minutes=1)
BERLIN = ZONES["Europe/Berlin"]


def changes(zone: ZoneInfo) -> list[datetime]:
    """The UTC days from 1990 to 2060 on which the zone's clocks change."""
    weeks = [datetime(1990, 1, 1, tzinfo=UTC) + timedelta(weeks=number) for number in range(70 * 52)]
    return [
        week + timedelta(days=day)
        for week, following in pairwise(weeks)
        if offset(week, zone) != offset(following, zone)
        for day in range(7)
        if offset(week + timedelta(days=day), zone) != offset(week + timedelta(days=day + 1), zone)
    ]


def offset(at: datetime, zone: ZoneInfo) -> timedelta | None:
    """The zone's UTC offset at the time `at`."""
    return at.astimezone(zone).utcoffset()


CHANGES = {name: changes(zone) for name, zone in ZONES.items()}

anytime = st.timedeltas(timedelta(), timedelta(days=100 * 365)).map(
    lambda after: datetime(1990, 1, 1, tzinfo=UTC) + after
)


@st.composite
def zoned_moments(draw: st.DrawFn) -> tuple[ZoneInfo, datetime]:
    """A zone and an instant. Most instants are within two days of a change of the zone's clocks."""
    name = draw(st.sampled_from(sorted(ZONES)))
    if not CHANGES[name] or draw(st.integers(0, 3)) == 0:
        return ZONES[name], draw(anytime)
    change = draw(st.sampled_from(CHANGES[name]))
    distance = draw(st.timedeltas(timedelta(days=-2), timedelta(days=2)))
    return ZONES[name], change + distance


@st.composite
def cadences(draw: st.DrawFn, zone: ZoneInfo) -> Cadence:
    """An `Every` or an `AtTimes`."""
    if draw(st.integers(0, 4)) == 0:
        return Every(draw(st.integers(1, 1_500)))
    minutes = draw(st.sets(st.integers(0, 24 * 60 - 1), min_size=1, max_size=6))
    times = tuple(time(minute // 60, minute % 60) for minute in sorted(minutes))
    return AtTimes(zone, times, draw(st.none() | st.integers(0, 6)))


@given(st.data(), zoned_moments())
def test_previous_and_next_agree(data: st.DataObject, moment: tuple[ZoneInfo, datetime]) -> None:
    """All instants from one slot until the next slot have the same `previous` and the same `next`."""
    zone, at = moment
    cadence = data.draw(cadences(zone))

    previous, following = cadence.previous(at), cadence.next(at)

    assert previous <= at < following
    assert cadence.previous(previous) == previous
    assert cadence.next(previous) == following
    assert cadence.previous(following) == following
    assert cadence.previous(following - timedelta(microseconds=1)) == previous


@given(st.data(), zoned_moments())
def test_slots_ascend(data: st.DataObject, moment: tuple[ZoneInfo, datetime]) -> None:
    """Iteration with `next` gives ascending slots. Iteration with `previous` gives the same slots in reverse."""
    zone, at = moment
    cadence = data.draw(cadences(zone))

    forth = [cadence.previous(at)]
    forth += [slot := cadence.next(forth[-1])]
    forth += [slot := cadence.next(slot) for _ in range(20)]
    back = [forth[-1]]
    back += [slot := cadence.previous(slot - timedelta(microseconds=1)) for _ in range(21)]

    assert all(one < other for one, other in pairwise(forth))
    assert back == forth[::-1]


@given(zoned_moments(), st.times())
def test_a_local_time_means_the_first_instant_that_shows_it_or_later(
    moment: tuple[ZoneInfo, datetime], at: time
) -> None:
    """`instant` returns the first instant at which the zone's clocks show the local time or a later time.

    The test searches for this instant minute by minute.
    """
    zone, near = moment
    wanted = datetime.combine(near.astimezone(zone).date(), at.replace(second=0, microsecond=0, tzinfo=None))
    minutes = (wanted.replace(tzinfo=UTC) - timedelta(hours=30) + MINUTE * number for number in range(60 * 60))

    expected = next(each for each in minutes if each.astimezone(zone).replace(tzinfo=None) >= wanted)

    assert instant(wanted, zone) == expected


@given(st.data(), zoned_moments())
def test_each_slot_has_a_configured_local_time(data: st.DataObject, moment: tuple[ZoneInfo, datetime]) -> None:
    """A slot has a configured local time and weekday, unless the clocks skipped that time."""
    zone, at = moment
    cadence = data.draw(cadences(zone))
    assume(isinstance(cadence, AtTimes))
    assert isinstance(cadence, AtTimes)

    slot = cadence.next(at)

    local = slot.astimezone(zone)
    after_a_gap = (slot - MINUTE).astimezone(zone).utcoffset() != local.utcoffset()
    assert after_a_gap or (local.time() in cadence.times and cadence.weekday in {None, local.weekday()})
    assert local.fold == 0


def test_a_time_that_does_not_exist_is_the_end_of_the_gap() -> None:
    """If the clocks skip Sunday 02:00, the slot is the first instant after the gap."""
    prune = AtTimes(BERLIN, (time(2),), 6)

    slot = prune.next(datetime(2027, 3, 27, 12, tzinfo=UTC))

    assert slot == datetime(2027, 3, 28, 1, tzinfo=UTC)
    assert slot.astimezone(BERLIN).time() == time(3)


def test_a_time_that_occurs_twice_is_its_first() -> None:
    """If the clocks repeat Sunday 02:00, the slot is its first occurrence."""
    prune = AtTimes(BERLIN, (time(2),), 6)

    first = prune.next(datetime(2027, 10, 30, 12, tzinfo=UTC))

    assert first == datetime(2027, 10, 31, 0, tzinfo=UTC)
    assert prune.next(first) == datetime(2027, 11, 7, 1, tzinfo=UTC)


def test_midnight_may_precede_a_repeated_evening() -> None:
    """If the clocks go back from 00:01 to 23:01, midnight occurs twice. The slot is its first occurrence."""
    daily = AtTimes(ZONES["America/St_Johns"], (time(0),))
    midnight = datetime(2009, 11, 1, 2, 30, tzinfo=UTC)

    assert daily.previous(midnight + timedelta(minutes=30)) == midnight
    assert daily.next(midnight) == datetime(2009, 11, 2, 3, 30, tzinfo=UTC)


def test_a_skipped_day_is_one_slot() -> None:
    """Samoa skipped 30 December 2011. The four times of that day and the next midnight are one slot."""
    every_six_hours = AtTimes(ZONES["Pacific/Apia"], times_every(6))
    last = every_six_hours.previous(datetime(2011, 12, 30, 9, tzinfo=UTC))

    following = every_six_hours.next(last)

    assert last == datetime(2011, 12, 29, 18, tzinfo=every_six_hours.zone)
    assert following == datetime(2011, 12, 31, tzinfo=every_six_hours.zone)
    assert every_six_hours.next(following) - following == timedelta(hours=6)


def test_each_minute_continues_while_the_clocks_go_back() -> None:
    """`Every` counts elapsed minutes, including those of the repeated hour."""
    start = datetime(2027, 10, 31, tzinfo=UTC)
    slots = [start]
    while slots[-1] < start + timedelta(hours=3):
        slots.append(Every().next(slots[-1]))

    assert {other - one for one, other in pairwise(slots)} == {MINUTE}


def test_six_hours_are_counted_from_local_midnight() -> None:
    """`times_every` counts the hours from midnight. The last interval of a day may be shorter."""
    assert times_every(6) == (time(0), time(6), time(12), time(18))
    assert times_every(7) == (time(0), time(7), time(14), time(21))
    assert times_every(24) == (time(0),)


@pytest.mark.parametrize(
    ("cadence", "words"),
    [
        (Every(), "each minute"),
        (Every(15), "every 15 minutes"),
        (AtTimes(BERLIN, (time(3, 30),)), "daily at 03:30 Europe/Berlin"),
        (AtTimes(BERLIN, (time(2),), 6), "Sundays at 02:00 Europe/Berlin"),
        (AtTimes(BERLIN, times_every(6)), "daily at 00:00, 06:00, 12:00 and 18:00 Europe/Berlin"),
    ],
)
def test_a_cadence_is_described_in_words(cadence: Cadence, words: str) -> None:
    """`perdure schedules list` shows the times in words, not as a cron expression."""
    assert cadence.describe() == words


@pytest.mark.parametrize("minutes", [0, -1])
def test_a_span_of_no_minutes_is_refused(minutes: int) -> None:
    """An interval must be positive, because an interval of zero minutes would always be due."""
    with pytest.raises(ValueError, match=f"minutes is {minutes}"):
        Every(minutes)


@pytest.mark.parametrize("times", [(), (time(2), time(1)), (time(2), time(2))])
def test_times_out_of_order_are_refused(times: tuple[time, ...]) -> None:
    """Times must be ascending, because the search for a slot relies on their order."""
    with pytest.raises(ValueError, match="ascending"):
        AtTimes(BERLIN, times)


def test_an_invalid_weekday_is_refused() -> None:
    """A cadence with an invalid weekday is refused, because the cadence would never be due."""
    with pytest.raises(ValueError, match="Monday"):
        AtTimes(BERLIN, (time(2),), 7)
