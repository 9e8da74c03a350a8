r"""Regular expressions for untrusted text, matched in time linear in the text's length (RE2).

Python's `re` backtracks: a sender who knows a pattern can write a text that takes minutes to match. During these
minutes, `re` holds the interpreter's lock. A repository test checks that no module imports `re` for untrusted text.
`compiled` registers each pattern, and another test runs all registered patterns over hostile texts.

Differences from `re`: RE2 has no lookaround and no backreferences. `\b`, `\d`, `\s` and `\w` are limited to ASCII;
`WORD`, `SPACE`, `STARTS` and `ENDS` cover Unicode. `$` matches only at the end of the text, not before a final newline.

One search takes linear time. `finditer`, `findall` and `sub` search again after each match. Their time is linear only
if the pattern does not read far beyond the end of each match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Protocol

import re2

WORD = r"\pL\pN_"
r"""The Unicode characters of `\w`, for use in a character class: `[…]`."""

SPACE = r"\s\x0b\x1c-\x1f\x85\p{Z}"
r"""The Unicode characters of `\s`, for use in a character class: `[…]`."""

STARTS = rf"(?:^|[^{WORD}])"
r"""Matches the beginning of the text, or the character before a word.

Unlike `\b`, it consumes this character: put the word into a group.
"""

ENDS = rf"(?:$|[^{WORD}])"
r"""Matches the end of the text, or the character after a word. Unlike `\b`, it consumes this character."""

_MAX_MEMORY = 2**21
"""Maximum bytes of memory for one pattern and its caches. With full caches, matching is slower but still linear."""

_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)


class Match(Protocol):
    """A match. A group that did not participate is `None`."""

    def __getitem__(self, group: int | str, /) -> Any: ...

    def start(self, group: int = 0, /) -> int: ...

    def end(self, group: int = 0, /) -> int: ...

    def groups(self) -> tuple[str | None, ...]: ...


class Pattern:
    """A pattern, compiled on first use. Threads may share it."""

    def __init__(self, source: str, *, ignore_case: bool = False) -> None:
        self.source = source
        self._ignore_case = ignore_case

    @cached_property
    def _compiled(self) -> Any:
        options = re2.Options()
        options.max_mem = _MAX_MEMORY
        options.log_errors = False
        options.case_sensitive = not self._ignore_case
        return re2.compile(self.source, options)

    def search(self, text: str) -> Match | None:
        found: Match | None = self._compiled.search(_encodable(text))
        return found

    def match(self, text: str) -> Match | None:
        found: Match | None = self._compiled.match(_encodable(text))
        return found

    def fullmatch(self, text: str) -> Match | None:
        found: Match | None = self._compiled.fullmatch(_encodable(text))
        return found

    def finditer(self, text: str) -> Iterator[Match]:
        """The non-overlapping matches, from left to right."""
        found: Iterator[Match] = self._compiled.finditer(_encodable(text))
        return found

    def findall(self, text: str) -> list[str]:
        return [text[found.start() : found.end()] for found in self.finditer(text)]

    def sub(self, replaced: Callable[[Match], str], text: str) -> str:
        """`text` with each match replaced by the result of `replaced`."""
        pieces: list[str] = []
        end = 0
        for found in self.finditer(text):
            pieces += [text[end : found.start()], replaced(found)]
            end = found.end()
        return "".join([*pieces, text[end:]])


REGISTERED: list[Pattern] = []
"""Every pattern of the modules imported so far."""


def compiled(source: str, *, ignore_case: bool = False) -> Pattern:
    """Register a pattern. Call this function when a module is imported, not for each text.

    A test compiles all registered patterns: RE2 may not support the syntax, or the pattern may need too much memory.
    """
    pattern = Pattern(source, ignore_case=ignore_case)
    REGISTERED.append(pattern)
    return pattern


def _encodable(text: str) -> str:
    """`text` with each lone surrogate, which UTF-8 cannot encode, replaced by U+FFFD. Positions stay the same."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.translate(_SURROGATES)
    return text
