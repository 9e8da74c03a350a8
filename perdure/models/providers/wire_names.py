"""Tool names, call ids and keys of arguments in the forms that providers accept.

In perdure, a tool may have a name such as `weather:forecast`, and a call keeps the id that the model gave it. Providers
accept only letters, digits, `_` and `-`, and refuse a prompt with an invalid name or a repeated id. Names and ids are
therefore translated in requests, and names in replies are translated back. The translation is deterministic, because
providers cache prompts by their prefix.

Anthropic refuses a prompt with a tool whose arguments have keys such as `filter[name]`. A tool translates them in the
schema that is sent, and back in the arguments of its calls (`WireKeys`).
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.models.schemas import applied, keys_in, of_items, of_member, with_keys

MAX_NAME = 64
MAX_ID = 40
MAX_KEY = 64

_ALNUM = frozenset(string.ascii_letters + string.digits)
_ALLOWED_CHARACTERS = _ALNUM | {"_", "-"}
_ALLOWED_IN_KEYS = _ALLOWED_CHARACTERS | {"."}
_ROOM_FOR_A_NUMBER = 8


class WireNames:
    """Maps the names of a request's tools to names that the provider accepts, and back."""

    def __init__(self, tools: Iterable[str] = ()) -> None:
        # Names that need no translation come first, so that they stay unchanged.
        ordered = sorted(dict.fromkeys(tools), key=lambda name: sanitized(name) != name)
        used: set[str] = set()
        self._wire = {name: make_unique(sanitized(name), used, MAX_NAME) for name in ordered}
        self._by_wire_name = {wire: name for name, wire in self._wire.items()}

    def __contains__(self, wire: str) -> bool:
        """Whether a tool of the request has the provider's name `wire`."""
        return wire in self._by_wire_name

    def to_wire(self, name: str) -> str:
        """The provider's form of the tool name `name`.

        Also accepts the name of a tool that is not in the request. Such a tool was removed, or a model invented its
        name.
        """
        return self._wire.get(name) or sanitized(name)

    def from_wire(self, wire: str) -> str:
        """Perdure's form of the tool name `wire`; `wire` itself if no tool has that name.

        Servers may leave tokens of a model's template in the name, and models may put its namespace before it.

        >>> WireNames(["clock"]).from_wire("functions.clock<|channel|>commentary")
        'clock'
        """
        bare = wire.partition("<|")[0].strip().removeprefix("functions.")
        return self._by_wire_name.get(wire) or self._by_wire_name.get(bare, wire)


def sanitized(name: str) -> str:
    return _replace_characters(name[:MAX_NAME]) or "unknown"


def _replace_characters(text: str) -> str:
    return "".join([each if each in _ALLOWED_CHARACTERS else "_" for each in text])


def make_unique(wanted: str, used: set[str], longest: int = MAX_ID) -> str:
    """Return `wanted`, with a number appended if `used` contains it.

    The result has at most `longest` characters. Adds the result to `used`.
    """
    unique = wanted[:longest] or "call"
    number = 1
    while unique in used:
        number += 1
        unique = f"{(wanted or 'call')[: longest - _ROOM_FOR_A_NUMBER]}_{number}"
    used.add(unique)
    return unique


@dataclass(frozen=True, slots=True)
class IdForm:
    """The call ids that a server accepts: at most `longest` of the characters `allowed`, or exactly as many."""

    longest: int = MAX_ID
    allowed: frozenset[str] | None = None
    exact: bool = False

    def accepts(self, call_id: str) -> bool:
        fits = len(call_id) == self.longest if self.exact else 0 < len(call_id) <= self.longest
        return fits and (self.allowed is None or self.allowed.issuperset(call_id))

    def unique(self, call_id: str, used: set[str]) -> str:
        """An id of this form for `call_id` that is not in `used`. Adds it to `used`."""
        if not self.exact:
            return make_unique(call_id if self.allowed is None else _replace_characters(call_id), used, self.longest)
        number, unique = 1, call_id
        while unique in used or not self.accepts(unique):
            unique = hashlib.sha256(f"{number}:{call_id}".encode(errors="replace")).hexdigest()[: self.longest]
            number += 1
        used.add(unique)
        return unique


ANY_CHARACTERS = IdForm()
PLAIN_CHARACTERS = IdForm(allowed=_ALLOWED_CHARACTERS)
NINE_CHARACTERS = IdForm(9, _ALNUM, exact=True)
"""The form of Mistral, and of the chat templates of its models."""


class WireIds:
    """Maps perdure's call ids to ids that are unique within one prompt.

    A provider may give the same id to calls of two replies, but refuses a prompt with a repeated id. In a prompt, a
    tool result belongs to the nearest earlier call with its id.
    """

    def __init__(self, form: IdForm) -> None:
        self._form = form
        self._used: set[str] = set()
        self._assigned: dict[str, str] = {}

    def assign(self, call_id: str, own: str = "") -> str:
        """The provider's id of a call. `own` is the id that the same server gave to it; it stays unless it repeats."""
        wire_id = own if own and own not in self._used else self._form.unique(call_id, self._used)
        self._used.add(wire_id)
        self._assigned[call_id] = wire_id
        return wire_id

    def of_result(self, call_id: str | None) -> str:
        return self._assigned.get(call_id or "", call_id or "")


class WireKeys:
    """Maps the keys of a tool's arguments to keys that the provider accepts, and back.

    `schema` is the tool's schema with these keys. A key has one translation in all objects of the schema, and no two
    keys have the same.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        keys = dict.fromkeys(keys_in(schema))
        used = {key for key in keys if _is_accepted(key)}
        wire = {key: make_unique(sanitized(key), used, MAX_KEY) for key in keys if not _is_accepted(key)}
        self._given = schema
        self._by_wire_key = {translated: key for key, translated in wire.items()}
        self.schema: Mapping[str, Any] = with_keys(schema, wire) if wire else schema

    def from_wire(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the tool's own keys. Keys that the schema does not name in their place stay.

        Raises:
            ValueError: an object has a key both in its own form and in the provider's.
        """
        if not self._by_wire_key:
            return arguments
        found: dict[str, Any] = self._own(arguments, [self._given])
        return found

    def _own(self, value: Any, schemas: list[Any]) -> Any:
        if not schemas or not isinstance(value, dict | list):
            return value
        given = applied(schemas, self._given)
        if isinstance(value, list):
            items = of_items(given)
            return [self._own(each, items) for each in value]
        known = {key for each in given if isinstance(named := each.get("properties"), Mapping) for key in named}
        found: dict[str, Any] = {}
        members: dict[str, Any] = value
        for wire, each in members.items():
            own = self._by_wire_key.get(wire, wire)
            key = own if own in known else wire
            if key in found:
                raise ValueError(f"the key {key!r} appears twice")
            found[key] = self._own(each, of_member(given, key))
        return found


def _is_accepted(key: str) -> bool:
    return 0 < len(key) <= MAX_KEY and _ALLOWED_IN_KEYS.issuperset(key)
