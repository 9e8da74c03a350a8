"""Finds JSON in the text of a model that was asked for nothing but JSON, and wrote prose or code fences around it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from perdure.text.patterns import compiled
from perdure.text.untrusted import load_value

_OPENING = compiled(r"[\[{]")
_BEGINNING = compiled(
    r"\{\s*[\"']|\[[\s\[]*(?:[-0-9{\"']|(?:true|false|null|True|False|None|NaN|Infinity)\b)|\[\s*\[[\s\[]*\]"
)
"""How JSON with members begins, also with Python's names and single quotes. A bracket of prose, as in `{name}` or
`[see below]`, begins otherwise."""
_NESTING = compiled(r"\"(?:[^\"\\]|\\[\s\S])*\"?|[\[\]{}]")
"""A string, which may lack its end, or a bracket outside strings."""
_MOST_NESTING = 10_000
"""The most strings and brackets that are read to find the end of broken JSON. If it has more, it is the text's rest."""
_FENCE = "```"
_MOST_FAILURES = 20
"""The most brackets that begin no JSON before the search ends. Each may cost reading the rest of the text."""


def values_in(text: str) -> Iterator[Any]:
    """The outermost JSON objects and arrays in `text`, in order. Those that are not strictly valid are left out.

    What is inside JSON that was cut off, or that is not strictly valid, is left out, too: it is a part of a value.
    """
    failures, end = 0, 0
    for opening in _OPENING.finditer(text):
        if opening.start() < end:
            continue
        try:
            value, end = load_value(text, opening.start())
        except ValueError:
            failures += 1
            rest = text[opening.start() :]
            if begins_json(rest):
                end = opening.start() + _length(rest)
            if failures == _MOST_FAILURES or end == len(text):
                return
        else:
            yield value


def begins_json(text: str) -> bool:
    """Whether `text` begins like a JSON object or array. It may be cut off, or not be valid."""
    return _BEGINNING.match(text) is not None


def _length(text: str) -> int:
    """The number of characters from the bracket with which `text` begins to the end of what it encloses."""
    depth = 0
    for found in islice(_NESTING.finditer(text), _MOST_NESTING):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(text[found.start()], 0)
        if depth == 0:
            return found.end()
    return len(text)


def without_fence(text: str) -> str:
    # Not a regular expression: backtracking over blanks takes hours for a reply of megabytes.
    if len(text) < 2 * len(_FENCE) or not (text.startswith(_FENCE) and text.endswith(_FENCE)):
        return text
    return text.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json").strip()
