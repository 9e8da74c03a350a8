"""The channel protocol: the events of a chat service, the places in its chats, and the methods of a channel.

A channel verifies and parses the updates of its service, and sends text to places. It has no access to users, sessions
or turns; `ingress` and `replies` handle these for all channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event as Stop
from typing import Any, Protocol

from perdure.errors import Unavailable

Update = Mapping[str, Any]
"""One update of the service, parsed from JSON."""

COMMANDS = frozenset({"new", "list", "open", "end", "cancel", "link", "help"})
"""The commands that `ingress` knows. It answers any other `Commanded` with the list of them."""

SOMEONE = "someone"
"""The author of a quoted message whose author the service does not name."""

NO_TEXT = "[no text]"
FORWARDED = "[a forwarded message]"
"""In place of a message's own text, if it has none: of a reply, and of a message that forwards another one."""

MOST_NOTE_CHARS = 1_000
"""The longest note, in characters: even when it is escaped, it fits into a message of each service."""


UPLOAD_S = 30.0
"""Seconds after which an upload has failed. They end before another worker attempts the delivery."""


class ChannelFailed(Unavailable):
    """The service cannot be reached, or refuses the channel's token. The caller tries again later."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an event happened, and where the reply goes. Stored with the turn, as JSON.

    Attributes:
        chat: The service's id of the chat.
        thread: The thread within the chat, if the reply goes into one.
        message: The service's id of the message or interaction.
        group: Whether several people read and write in the chat.
        token: A credential for answering an interaction, if the service has sent one.
    """

    chat: str
    thread: str | None = None
    message: str | None = None
    group: bool = False
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Sender:
    """The person who caused an event: the id and the display name on the service."""

    external_id: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """A file of a message. `ref` is how `Channel.download` finds it. `media_type` is what the service says it is."""

    ref: str
    name: str | None = None
    media_type: str | None = None


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of a reply. `name` has no path and ends like its `media_type`."""

    data: bytes = field(repr=False)
    name: str
    media_type: str


@dataclass(frozen=True, slots=True)
class Quoted:
    """A message that a person replies to, or forwards with `is_forward`.

    `text` is its text without markup, or a remark about what it has in place of text. `author` is the display name of
    the message's author; `None`: the bot wrote it.
    """

    text: str
    author: str | None
    is_forward: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """A message for the agent, of text, files or both. `text` is the person's own; it has no text of `quoted`.

    If `if_known` is true, the message is for the agent only if the agent takes part in the conversation. If `is_album`
    is true, the service sends the files that a person has sent at once as messages of their own, of which this is one.
    """

    place: Place
    sender: Sender
    message_id: str
    text: str
    if_known: bool = False
    files: tuple[Shared, ...] = ()
    is_album: bool = False
    quoted: tuple[Quoted, ...] = ()


@dataclass(frozen=True, slots=True)
class Edited:
    """A message was edited; `text` is the new text, and `quoted` is as in `Said`."""

    place: Place
    sender: Sender
    message_id: str
    text: str
    quoted: tuple[Quoted, ...] = ()


@dataclass(frozen=True, slots=True)
class Deleted:
    """A message was deleted. `sender` is its author, or `None` if the service does not report the author."""

    place: Place
    sender: Sender | None
    message_id: str


@dataclass(frozen=True, slots=True)
class Pressed:
    """A person pressed a button of a message; `token` is the `token` of the `Button`."""

    place: Place
    sender: Sender
    token: str


@dataclass(frozen=True, slots=True)
class Commanded:
    """A slash command and its argument. `command` is in lower case, without the slash."""

    place: Place
    sender: Sender
    message_id: str
    command: str
    argument: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A message of a person without text and files that can be read; `what` names its content, such as `a voice`.

    `if_known` is as in `Said`.
    """

    place: Place
    sender: Sender
    message_id: str
    what: str
    if_known: bool = False


@dataclass(frozen=True, slots=True)
class Moved:
    """The service has replaced the group `place.chat` by the group `to`, with the same people."""

    place: Place
    to: str


@dataclass(frozen=True, slots=True)
class Typed:
    """A person is typing in a private chat."""

    place: Place
    sender: Sender


@dataclass(frozen=True, slots=True)
class Connected:
    """The channel connected to the service without resuming its previous session.

    The service does not repeat earlier messages; `Channel.missed` reads them.
    """


Event = Said | Edited | Deleted | Pressed | Commanded | Unsupported | Moved | Typed | Connected


@dataclass(frozen=True, slots=True)
class Button:
    """A button under a message. `token` identifies the button in `Pressed` and has at most 64 characters."""

    label: str
    token: str


