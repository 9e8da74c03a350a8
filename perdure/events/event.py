"""Ids and kinds of events, and the Redis channels that announce them.

The id of an event is `EPOCH-N`. EPOCH is the number of messages that the turn had committed when the event was written.
`k-0` is the id of the turn's k-th committed message. `k-N` with N above 0 is the id of a provisional event of epoch k.

A worker derives N from its fencing token. Redis therefore refuses the events of a worker that has lost the session to
another worker. The ids keep increasing even if Redis loses the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Self
from uuid import UUID

from perdure.errors import InvalidRequest

PER_TOKEN = 1_000_000_000
"""Each fencing token has this many event numbers, from `token * PER_TOKEN` up."""

_EPOCH_DIGITS, _NUMBER_DIGITS = 9, 19


class EventKind(StrEnum):
    """The kinds of events that a client receives."""

    STATE = "state"
    DELTA = "delta"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    PROGRESS = "progress"
    APPROVAL_REQUIRED = "approval_required"
    APPROVAL_DECIDED = "approval_decided"
    REWIND = "rewind"
    MESSAGE = "message"
    ERROR = "error"
    DONE = "done"


COMMITTED = "committed"
"""The kind of the stream entry `k-0`: message k is committed. Gateways then read the message from PostgreSQL."""


@dataclass(frozen=True, slots=True, order=True)
class EventId:
    """The id of an event; `token` is the fencing token of the worker that wrote the event."""

    PATTERN: ClassVar = f"^(0|[1-9][0-9]{{0,{_EPOCH_DIGITS - 1}}})-(0|[1-9][0-9]{{0,{_NUMBER_DIGITS - 1}}})$"
    """The regular expression of an id, for JSON Schema."""

    epoch: int
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an id that a client sends.

        Raises:
            InvalidRequest: `text` is not an id.
        """
        epoch, _, number = text.partition("-")
        if not (_is_number(epoch, _EPOCH_DIGITS) and _is_number(number, _NUMBER_DIGITS)):
            raise InvalidRequest("Last-Event-ID: must be the id of an event of this turn, such as 1-0.")
        return cls(int(epoch), int(number))

    @property
    def token(self) -> int:
        """The fencing token of a provisional event."""
        return self.number // PER_TOKEN

    def __str__(self) -> str:
        return f"{self.epoch}-{self.number}"


@dataclass(frozen=True, slots=True)
class Event:
    """One event as a client receives it."""

    id: EventId
    kind: EventKind
    data: Mapping[str, Any] = field(default_factory=dict)


def rewind_to(epoch: int) -> dict[str, str]:
    """The data of a `rewind` event, which makes clients discard the provisional events of `epoch`."""
    return {"from": str(EventId(epoch, 1))}


def news_channel(prefix: str) -> str:
    """The pub/sub channel that announces which turns have new events or a new state, and which turns were settled.

    A turn is settled when it is done, failed or cancelled. A message consists of a letter (`e`: new events, `c`: a new
    state, `s`: settled) and turn ids in hexadecimal, separated by spaces.
    """
    return f"{prefix}events"


def listening_key(prefix: str) -> str:
    """The key of a sorted set: the turns that have a listener. A listener is a client that follows the turn.

    The score is the Unix time in seconds until which the turn counts as having a listener. The pub/sub channel of the
    same name announces each turn that is added to the set or gets a new score.
    """
    return f"{prefix}listening"


def hexes(turn_ids: list[UUID]) -> str:
    """Turn ids in hexadecimal, separated by spaces, as the channels' messages contain them."""
    return " ".join(each.hex for each in turn_ids)


def parse_hexes(text: bytes) -> list[UUID]:
    """The turn ids in a channel's message. Skips invalid ids."""
    found = []
    for each in text.split():
        try:
            found.append(UUID(each.decode("ascii")))
        except ValueError:
            continue
    return found


def _is_number(text: str, digits: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= digits and (text == "0" or text[0] != "0")
