"""A tool's docstring as its author writes it (Google style), taken apart for the model."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from perdure.text.patterns import SPACE, WORD, compiled

_SECTION = compiled(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|See Also|Todo|Attributes):"
    rf"[{SPACE}]*"
)
_ARGUMENTS = frozenset({"Args", "Arguments", "Parameters"})
_ENTRY = compiled(rf"\*{{0,2}}([{WORD}]+)[{SPACE}]*(?:\([^)]*\))?[{SPACE}]*:[{SPACE}]*(.*)")


class Described(NamedTuple):
    """What a docstring says: of the function, and of each argument by name."""

    description: str
    arguments: dict[str, str]


def describe(docstring: str | None) -> Described:
    """Take `docstring` apart; sections other than the arguments' are for people and left out."""
    description: list[str] = []
    arguments: list[str] = []
    current: list[str] | None = description
    for line in inspect.cleandoc(docstring or "").splitlines():
        if section := _SECTION.fullmatch(line):
            current = arguments if section[1] in _ARGUMENTS else None
        elif current is not None:
            current.append(line)
    return Described("\n".join(description).strip(), _entries(arguments))


def _entries(lines: list[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    name = ""
    margin = min((_indent(line) for line in lines if line.strip()), default=0)
    for line in lines:
        entry = _ENTRY.fullmatch(line.strip()) if _indent(line) == margin else None
        if entry:
            name = entry[1]
            found[name] = [entry[2]]
        elif name and line.strip():
            found[name].append(line.strip())
    return {name: " ".join(parts).strip() for name, parts in found.items()}


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
