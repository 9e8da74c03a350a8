"""Names and ids as providers accept them.

The engine calls a tool `weather:forecast` and keeps whatever call id a model gave. Providers
accept letters, digits, `_` and `-`, and refuse a whole prompt over one name or one id used
twice. So both are translated on the way out, always in the same way (providers cache a
prompt by its beginning), and names back on the way in.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping

MAX_NAME = 64
MAX_ID = 40

_ALLOWED_CHARACTERS = frozenset(f"{string.ascii_letters}{string.digits}_-")
_ROOM_FOR_A_NUMBER = 8


class WireNames:
    """The tools of one request by the names that the provider gets to see."""

    def __init__(self, tools: Iterable[str] = ()) -> None:
        # A name that needs no translation keeps it, whatever stands before it.
        ordered = sorted(dict.fromkeys(tools), key=lambda name: sanitized(name) != name)
        used: set[str] = set()
        self._wire = {name: make_unique(sanitized(name), used, MAX_NAME) for name in ordered}
        self._by_wire_name = {wire: name for name, wire in self._wire.items()}

    def to_wire(self, name: str) -> str:
        """The provider's name for `name`: a tool of the request, one of an earlier day, or one that a model made up."""
        return self._wire.get(name) or sanitized(name)

    def from_wire(self, wire: str) -> str:
        """The tool that the provider means by `wire`; as it came, if there is none."""
        return self._by_wire_name.get(wire, wire)


def sanitized(name: str) -> str:
    """`name` with what no provider accepts replaced."""
    return _replace_characters(name[:MAX_NAME]) or "unknown"


def _replace_characters(text: str) -> str:
    return "".join([each if each in _ALLOWED_CHARACTERS else "_" for each in text])


def make_unique(wanted: str, used: set[str], longest: int = MAX_ID) -> str:
    """`wanted`, or something like it that is not in `used` yet; adds it there."""
    made = wanted[:longest] or "call"
    number = 1
    while made in used:
        number += 1
        made = f"{(wanted or 'call')[: longest - _ROOM_FOR_A_NUMBER]}_{number}"
    used.add(made)
    return made


class WireIds:
    """Call ids that are unique over a whole prompt; made anew for each.

    A provider may give the same call id in two replies, and refuses a prompt that holds it
    twice. A result belongs to the newest message that asked for calls.
    """

    def __init__(self, *, translate: bool) -> None:
        """`translate`: whether the provider is particular about an id's characters, too."""
        self._translate = translate
        self._used: set[str] = set()
        self._assigned: Mapping[str, str] = {}

    def assign(self, ids: Iterable[str]) -> Mapping[str, str]:
        """The calls of one message: the provider's id for each of ours."""
        self._assigned = {each: make_unique(self._sanitized(each), self._used) for each in ids}
        return self._assigned

    def of_result(self, call_id: str) -> str:
        """The provider's id of the call that a result answers."""
        return self._assigned.get(call_id, call_id)

    def _sanitized(self, call_id: str) -> str:
        return _replace_characters(call_id) if self._translate else call_id
