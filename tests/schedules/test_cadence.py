"""Slot arithmetic in difficult time zones: half-hour changes, Ramadan, a skipped day."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perdure.schedule.cadence import AtTimes, Cadence, Every, instant, times_every

ZONES = {
    name: ZoneInfo(name)
    for name in (
        "UTC",
        "Europe/Berlin",
        "America/New_York",
        "Australia/Lord_Howe",  # changes by half an hour
        "Africa/Casablanca",  # changes twice a year around Ramadan
        "Pacific/Apia",  # had no 30 December 2011
        "Pacific/Kwajalein",  # had no 21 August 1993
        "America/Havana",  # changes at midnight
        "America/St_Johns",  # changed at a minute past midnight, which repeated the end of the day before
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
    """The zone's UTC offset."""
    return at.astimezone(zone).utcoffset()


CHANGES = {name: changes(zone) for name, zone in ZONES.items()}

anytime = st.timedeltas(timedelta(), timedelta(days=100 * 365)).map(
    lambda after: datetime(1990, 1, 1, tzinfo=UTC) + after
)


@st.composite
def zoned_moments(draw: st.DrawFn) -> tuple[ZoneInfo, datetime]:
    """A zone and an instant, most often within two days of a change of its clocks."""
    name = draw(st.sampled_from(sorted(ZONES)))
    if not CHANGES[name] or draw(st.integers(0, 3)) == 0:
        return ZONES[name], draw(anytime)
    change = draw(st.sampled_from(CHANGES[name]))
    distance = draw(st.timedeltas(timedelta(days=-2), timedelta(days=2)))
    return ZONES[name], change + distance


@st.composite
def cadences(draw: st.DrawFn, zone: ZoneInfo) -> Cadence:
    """A cadence of either kind."""
    if draw(st.integers(0, 4)) == 0:
        return Every(draw(st.integers(1, 1_500)))
    minutes = draw(st.sets(st.integers(0, 24 * 60 - 1), min_size=1, max_size=6))
    times = tuple(time(minute // 60, minute % 60) for minute in sorted(minutes))
    return AtTimes(zone, times, draw(st.none() | st.integers(0, 6)))


@given(st.data(), zoned_moments())
def test_previous_and_next_agree(data: st.DataObject, moment: tuple[ZoneInfo, datetime]) -> None:
    """Processes with slightly different clocks must compute the same slots."""
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
    """Forward and backward iteration give the same ascending slots."""
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
    """The rule covers ordinary days, gaps and repeated hours. The test checks it minute by minute."""
    zone, near = moment
    wanted = datetime.combine(near.astimezone(zone).date(), at.replace(second=0, microsecond=0, tzinfo=None))
    minutes = (wanted.replace(tzinfo=UTC) - timedelta(hours=30) + MINUTE * number for number in range(60 * 60))

    expected = next(each for each in minutes if each.astimezone(zone).replace(tzinfo=None) >= wanted)

    assert instant(wanted, zone) == expected


@given(st.data(), zoned_moments())
def test_each_slot_has_a_configured_local_time(data: st.DataObject, moment: tuple[ZoneInfo, datetime]) -> None:
    """Outside a gap, the local time of a slot is the configured time."""
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
    """In St John's the clocks went back at 00:01, so 23:30 occurred again after midnight."""
    daily = AtTimes(ZONES["America/St_Johns"], (time(0),))
    midnight = datetime(2009, 11, 1, 2, 30, tzinfo=UTC)

    assert daily.previous(midnight + timedelta(minutes=30)) == midnight
    assert daily.next(midnight) == datetime(2009, 11, 2, 3, 30, tzinfo=UTC)


def test_a_skipped_day_is_one_slot() -> None:
    """Samoa skipped 30 December 2011, so the four times of that day and the next midnight are one instant."""
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
    """The last span of a day may be shorter."""
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
    """A cadence of no minutes would always be due."""
    with pytest.raises(ValueError, match=f"minutes is {minutes}"):
        Every(minutes)


@pytest.mark.parametrize("times", [(), (time(2), time(1)), (time(2), time(2))])
def test_times_out_of_order_are_refused(times: tuple[time, ...]) -> None:
    """The search for the newest slot needs ascending times."""
    with pytest.raises(ValueError, match="ascending"):
        AtTimes(BERLIN, times)


def test_an_invalid_weekday_is_refused() -> None:
    """A cadence with an invalid weekday would never be due."""
    with pytest.raises(ValueError, match="Monday"):
        AtTimes(BERLIN, (time(2),), 7)
