"""The times that a question names ("last week", "in March", "2023-05-08", "지난주"), as time spans.

Recognises English and Korean words, and numeric dates in any language. Invalid dates are ignored. For a month or day
without a year, the span is the latest such month or day that has begun. Called by `search`.
"""

from __future__ import annotations

from calendar import isleap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from perdure.text.linear import is_hangul
from perdure.text.patterns import Match, Pattern, compiled

MOST_SPANS = 4

MAX_CHARS = 2_000
"""Maximum characters of a question that are read."""

_MOST_MATCHES = 100
"""Maximum pattern matches per question. Future times count towards this limit, although they give no span."""

_MONTHS = {
    name: number
    for number, names in enumerate(
        (
            "january jan", "february feb", "march mar", "april apr", "may", "june jun", "july jul", "august aug",
            "september sep sept", "october oct", "november nov", "december dec",
        ),
        start=1,
    )
    for name in names.split()
}  # fmt: skip
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_DAYS = {name: number for number, name in enumerate(("mon", "tues", "wednes", "thurs", "fri", "satur", "sun"))}
_KOREAN_DAYS = {name: number for number, name in enumerate("월화수목금토일")}
_NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "couple of": 2}
_NUMBER = "|".join([r"\d{1,3}", *_NUMBERS])
_KOREAN_UNITS = {"일": "day", "주일": "week", "주": "week", "개월": "month", "달": "month", "년": "year"}
_YEAR = r"(?:19|20)\d\d"


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """An interval of aware times, including `start` and excluding `end`."""

    start: datetime
    end: datetime


def find_spans(question: str, now: datetime, zone: ZoneInfo) -> tuple[TimeSpan, ...]:
    """The time spans that `question` names, relative to `now`. Days begin at midnight in `zone`. Omits future spans."""
    text = question[:MAX_CHARS].lower()
    today = now.astimezone(zone).date()
    matched: list[tuple[int, int]] = []
    found: list[TimeSpan] = []
    for pattern, to_days in _PATTERNS:
        for match in pattern.finditer(text):
            if len(matched) == _MOST_MATCHES:
                break
            if _is_part(match, text) or any(start < match.end() and match.start() < end for start, end in matched):
                continue  # within "8 May 2023", "May" is not a separate match
            for first, end in _days_of(to_days, match, today):
                matched.append((match.start(), match.end()))
                if first <= today:
                    found.append(TimeSpan(_midnight(first, zone), _midnight(end, zone)))
    return tuple(dict.fromkeys(found))[:MOST_SPANS]


def _is_part(match: Match, text: str) -> bool:
    r"""Whether the match ends or begins within a longer word, such as "in Mar" in "in María".

    This check is needed because RE2's `\b` matches before an accented letter. A Korean particle after a date, as in
    2023-05-08에, does not make a longer word.
    """
    edges = (
        (text[match.start() - 1 : match.start()], text[match.start()]),
        (text[match.end() : match.end() + 1], match[0][-1]),
    )
    return any(
        outer.isalnum() and not outer.isascii() and not is_hangul(outer) and inner.isascii() for outer, inner in edges
    )


_Days = tuple[date, date]
_ToDays = Callable[[Match, date], _Days]


def _days_of(to_days: _ToDays, match: Match, today: date) -> Iterator[_Days]:
    try:
        yield to_days(match, today)
    except (ValueError, OverflowError):  # 31 June, or a year before year 1
        return


def _midnight(day: date, zone: ZoneInfo) -> datetime:
    return datetime.combine(day, time(), zone)


def _day(day: date) -> _Days:
    return day, day + timedelta(days=1)


def _month(year: int, month: int) -> _Days:
    first = date(year, month, 1)
    return first, (first + timedelta(days=31)).replace(day=1)


def _year(year: int) -> _Days:
    return date(year, 1, 1), date(year + 1, 1, 1)


def _latest(today: date, month: int, day: int | None = None) -> _Days:
    """The latest occurrence of a month, or of a day in a month, that has begun by `today`."""
    year = today.year if (month, day or 1) <= (today.month, today.day) else today.year - 1
    if day is None:
        return _month(year, month)
    while (month, day) == (2, 29) and not isleap(year):
        year -= 1
    return _day(date(year, month, day))


