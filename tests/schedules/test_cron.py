"""The slots (due times) of users' cron expressions, and the end of quiet hours, in local time."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.timetable.cron import Cron
from perdure.timetable.quiet import QuietHours

PARIS = ZoneInfo("Europe/Paris")


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