@dataclass(frozen=True, slots=True)
class Received:
    """The updates in a webhook request, and the JSON body of the response (`answer`)."""

    updates: Sequence[Update]
    answer: Mapping[str, Any] | None = None


class Channel(Protocol):
    """A chat service. Implementations are thread-safe."""

    name: str
    """The channel's name. It is the value of `channel` in each message that arrives on the channel."""

    most_chars: int
    """The longest text of one message, as `length` counts."""

    most_file_bytes: int
    """The largest file that `send_file` sends."""

    typing_s: float
    """Seconds for which the service shows the indicator after a call of `typing`; 0: the service has no indicator."""

    notes_a_second: float
    """The most calls of `show_note` and `remove_note` in a second, over all chats.

    The limits of the service must leave room for replies.
    """

    reads_history: bool
    """Whether `missed` is implemented. If it is implemented, message ids are increasing numbers."""

    listens: bool
    """Whether `listen` is configured. Without it, updates arrive by webhook only."""

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:
        """Check that a webhook request comes from the service and is recent. The names in `headers` are in lower case.

        Raises:
            Unauthorized: the check fails, or the channel's secret is not configured.
        """
        ...

    def receive(self, headers: Mapping[str, str], body: bytes) -> Received:
        """The updates in a verified request, and the response to the request.

        Raises:
            InvalidRequest: the body is malformed.
        """
        ...

    def parse(self, update: Update) -> list[Event]:
        """The events of an update. Empty if the update does not concern the agent.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the update is malformed.
        """
        ...

    def length(self, text: str) -> int:
        """The length of a message with this text, as the service counts it: with what escapes and markup add."""
        ...

    def send(self, place: Place, text: str, buttons: Sequence[Button], key: str, *, plain: bool = False) -> None:
        """Send one message, whose `length` is at most `most_chars`. `plain`: without markup.

        Each message has its own `key`. Repeated attempts to send a message use the same `key`.

        Raises:
            NotAsked: the service asks for a pause.
            Undeliverable: the failure is permanent; with the status 400 if the service refuses the form of the message.
            DeliveryFailed: the service has not confirmed the message.
        """
        ...

    def send_file(self, place: Place, file: Attachment, key: str) -> None:
        """Send a file of at most `most_file_bytes` bytes as a message of its own. `key` is as in `send`.

        Raises:
            NotAsked: the service asks for a pause.
            Undeliverable: the service refuses the file, or the failure is permanent.
            DeliveryFailed: the service has not confirmed the message.
        """
        ...

    def download(self, file: Shared, write: Callable[[bytes], None]) -> None:
        """Pass the content of a file of `Said.files` to `write`, piece by piece.

        Raises:
            Undeliverable: the service refuses the file.
            DeliveryFailed: the service cannot be reached.
        """
        ...

    def mark(self, place: Place, text: str) -> None:
        """Replace the message that contains the pressed button with `text`, and remove the buttons.

        Raises:
            DeliveryFailed: as in `send`.
        """
        ...

    def acknowledge(self, place: Place) -> None:
        """Confirm the press of a button that decides nothing, so that the service stops to show the press as pending.

        Raises:
            DeliveryFailed: as in `send`.
        """
        ...

    def typing(self, place: Place) -> None:
        """Show the typing indicator for `typing_s` seconds; does nothing if the service has no indicator.

        Raises:
            DeliveryFailed: as in `send`.
        """
        ...

    def show_note(self, place: Place, text: str, note_id: str | None) -> str:
        """Show a note in the chat: plain text of at most `MOST_NOTE_CHARS` characters, which does not notify anyone.

        `note_id` is the id of the note's message, whose text is replaced, or `None` for a new message. Returns the
        id of the message. Never waits for a pause that the service asks for.

        Raises:
            NotAsked: the service asks for a pause.
            Undeliverable: the service refuses the note, or the person has deleted it.
            DeliveryFailed: the service has not confirmed the note.
        """
        ...

    def remove_note(self, place: Place, note_id: str) -> None:
        """Delete the message of a note.

        Raises:
            DeliveryFailed: as in `show_note`.
        """
        ...

    def listen(self, on_update: Callable[[Update], None], stop: Stop) -> None:
        """Pass the service's updates to `on_update`, in their order, until `stop` is set.

        Raises:
            ChannelFailed: the service cannot be reached, or refuses the token.
        """
        ...

    def missed(self, chat: str, after: str) -> Sequence[Update]:
        """The updates for the messages in `chat` after the message with the id `after`, oldest first.

        Called only after a `Connected` event. The channel may limit the number of messages. Empty if the chat no longer
        exists.

        Raises:
            DeliveryFailed: the request to the service failed.
        """
        ...

    def close(self) -> None:
        """Close the channel's connections."""
        ...