def _ago(count: int, unit: str, today: date) -> _Days:
    """The whole day, calendar week, month or year that lies `count` units before the current one."""
    match unit:
        case "day":
            return _day(today - timedelta(days=count))
        case "week":
            monday = today - timedelta(days=today.weekday() + 7 * count)
            return monday, monday + timedelta(days=7)
        case "month":
            months = today.year * 12 + today.month - 1 - count
            return _month(months // 12, months % 12 + 1)
        case _:
            return _year(today.year - count)


def _weekend(today: date, back: int) -> _Days:
    saturday = today - timedelta(days=(today.weekday() - 5) % 7 + 7 * back)
    return saturday, saturday + timedelta(days=2)


def _weekday(today: date, weekday: int) -> _Days:
    return _day(today - timedelta(days=(today.weekday() - weekday - 1) % 7 + 1))


def _count(text: str) -> int:
    return _NUMBERS[text] if text in _NUMBERS else int(text)


def _pattern(text: str) -> Pattern:
    return compiled(text.replace("MONTH", _MONTH).replace("YEAR", _YEAR).replace("NUMBER", _NUMBER))


_PERIODS_BACK = {"last": 1, "previous": 1, "past": 1, "this": 0}
_KOREAN_PERIODS_BACK = {"지난": 1, "저번": 1, "이번": 0, "지지난": 2}

# More specific patterns come first: no later pattern matches text that an earlier one has matched.
_PATTERNS: tuple[tuple[Pattern, _ToDays], ...] = tuple(
    (_pattern(text), to_days)
    for text, to_days in (
        (r"\b(YEAR)[-/.](\d\d?)[-/.](\d\d?)\b", lambda m, _: _day(date(int(m[1]), int(m[2]), int(m[3])))),
        (r"(YEAR)년 ?(\d\d?)월 ?(\d\d?)일", lambda m, _: _day(date(int(m[1]), int(m[2]), int(m[3])))),
        (
            r"\b(\d\d?)(?:st|nd|rd|th)? (?:of )?(MONTH)\b\.?,? (YEAR)\b",
            lambda m, _: _day(date(int(m[3]), _MONTHS[m[2]], int(m[1]))),
        ),
        (
            r"\b(MONTH)\b\.? (\d\d?)(?:st|nd|rd|th)?,? (YEAR)\b",
            lambda m, _: _day(date(int(m[3]), _MONTHS[m[1]], int(m[2]))),
        ),
        (r"(YEAR)년 ?(\d\d?)월", lambda m, _: _month(int(m[1]), int(m[2]))),
        (r"\b(MONTH)\b\.?,? (?:of )?(YEAR)\b", lambda m, _: _month(int(m[2]), _MONTHS[m[1]])),
        (r"\b(YEAR)-(\d\d)\b", lambda m, _: _month(int(m[1]), int(m[2]))),
        (r"(\d\d?)월 ?(\d\d?)일", lambda m, today: _latest(today, int(m[1]), int(m[2]))),
        (
            r"\b(?:on |the )(\d\d?)(?:st|nd|rd|th)? (?:of )?(MONTH)\b",
            lambda m, today: _latest(today, _MONTHS[m[2]], int(m[1])),
        ),
        (
            r"\b(MONTH)\b\.? (\d\d?)(?:st|nd|rd|th)?\b",
            lambda m, today: _latest(today, _MONTHS[m[1]], int(m[2])),
        ),
        (r"\b(NUMBER) (day|week|month|year)s? ago\b", lambda m, today: _ago(_count(m[1]), m[2], today)),
        (r"(\d{1,3}) ?(개월|주일|일|주|달|년) ?전", lambda m, today: _ago(int(m[1]), _KOREAN_UNITS[m[2]], today)),
        (r"\b(last|previous|past|this) weekend\b", lambda m, today: _weekend(today, _PERIODS_BACK[m[1]])),
        (r"\b(last|previous|past|this) (week|month|year)\b", lambda m, today: _ago(_PERIODS_BACK[m[1]], m[2], today)),
        (
            r"\b(?:last |on )(mon|tues|wednes|thurs|fri|satur|sun)day\b",
            lambda m, today: _weekday(today, _DAYS[m[1]]),
        ),
        (
            r"(?:지난|저번) ?(?:주 ?)?([월화수목금토일])요일",
            lambda m, today: _weekday(today, _KOREAN_DAYS[m[1]]),
        ),
        (r"(지지난|지난|저번|이번) ?주말", lambda m, today: _weekend(today, _KOREAN_PERIODS_BACK[m[1]])),
        (
            r"(지지난|지난|저번|이번) ?(주|달)",
            lambda m, today: _ago(_KOREAN_PERIODS_BACK[m[1]], _KOREAN_UNITS[m[2]], today),
        ),
        (r"\bthe day before yesterday\b|그저께|그제", lambda _, today: _day(today - timedelta(days=2))),
        (r"\byesterday\b|\blast night\b|어제|어젯밤", lambda _, today: _day(today - timedelta(days=1))),
        (r"\btoday\b|\bthis morning\b|오늘", lambda _, today: _day(today)),
        (r"재작년", lambda _, today: _year(today.year - 2)),
        (r"작년|지난 ?해", lambda _, today: _year(today.year - 1)),
        (r"올해", lambda _, today: _year(today.year)),
        (r"(YEAR)년", lambda m, _: _year(int(m[1]))),
        (r"(\d+)월", lambda m, today: _latest(today, int(m[1]))),
        (r"\b(?:in|during|since|last) (MONTH)\b", lambda m, today: _latest(today, _MONTHS[m[1]])),
        (r"\b(?:in|during|since|of) (YEAR)\b", lambda m, _: _year(int(m[1]))),
    )
)
