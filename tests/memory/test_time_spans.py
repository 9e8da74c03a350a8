"""Time expressions in a question become spans of days. Other text gives no span."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.memory.recall.time_spans import MOST_SPANS, find_spans

_NOW = datetime(2024, 5, 15, 10, tzinfo=UTC)
"""A Wednesday."""


@pytest.mark.parametrize(
    ("question", "first", "days"),
    [
        ("what did I say yesterday?", (2024, 5, 14), 1),
        ("the day before yesterday", (2024, 5, 13), 1),
        ("today's plan", (2024, 5, 15), 1),
        ("what happened last week", (2024, 5, 6), 7),
        ("this week", (2024, 5, 13), 7),
        ("the last weekend", (2024, 5, 11), 2),
        ("three weeks ago", (2024, 4, 22), 7),
        ("2 days ago", (2024, 5, 13), 1),
        ("a month ago", (2024, 4, 1), 30),
        ("last month", (2024, 4, 1), 30),
        ("last year", (2023, 1, 1), 365),
        ("in March", (2024, 3, 1), 31),
        ("in December", (2023, 12, 1), 31),
        ("March 2023", (2023, 3, 1), 31),
        ("8 May 2023", (2023, 5, 8), 1),
        ("May 8th, 2023", (2023, 5, 8), 1),
        ("2023-05-08", (2023, 5, 8), 1),
        ("on 3 February", (2024, 2, 3), 1),
        ("June 3", (2023, 6, 3), 1),
        ("on Monday", (2024, 5, 13), 1),
        ("last Wednesday", (2024, 5, 8), 1),
        ("in 2022", (2022, 1, 1), 365),
        ("어제 뭐라고 했지?", (2024, 5, 14), 1),
        ("그저께", (2024, 5, 13), 1),
        ("지난주에 간 곳", (2024, 5, 6), 7),
        ("지난달", (2024, 4, 1), 30),
        ("작년에", (2023, 1, 1), 365),
        ("3월에 만난 사람", (2024, 3, 1), 31),
        ("2023년 5월 8일", (2023, 5, 8), 1),
        ("2023년 5월", (2023, 5, 1), 31),
        ("2주 전에", (2024, 4, 29), 7),
        ("지난 주말", (2024, 5, 11), 2),
        ("지난주 금요일", (2024, 5, 10), 1),
        ("2023-05-08에 간 곳", (2023, 5, 8), 1),
    ],
)
def test_a_time_is_read(question: str, first: tuple[int, int, int], days: int) -> None:
    """A time expression gives one span, which starts on the date `first` and covers `days` days."""
    (span,) = find_spans(question, _NOW, ZoneInfo("UTC"))
    assert (span.start.date(), (span.end - span.start) / timedelta(days=1)) == (date(*first), days)


@pytest.mark.parametrize(
    ("day", "question", "first"),
    [
        (13, "last weekend", (2024, 5, 11)),
        (17, "last weekend", (2024, 5, 11)),
        (18, "last weekend", (2024, 5, 11)),
        (19, "last weekend", (2024, 5, 11)),
        (20, "last weekend", (2024, 5, 18)),
        (13, "지지난 주말", (2024, 5, 4)),
        (13, "this weekend", (2024, 5, 11)),
        (19, "this weekend", (2024, 5, 18)),
    ],
)
def test_the_last_weekend_is_over(day: int, question: str, first: tuple[int, int, int]) -> None:
    """From Monday (13 May 2024) to Friday, it is the one that ended last. On a weekend, it is the one before that."""
    (span,) = find_spans(question, datetime(2024, 5, day, 10, tzinfo=UTC), ZoneInfo("UTC"))
    assert span.start.date() == date(*first)


@pytest.mark.parametrize(
    "question",
    [
        "",
        "who may come",
        "march on",
        "on 31 June",
        "2023-13-45",
        "99999 days ago",
        "in 2090",
        "윤오월",
        "십만 년 전",
        "in María",
    ],
)
def test_text_without_a_time_gives_no_span(question: str) -> None:
    """Impossible dates, future times and words that only look like months give no span."""
    assert find_spans(question, _NOW, ZoneInfo("UTC")) == ()


def test_29_february_is_in_the_latest_leap_year() -> None:
    """If a question names 29 February without a year, the span is the most recent 29 February."""
    (span,) = find_spans("on 29 February", datetime(2026, 5, 14, tzinfo=UTC), ZoneInfo("UTC"))
    assert span.start.date() == date(2024, 2, 29)


def test_days_begin_at_the_zones_midnight() -> None:
    """Days begin at midnight in the user's time zone."""
    (span,) = find_spans("yesterday", datetime(2024, 5, 14, 20, tzinfo=UTC), ZoneInfo("Asia/Seoul"))
    assert span.start.astimezone(UTC) == datetime(2024, 5, 13, 15, tzinfo=UTC)


@given(st.text(), st.timedeltas(timedelta(days=-40_000), timedelta(days=60_000)))
def test_any_text_gives_valid_spans_or_none(question: str, later: timedelta) -> None:
    """Any text gives at most `MOST_SPANS` spans. Each span ends after its start."""
    found = find_spans(question, _NOW + later, ZoneInfo("Europe/Paris"))
    assert len(found) <= MOST_SPANS
    assert all(span.start < span.end for span in found)
