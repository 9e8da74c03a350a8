"""Finds the numbers in a text (digits, dates, English and Korean number words), each in one canonical spelling.

Called by `contradiction`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator

from perdure.text import linear
from perdure.text.linear import has_hangul, is_hangul
from perdure.text.patterns import SPACE, compiled
from perdure.text.words import word_list

_DIGITS = compiled(r"\p{Nd}+(?:[.,:/-]\p{Nd}+)*")
_THOUSANDS = compiled(r"\p{Nd}{1,3}(?:,\p{Nd}{3})+(?:\.\p{Nd}+)?")
_DECIMAL = compiled(r"\p{Nd}+(?:\.\p{Nd}+)?")
_SCALED = compiled(rf"(\p{{Nd}}[\p{{Nd}},]*(?:\.\p{{Nd}}+)?)[{SPACE}]?(천만|백만|천|만|억|조)")
_SCALES = {"천": 3, "만": 4, "백만": 6, "천만": 7, "억": 8, "조": 12}
"""The exponent of ten of each Korean unit, such as 3 for 천 (1,000)."""

ENGLISH_NUMBERS = {
    word: number
    for number, word in enumerate(
        word_list(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen twenty"
        )
    )
    if word != "one"  # usually a pronoun: "this one"
} | {"thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
ENGLISH_NUMBERS |= {
    word: number
    for number, word in enumerate(word_list("second third fourth fifth sixth seventh eighth ninth tenth"), start=2)
} | {"twice": 2, "thrice": 3, "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}
_FRACTIONS = {"half": "1/2", "quarter": "1/4"}
_KOREAN_NUMBERS = {
    "한": 1, "두": 2, "세": 3, "네": 4, "다섯": 5, "여섯": 6, "일곱": 7, "여덟": 8, "아홉": 9,
}  # fmt: skip
_KOREAN_TENS = {
    "열": 10, "스물": 20, "스무": 20, "서른": 30, "마흔": 40, "쉰": 50, "예순": 60, "일흔": 70, "여든": 80, "아흔": 90,
}  # fmt: skip
_KOREAN_COUNTERS = (
    "개", "번", "명", "시간", "시", "달", "살", "주", "배", "가지", "마리", "장", "잔", "병", "권", "대", "분",
)  # fmt: skip
_AFTER_KOREAN_COUNTERS = ("이에요", "이었", "이라", "이고", "입니다", "정도", "이상", "이하")
_LONGEST_AFTER_COUNTER = 3
_HANGUL_RUN = compiled("[\uac00-\ud7a3]+")


def numbers_in(text: str) -> Iterator[str]:
    """Each number in one spelling: 1,000 and 1천 are 1000, "two" is 2. Dates and versions keep their spelling."""
    digits, hangul = any(map(str.isdecimal, text)), has_hangul(text)
    if digits and hangul:
        for found in _SCALED.finditer(text):
            yield _canonical(found[1], _SCALES[found[2]])
        text = _SCALED.sub(lambda _: " ", text)
    if digits:
        for number in _DIGITS.findall(text):
            yield _canonical(number) if _DECIMAL.fullmatch(number) or _THOUSANDS.fullmatch(number) else number
    for word in map(str.lower, linear.words(text)):
        if word in ENGLISH_NUMBERS or word in _FRACTIONS:
            yield _FRACTIONS.get(word) or str(ENGLISH_NUMBERS[word])
    if hangul:
        yield from _korean_numbers(text)


def _canonical(number: str, scale: int = 0) -> str:
    """`number` times 10 to the power of `scale`, without separators and superfluous zeros.

    Works on the digits, because different numbers of more than 15 digits may be equal as floats.
    """
    if not number.isascii():
        number = "".join(str(unicodedata.decimal(each, each)) for each in number)
    whole, _, fraction = number.replace(",", "").partition(".")
    fraction = fraction.ljust(scale, "0")
    whole, fraction = (whole + fraction[:scale]).lstrip("0") or "0", fraction[scale:].rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole


def _korean_numbers(text: str) -> Iterator[str]:
    """Native Korean numbers before a counter, such as 두 번 or 열한 시."""
    end = 0
    for run in _HANGUL_RUN.finditer(text):
        if run.start() >= end and (counted := _counted_number(text, run.start())) is not None:
            number, end = counted
            if number:
                yield str(number)


def _counted_number(text: str, start: int) -> tuple[int, int] | None:
    """The number at `start`, and the position after its counter; `None` if there is no counter.

    The number is 0 if no number precedes the counter.
    """
    for tens in _prefixes(text, start, _KOREAN_TENS):
        for ones in _prefixes(text, start + len(tens), _KOREAN_NUMBERS):
            at = start + len(tens) + len(ones)
            for counter in (at + 1, at) if text[at : at + 1].isspace() else (at,):
                if (end := _counter_end(text, counter)) is not None:
                    return _KOREAN_TENS.get(tens, 0) + _KOREAN_NUMBERS.get(ones, 0), end
    return None


def _prefixes(text: str, start: int, words: Collection[str]) -> Iterator[str]:
    """Yield each of `words` that `text` contains at `start`, then the empty string."""
    if text.startswith(tuple(words), start):
        yield from (word for word in words if text.startswith(word, start))
    yield ""


def _counter_end(text: str, start: int) -> int | None:
    """The position after the counter at `start`; `None` if there is no counter, or if a longer word begins with it."""
    if not text.startswith(_KOREAN_COUNTERS, start):
        return None
    for counter in _KOREAN_COUNTERS:
        end = start + len(counter)
        after = text[end : end + _LONGEST_AFTER_COUNTER]
        longer = len(after) == _LONGEST_AFTER_COUNTER and is_hangul(after)
        if text.startswith(counter, start) and (after.startswith(_AFTER_KOREAN_COUNTERS) or not longer):
            return end
    return None
