"""Tool names and call ids in the forms that providers accept.

In perdure a tool may be named `weather:forecast`, and a call keeps the model's id. Providers accept letters, digits,
`_` and `-` only, and refuse a prompt with an invalid name or a repeated id. So requests are translated, and names in
replies are translated back. The translation is deterministic, because providers cache prompts by their prefix.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping

MAX_NAME = 64
MAX_ID = 40

_ALLOWED_CHARACTERS = frozenset(f"{string.ascii_letters}{string.digits}_-")
_ROOM_FOR_A_NUMBER = 8


class WireNames:
    """Maps the names of a request's tools to names that the provider accepts, and back."""

    def __init__(self, tools: Iterable[str] = ()) -> None:
        # Names that need no translation come first, so that they stay unchanged.
        ordered = sorted(dict.fromkeys(tools), key=lambda name: sanitized(name) != name)
        used: set[str] = set()
        self._wire = {name: make_unique(sanitized(name), used, MAX_NAME) for name in ordered}
        self._by_wire_name = {wire: name for name, wire in self._wire.items()}

    def to_wire(self, name: str) -> str:
        """The provider's form of the tool name `name`.

        The request need not contain the tool: it may be a former tool, or one that a model invented.
        """
        return self._wire.get(name) or sanitized(name)

    def from_wire(self, wire: str) -> str:
        """The name of the tool that the provider calls `wire`; `wire` itself if there is no such tool."""
        return self._by_wire_name.get(wire, wire)


def sanitized(name: str) -> str:
    """Replace each character of `name` that providers refuse by `_`. Also cuts the name to `MAX_NAME` characters."""
    return _replace_characters(name[:MAX_NAME]) or "unknown"


def _replace_characters(text: str) -> str:
    return "".join([each if each in _ALLOWED_CHARACTERS else "_" for each in text])


def make_unique(wanted: str, used: set[str], longest: int = MAX_ID) -> str:
    """Make `wanted` unique: if it is in `used`, append a number. Adds the result to `used`.

    The result has at most `longest` characters.
    """
    unique = wanted[:longest] or "call"
    number = 1
    while unique in used:
        number += 1
        unique = f"{(wanted or 'call')[: longest - _ROOM_FOR_A_NUMBER]}_{number}"
    used.add(unique)
    return unique


class WireIds:
    """Call ids that are unique in one prompt.

    A provider may use a call id in two replies, but refuses a prompt with a repeated id. A result belongs to the latest
    message with calls.
    """

    def __init__(self, *, translate: bool) -> None:
        """With `translate`, `assign` replaces the characters that the provider does not allow in ids."""
        self._translate = translate
        self._used: set[str] = set()
        self._assigned: Mapping[str, str] = {}

    def assign(self, ids: Iterable[str]) -> Mapping[str, str]:
        """Assign the provider's ids to the calls of one message; returns a map from perdure's ids to the provider's."""
        self._assigned = {each: make_unique(self._sanitized(each), self._used) for each in ids}
        return self._assigned

    def of_result(self, call_id: str) -> str:
        """The provider's id of the call that a result belongs to. `call_id` is perdure's id of that call."""
        return self._assigned.get(call_id, call_id)

    def _sanitized(self, call_id: str) -> str:
        return _replace_characters(call_id) if self._translate else call_id
