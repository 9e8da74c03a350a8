"""The times that a question names ("last week", "in March", "2023-05-08", "지난주"), as time spans.

Recognises English and Korean words, and numeric dates in any language. Invalid dates are ignored. For a month or day
without a year, the span is the latest such month or day that has begun. Called by `search`.
"""

from __future__ import annotations

from calendar import isleap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from perdure.text.linear import is_hangul
from perdure.text.patterns import Match, compiled

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
_WEEKDAYS = ("mon", "tues", "wednes", "thurs", "fri", "satur", "sun", *"월화수목금토일")
_COUNTS = {
    "a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "couple of": 2,
    "this": 0, "last": 1, "previous": 1, "past": 1, "이번": 0, "지난": 1, "저번": 1, "지지난": 2,
}  # fmt: skip
_UNITS = {
    "일": "day", "주": "week", "주일": "week", "주말": "weekend", "달": "month", "개월": "month", "년": "year",
}  # fmt: skip
_ALIASES = {
    "today": (0, "day"), "this morning": (0, "day"), "오늘": (0, "day"),
    "yesterday": (1, "day"), "last night": (1, "day"), "어제": (1, "day"), "어젯밤": (1, "day"),
    "the day before yesterday": (2, "day"), "그저께": (2, "day"), "그제": (2, "day"),
    "올해": (0, "year"), "작년": (1, "year"), "지난해": (1, "year"), "지난 해": (1, "year"), "재작년": (2, "year"),
}  # fmt: skip
_WORDS = {
    "MONTH": "|".join(sorted(_MONTHS, key=len, reverse=True)),
    "YEAR": r"(?:19|20)\d\d",
    "DAY": r"\d\d?",
    "NUMBER": r"\d{1,3}|an?|one|two|three|four|five|six|seven|couple of",
    "ALIAS": "|".join(rf"\b{alias}\b" if alias.isascii() else alias for alias in _ALIASES),
}

# The letters name the groups: year, month, day; number of units back, unit; weekday; alias. More specific patterns
# come first: no later pattern matches text that an earlier one has matched.
_PATTERNS = tuple(
    (letters, compiled(text.format(**_WORDS)))
    for letters, text in (
        ("ymd", r"\b({YEAR})[-/.]({DAY})[-/.]({DAY})\b"),
        ("ymd", r"({YEAR})년 ?({DAY})월 ?({DAY})일"),
        ("dmy", r"\b({DAY})(?:st|nd|rd|th)? (?:of )?({MONTH})\b\.?,? ({YEAR})\b"),
        ("mdy", r"\b({MONTH})\b\.? ({DAY})(?:st|nd|rd|th)?,? ({YEAR})\b"),
        ("ym", r"({YEAR})년 ?({DAY})월"),
        ("my", r"\b({MONTH})\b\.?,? (?:of )?({YEAR})\b"),
        ("ym", r"\b({YEAR})-(\d\d)\b"),
        ("md", r"({DAY})월 ?({DAY})일"),
        ("dm", r"\b(?:on |the )({DAY})(?:st|nd|rd|th)? (?:of )?({MONTH})\b"),
        ("md", r"\b({MONTH})\b\.? ({DAY})(?:st|nd|rd|th)?\b"),
        ("nu", r"\b({NUMBER}) (day|week|month|year)s? ago\b"),
        ("nu", r"(\d{{1,3}}) ?(개월|주일|일|주|달|년) ?전"),
        ("nu", r"\b(last|previous|past|this) (weekend|week|month|year)\b"),
        ("w", r"\b(?:last |on )(mon|tues|wednes|thurs|fri|satur|sun)day\b"),
        ("w", r"(?:지난|저번) ?(?:주 ?)?([월화수목금토일])요일"),
        ("nu", r"(지지난|지난|저번|이번) ?(주말|주|달)"),
        ("a", r"({ALIAS})"),
        ("y", r"({YEAR})년"),
        ("m", r"(\d+)월"),
        ("m", r"\b(?:in|during|since|last) ({MONTH})\b"),
        ("y", r"\b(?:in|during|since|of) ({YEAR})\b"),
    )
)


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
    found: dict[TimeSpan, None] = {}
    for letters, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            if len(matched) == _MOST_MATCHES:
                break
            if _is_part(match, text) or any(start < match.end() and match.start() < end for start, end in matched):
                continue  # within "8 May 2023", "May" is not a separate match
            with suppress(ValueError, OverflowError):  # 31 June, or a year before year 1
                first, end = _days(dict(zip(letters, map(str, match.groups()), strict=True)), today)
                matched.append((match.start(), match.end()))
                if first <= today:
                    found[TimeSpan(*(datetime.combine(day, time(), zone) for day in (first, end)))] = None
    return tuple(found)[:MOST_SPANS]


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


def _days(found: Mapping[str, str], today: date) -> tuple[date, date]:
    """The first day of a match, and the day after its last day."""
    if alias := found.get("a"):
        return _back(*_ALIASES[alias], today)
    if unit := found.get("u"):
        count = _COUNTS[found["n"]] if found["n"] in _COUNTS else int(found["n"])
        return _back(count, _UNITS.get(unit, unit), today)
    if weekday := found.get("w"):
        return _back((today.weekday() - _WEEKDAYS.index(weekday) - 1) % 7 + 1, "day", today)
    numbers = {letter: _MONTHS.get(text) or int(text) for letter, text in found.items()}
    if "m" not in numbers:
        return _back(today.year - numbers["y"], "year", today)
    month, day = numbers["m"], numbers.get("d", 1)
    year = numbers.get("y") or (today.year if (month, day) <= (today.month, today.day) else today.year - 1)
    while (month, day) == (2, 29) and "y" not in numbers and not isleap(year):
        year -= 1
    first = date(year, month, day)
    return first, first + timedelta(days=1) if "d" in numbers else (first + timedelta(days=31)).replace(day=1)


def _back(count: int, unit: str, today: date) -> tuple[date, date]:
    """The whole day, calendar week, weekend, month or year that lies `count` units before the current one.

    A weekend is that of the calendar week `count` weeks back; with 0, the one that began last.
    """
    match unit:
        case "day":
            first, length = today - timedelta(days=count), 1
        case "week":
            first, length = today - timedelta(days=today.weekday() + 7 * count), 7
        case "weekend":  # on a Monday, "last weekend" was yesterday
            since_saturday = (today.weekday() - 5) % 7 if count == 0 else today.weekday() - 5 + 7 * count
            first, length = today - timedelta(days=since_saturday), 2
        case "month":
            months = today.year * 12 + today.month - 1 - count
            first = date(months // 12, months % 12 + 1, 1)
            return first, (first + timedelta(days=31)).replace(day=1)
        case _:
            return date(today.year - count, 1, 1), date(today.year - count + 1, 1, 1)
    return first, first + timedelta(days=length)
