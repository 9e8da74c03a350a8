"""Functions over untrusted text that use no regular expressions. Each takes time linear in the text's length."""

from __future__ import annotations

import unicodedata
from typing import Literal

_MOST_MARKS = 30
_JOINER = "\N{COMBINING GRAPHEME JOINER}"


def words(text: str) -> list[str]:
    r"""The runs of letters, digits and `_` in `text`: the matches of `\w+`."""
    return "".join([each if each.isalnum() or each == "_" else " " for each in text]).split()


def normalized(form: Literal["NFKC", "NFKD"], text: str) -> str:
    """`text` in a Unicode normal form. One character may become 18 characters.

    `unicodedata.normalize` sorts the combining marks of a letter in time quadratic in the number of marks. Inserting a
    grapheme joiner after every 30 marks bounds this time, as in Unicode's Stream-Safe Text Format (UAX #15).
    """
    if text.isascii():
        return text
    return unicodedata.normalize(form, _stream_safe(text))


def has_hangul(text: str) -> bool:
    return not text.isascii() and any("\uac00" <= each <= "\ud7a3" for each in text)


def is_hangul(text: str) -> bool:
    return bool(text) and all("\uac00" <= each <= "\ud7a3" for each in text)


def _stream_safe(text: str) -> str:
    if not any(map(unicodedata.combining, text[::_MOST_MARKS])):  # a longer run would have one of these characters
        return text
    run = 0
    safe: list[str] = []
    for each in text:
        run = run + 1 if unicodedata.combining(each) else 0
        if run > _MOST_MARKS:
            safe.append(_JOINER)
            run = 1
        safe.append(each)
    return "".join(safe)
