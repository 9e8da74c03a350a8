"""The slots (due times) of users' cron expressions, and the end of quiet hours, in local time."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.timetable.cron import Cron
from perdure.timetable.quiet import QuietHours

PARIS = ZoneInfo("Europe/Paris")
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)

CHANGES = {
    "Europe/Berlin": ("2026-03-29", "2026-10-25"),
    "America/New_York": ("2026-03-08", "2026-11-01"),
    "Australia/Lord_Howe": ("2026-04-05", "2026-10-04"),  # by half an hour
    "America/Havana": ("2026-03-08", "2026-11-01"),  # at midnight
    "America/St_Johns": ("2006-04-02", "2006-10-29"),  # at 00:01, back to the previous day
    "Pacific/Apia": ("2011-12-30", "2011-04-02"),  # skipped 30 December 2011
    "Asia/Tokyo": ("2026-03-29",),  # no change
}
"""Zones, and dates on which their clocks change."""


def utc(text: str) -> datetime:
    """Parse an ISO 8601 time in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "after", "slot"),
    [
        ("30 7 * * MON-FRI", "2026-05-01 06:00", "2026-05-04 05:30"),  # Friday after 7:30: the next slot is on Monday
        ("30 2 * * *", "2026-03-28 12:00", "2026-03-29 01:00"),  # the clocks skip 2:30: the first instant after the gap
        ("30 2 * * *", "2026-10-24 12:00", "2026-10-25 00:30"),  # 2:30 occurs twice: the first occurrence
        ("30 2 * * *", "2026-10-25 00:30", "2026-10-26 01:30"),  # the second 2:30 is not a slot
        ("0 0 29 2 *", "2026-01-01 00:00", "2028-02-28 23:00"),
        ("0 9 L * *", "2026-02-10 00:00", "2026-02-28 08:00"),
    ],
)
def test_the_next_slot(expression: str, after: str, slot: str) -> None:
    """The next slot is computed in the zone's local time, even on days on which clocks change."""
    assert Cron(expression, PARIS).next(utc(after)) == utc(slot)


@pytest.mark.parametrize("at", ["2026-10-25 00:50", "2026-10-25 01:10", "2026-10-25 01:55"])
def test_a_slot_is_found_late_in_the_repeated_hour(at: str) -> None:
    """The clocks go back from 3:00 to 2:00. At the second 2:10, `previous` returns the first 2:50."""
    cron = Cron("50 2 * * *", PARIS)
    assert cron.previous(utc(at)) == utc("2026-10-25 00:50")
    assert cron.previous(utc("2026-10-25 00:49")) == utc("2026-10-24 00:50")


@given(
    st.sampled_from(["* * * * *", "*/7 * * * *", "30 2 * * *", "0 3 * * SUN", "15 1-4 * * *", "0 12 1 * *"]),
    st.integers(0, 3 * 366 * 24 * 60).map(lambda minutes: utc("2025-01-01 00:00") + timedelta(minutes=minutes)),
)
def test_no_slot_lies_between_two(expression: str, at: datetime) -> None:
    """`previous(t) <= t < next(t)`, and `next` of the previous slot is the next slot."""
    cron = Cron(expression, PARIS)
    before, after = cron.previous(at), cron.next(at)
    assert before <= at < after
    assert cron.next(before) == after
    assert cron.previous(after) == after
    assert cron.previous(after - timedelta(seconds=1)) == before


