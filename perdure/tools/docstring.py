"""Splits a tool's docstring (Google, NumPy or Sphinx style) into the descriptions of the tool and its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

from docstring_parser import Docstring, DocstringStyle, ParseError, google, numpydoc, rest
from docstring_parser.common import DocstringMeta

# Sections that are not sent to models. The parser does not know them, and would append them to the previous section.
_LEFT_OUT = ("Note", "Notes", "Warning", "Warnings", "See Also", "Todo")

_GOOGLE = google.GoogleParser(
    [*google.DEFAULT_SECTIONS, *(google.Section(title, "notes", google.SectionType.SINGULAR) for title in _LEFT_OUT)]
)
_PARSERS = (_GOOGLE.parse, numpydoc.parse, rest.parse)


class Described(NamedTuple):
    """The description of a function, and the descriptions of its parameters by name."""

    description: str
    arguments: dict[str, str]


def describe(docstring: str | None) -> Described:
    """Split `docstring` by the style that recognises the most parts. Drops all sections but the parameters."""
    text = inspect.cleandoc(docstring or "").strip()
    best = max((_parsed(parser, text) for parser in _PARSERS), key=_recognised)
    arguments = {
        name.strip().lstrip("*"): " ".join((parameter.description or "").split())
        for parameter in best.params
        for name in parameter.arg_name.split(",")
    }
    description = (best.description or "").strip() if any(_recognised(best)) else text
    return Described(description, {name: text for name, text in arguments.items() if text})


def _parsed(parser: Callable[[str], Docstring], text: str) -> Docstring:
    try:
        return parser(text)
    except ParseError:
        return Docstring()


def _recognised(docstring: Docstring) -> tuple[int, int]:
    """The number of entries (parameters, results and errors) and the number of other sections that a style recognised.

    The Sphinx parser takes every line that begins with a colon, even a smiley, as a section. For that style, the
    number of sections is therefore 0.
    """
    entries = sum(type(each) is not DocstringMeta for each in docstring.meta)
    return entries, 0 if docstring.style is DocstringStyle.REST else len(docstring.meta) - entries
