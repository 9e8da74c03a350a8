"""Plain functions over text from outside, each linear in its length; for what needs no pattern."""

from __future__ import annotations

import unicodedata
from typing import Literal

_MOST_MARKS = 30
_JOINER = "\N{COMBINING GRAPHEME JOINER}"


def words(text: str) -> list[str]:
    r"""The runs of letters, digits and `_` in `text`: what `\w+` finds."""
    return "".join([each if each.isalnum() or each == "_" else " " for each in text]).split()


def normalized(form: Literal["NFKC", "NFKD"], text: str) -> str:
    """`text` in a Unicode normal form. One character may become 18.

    `unicodedata.normalize` sorts the marks that follow a letter, in time quadratic in their number. So no more than 30
    follow one another here: a grapheme joiner is put behind them, as Unicode's Stream-Safe Text Format does (UAX #15).
    """
    if text.isascii():
        return text
    return unicodedata.normalize(form, _stream_safe(text))


def has_hangul(text: str) -> bool:
    """Whether a Korean syllable is in `text`."""
    return not text.isascii() and any("\uac00" <= each <= "\ud7a3" for each in text)


def is_hangul(text: str) -> bool:
    """Whether `text` is made of Korean syllables alone."""
    return bool(text) and all("\uac00" <= each <= "\ud7a3" for each in text)


def _stream_safe(text: str) -> str:
    run = 0
    safe: list[str] = []
    for each in text:
        run = run + 1 if unicodedata.combining(each) else 0
        if run > _MOST_MARKS:
            safe.append(_JOINER)
            run = 1
        safe.append(each)
    return "".join(safe)
