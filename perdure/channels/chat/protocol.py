"""The channel protocol: what a chat service reports, where replies go, and what a channel does.

A channel is one module with one class. It verifies and parses what its service sends, and sends text to places. It
knows nothing of users, sessions and turns; `ingress` and `replies` do that for all channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event as Stop
from typing import Any, Protocol

from perdure.errors import Unavailable

Update = Mapping[str, Any]
"""One update of the service, parsed from JSON."""


class ChannelFailed(Unavailable):
    """The service cannot be reached, or refuses the channel's token. The caller tries again later."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an event happened, and where the reply goes. Stored with the turn, as JSON.

    Attributes:
        chat: The service's id of the chat.
        thread: The thread within the chat, if the reply goes into one.
        message: The service's id of the message or interaction.
        group: Several people read and write there.
        token: A credential to answer an interaction, if the service has given one.
    """

    chat: str
    thread: str | None = None
    message: str | None = None
    group: bool = False
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Sender:
    """The person behind an event: the service's id, and the name that others see there."""

    external_id: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """A message for the agent. `if_known`: only if the agent takes part in that conversation already."""

    place: Place
    sender: Sender
    message_id: str
    text: str
    if_known: bool = False


@dataclass(frozen=True, slots=True)
class Edited:
    """A message was edited; `text` is the new text."""

    place: Place
    sender: Sender
    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """A message was deleted. `sender`: its author; `None` if the service does not report the author."""

    place: Place
    sender: Sender | None
    message_id: str


@dataclass(frozen=True, slots=True)
class Pressed:
    """A button of a message was pressed; `token` is the button's."""

    place: Place
    sender: Sender
    token: str


@dataclass(frozen=True, slots=True)
class Commanded:
    """A command, in lower case and without the slash, and the rest of its line."""

    place: Place
    sender: Sender
    message_id: str
    command: str
    argument: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A message without text; `what` names its content, such as `a file`."""

    place: Place
    sender: Sender
    message_id: str
    what: str


@dataclass(frozen=True, slots=True)
class Typed:
    """The person types in a private chat."""

    place: Place
    sender: Sender


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection began without resuming a session: the service does not report earlier messages; see `missed`."""


Event = Said | Edited | Deleted | Pressed | Commanded | Unsupported | Typed | Connected


@dataclass(frozen=True, slots=True)
class Button:
    """A button under a message. A press reports its `token`, of at most 64 characters."""

    label: str
    token: str


@dataclass(frozen=True, slots=True)
class Received:
    """The updates of a webhook request, and the JSON response."""

    updates: Sequence[Update]
    answer: Mapping[str, Any] | None = None


class Channel(Protocol):
    """A chat service. Threads share it."""

    name: str
    """The channel's name, as in `channel` of a message."""

    most_chars: int
    """The longest text of one message."""

    typing_s: float
    """Seconds for which the service shows one `typing`; 0: it has no such indicator."""

    reads_history: bool
    """Whether `missed` finds messages; the ids of messages are then numbers that grow."""

    listens: bool
    """Whether `listen` has something to connect to."""

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:
        """Check that the service sent this webhook request recently; `headers` have names in lower case.

        Raises:
            Unauthorized: the check fails, or its secret is not configured.
        """
        ...

    def receive(self, headers: Mapping[str, str], body: bytes) -> Received:
        """The updates in a verified request, and its answer.

        Raises:
            InvalidRequest: the body is malformed.
        """
        ...

    def parse(self, update: Update) -> list[Event]:
        """The events of an update. Empty if none concerns the agent.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the update is malformed.
        """
        ...

    def send(self, place: Place, text: str, buttons: Sequence[Button], key: str) -> None:
        """Send one message of at most `most_chars`. `key` is the same at each attempt, and differs between messages.

        Raises:
            DeliveryFailed: the service has not confirmed it; `NotAsked` if it asks for a pause, `Undeliverable` if
                repeating does not help.
        """
        ...

    def mark(self, place: Place, text: str) -> None:
        """Replace the message of a pressed button, buttons included, by `text`.

        Raises:
            DeliveryFailed: as `send`.
        """
        ...

    def typing(self, place: Place) -> None:
        """Show for some seconds that a reply is being written, if the service can.

        Raises:
            DeliveryFailed: as `send`.
        """
        ...

    def listen(self, on_update: Callable[[Update], None], stop: Stop) -> None:
        """Pass the service's updates to `on_update`, in their order, until `stop`.

        Raises:
            ChannelFailed: the service cannot be reached, or refuses the token.
        """
        ...

    def missed(self, chat: str, after: str) -> Sequence[Update]:
        """The updates of messages in a chat after the message with the id `after`, oldest first; bounded.

        Called after `Connected` only. Empty if the chat is gone.

        Raises:
            DeliveryFailed: the service cannot be asked now.
        """
        ...

    def close(self) -> None:
        """Close the channel's connections."""
        ...
