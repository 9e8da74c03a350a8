"""Finds JSON in the text of a model that was asked for nothing but JSON, and wrote prose or code fences around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perdure.text.patterns import compiled
from perdure.text.untrusted import load_value

_OPENING = compiled(r"[\[{]")
_FENCE = "```"
_MOST_FAILURES = 20
"""The most brackets that begin no JSON before the search ends. Each may cost reading the rest of the text."""


def values_in(text: str) -> Iterator[Any]:
    """The outermost JSON objects and arrays in `text`, in order. Those that are not strictly valid are left out."""
    failures, end = 0, 0
    for opening in _OPENING.finditer(text):
        if opening.start() < end:
            continue
        try:
            value, end = load_value(text, opening.start())
        except ValueError:
            failures += 1
            if failures == _MOST_FAILURES:
                return
        else:
            yield value


def without_fence(text: str) -> str:
    # Not a regular expression: backtracking over blanks takes hours for a reply of megabytes.
    if len(text) < 2 * len(_FENCE) or not (text.startswith(_FENCE) and text.endswith(_FENCE)):
        return text
    return text.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json").strip()
