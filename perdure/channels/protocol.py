"""The channel protocol (a stand-in until the branch `chan` is merged)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event as Stop
from typing import Any, Protocol

Update = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reply goes."""

    chat: str
    thread: str | None = None
    message: str | None = None
    group: bool = False
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Sender:
    """Who did something."""

    external_id: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Said:
    place: Place
    sender: Sender
    message_id: str
    text: str
    if_known: bool = False


@dataclass(frozen=True, slots=True)
class Edited:
    place: Place
    sender: Sender
    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Deleted:
    place: Place
    sender: Sender | None
    message_id: str


@dataclass(frozen=True, slots=True)
class Pressed:
    place: Place
    sender: Sender
    token: str


@dataclass(frozen=True, slots=True)
class Commanded:
    place: Place
    sender: Sender
    message_id: str
    command: str
    argument: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    place: Place
    sender: Sender
    message_id: str
    what: str


Event = Said | Edited | Deleted | Pressed | Commanded | Unsupported


@dataclass(frozen=True, slots=True)
class Button:
    label: str
    token: str


@dataclass(frozen=True, slots=True)
class Received:
    updates: Sequence[Update]
    answer: Mapping[str, Any] | None = None


class Channel(Protocol):
    name: str
    most_chars: int

    def verify(self, headers: Mapping[str, str], body: bytes) -> None: ...
    def receive(self, headers: Mapping[str, str], body: bytes) -> Received: ...
    def parse(self, update: Update) -> list[Event]: ...
    def send(self, place: Place, text: str, buttons: Sequence[Button], key: str) -> None: ...
    def typing(self, place: Place) -> None: ...
    def listen(self, on_update: Callable[[Update], None], stop: Stop) -> None: ...