@cache
def clock(zone: str, day: str) -> list[tuple[datetime, list[datetime], datetime]]:
    """Each minute around a change, the local times that the clocks newly reach or skip in it, and the local time.

    A change of more than three hours is a correction: the local times that it skips are not caught up.
    """
    shown, reached = [], None
    for at in (utc(day) + MINUTE * number for number in range(-36 * 60, 66 * 60)):
        local = at.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
        ahead = MINUTE if reached is None else max(local - reached, timedelta())
        reached = local if reached is None else max(reached, local)
        if ahead > 3 * HOUR + MINUTE:
            ahead = MINUTE
        shown.append((at, [local - MINUTE * back for back in range(ahead // MINUTE)], local))
    return shown


def debian_cron(zone: str, day: str, minutes: set[int], hours: set[int], *, interval: bool) -> list[datetime]:
    """The runs that cron(8) of Debian documents, minute by minute: the reference of the property test.

    An interval runs at each minute that matches. Other jobs run once for each local time, and soon after a change that
    skips it.
    """
    return [
        at
        for at, reached, local in clock(zone, day)
        if any(each.minute in minutes and each.hour in hours for each in ([local] if interval else reached))
    ]


@st.composite
def fields(draw: st.DrawFn) -> tuple[str, set[int], set[int]]:
    """The minute and hour of an expression, and the minutes and hours that they match."""

    def field(most: int) -> tuple[str, set[int]]:
        step = draw(st.sampled_from([1, 2, 7, 15, 20]))
        chosen = draw(st.sets(st.integers(0, most - 1), min_size=1, max_size=3))
        return draw(
            st.sampled_from(
                [
                    (f"*/{step}", set(range(0, most, step))),
                    ("*", set(range(most))),
                    (",".join(map(str, sorted(chosen))), chosen),
                    (f"0-{most - 1}/{step}", set(range(0, most, step))),
                ]
            )
        )

    (minute, minutes), (hour, hours) = field(60), field(24)
    return f"{minute} {hour} * * *", minutes, hours


@pytest.mark.long
@settings(max_examples=60)
@given(
    st.sampled_from([(zone, day) for zone, days in CHANGES.items() for day in days]),
    fields(),
    st.integers(-6 * 60, 16 * 60),
)
def test_clock_changes_are_treated_as_cron_documents(
    change: tuple[str, str], given_fields: tuple[str, set[int], set[int]], minute: int
) -> None:
    """Around each change, `next` and `previous` return the runs of Debian's cron."""
    (zone, day), (expression, minutes, hours) = change, given_fields
    interval = "*" in expression.removesuffix(" * * *")
    expected = debian_cron(zone, day, minutes, hours, interval=interval)
    at, cron = utc(day) + MINUTE * minute, Cron(expression, ZoneInfo(zone))
    assert cron.next(at) == next(run for run in expected if run > at)
    assert cron.previous(at) == next(run for run in reversed(expected) if run <= at)


@pytest.mark.parametrize(
    ("expression", "day", "hour_utc", "slots"),
    [
        ("*/15 * * * *", "2026-10-25", 0, ["00:15", "00:30", "00:45", "01:00", "01:15", "01:30", "01:45", "02:00"]),
        ("30 * * * *", "2026-10-25", 0, ["00:30", "01:30", "02:30"]),
        ("30 * * * *", "2026-03-29", 0, ["00:30", "01:30", "02:30"]),
        ("*/30 2 * * *", "2026-10-25", 0, ["00:30", "01:00", "01:30"]),
    ],
)
def test_an_interval_runs_in_each_of_the_repeated_hours(
    expression: str, day: str, hour_utc: int, slots: list[str]
) -> None:
    """The clocks of Paris go back at 01:00 UTC in October. An interval pauses for no hour, and skips no run."""
    cron, at = Cron(expression, PARIS), utc(f"{day} {hour_utc:02}:00")
    for slot in slots:
        at = cron.next(at)
        assert at == utc(f"{day} {slot}")


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("0 0 30 2 *", "bad day-of-month"),
        ("61 * * * *", "bad minute"),
        ("* * * *", "must have 5 fields"),
        ("0 0 * * * *", "must have 5 fields"),
        ("@daily", "must have 5 fields"),
        ("1,".join(["0"] * 200) + " * * * *", "must have 5 fields"),
        ("\N{ARABIC-INDIC DIGIT FIVE} * * * *", "bad minute"),
    ],
)
def test_an_invalid_expression_is_refused(expression: str, why: str) -> None:
    """The error says what is wrong and what is accepted."""
    with pytest.raises(ValueError, match=f"{why}.*accepted: minute, hour"):
        Cron(expression, PARIS)


@pytest.mark.parametrize(
    ("quiet", "at", "over"),
    [
        ((time(22), time(7)), "2026-05-01 20:30", "2026-05-02 05:00"),  # 22:30 in Paris: until the next morning
        ((time(22), time(7)), "2026-05-02 04:59", "2026-05-02 05:00"),
        ((time(22), time(7)), "2026-05-02 05:00", "2026-05-02 05:00"),
        ((time(22), time(7)), "2026-05-02 10:00", "2026-05-02 10:00"),
        ((time(12), time(14)), "2026-05-02 10:30", "2026-05-02 12:00"),
        ((time(1), time(2, 30)), "2026-03-29 00:30", "2026-03-29 01:00"),  # the clocks skip 2:30
        ((time(1), time(2, 30)), "2026-10-25 00:10", "2026-10-25 00:30"),  # the first 2:10
        ((time(1), time(2, 30)), "2026-10-25 01:10", "2026-10-25 01:30"),  # the second 2:10
    ],
)
def test_quiet_hours(quiet: tuple[time, time], at: str, over: str) -> None:
    """`over` returns the end of the quiet hours, even if they span midnight. The end itself is not quiet."""
    assert QuietHours(*quiet).over(utc(at), PARIS) == utc(over)
