"""Handles the events of chats: messages, edits, deletions, commands and pressed buttons.

In a private chat, the user of a message is the user to whom the sender is linked (`perdure.users.identities`). Without
a link, the user is `CHANNEL:ID`, with the sender's id. A chat of several people has a user of its own,
`CHANNEL:group:CHAT`, so that no person's memories are recalled for another person. In such a chat, each message begins
with its author's name, and each thread is a conversation. A message that replies to another one, or forwards it, ends
with a quotation of the other one (`quotations`).

An event may arrive several times, for example after a crash. The service's message id deduplicates messages. An answer
to a command is attempted once. The outbox sends the agent's replies.

The module `listening` passes updates to `Ingress.take`. The gateway's webhook route passes them to `Ingress.handle`,
and sends the answers after its response to the service, because Discord accepts no answer before that.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from threading import Lock
from typing import Any, assert_never
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey, user_key, user_of
from perdure.channels.activity import AGENT, TYPING, note_activity
from perdure.channels.services import queries
from perdure.channels.services.buttons import Buttons, Chat
from perdure.channels.services.indicators import Indicators
from perdure.channels.services.protocol import (
    FORWARDED,
    Channel,
    Commanded,
    Connected,
    Deleted,
    Edited,
    Event,
    Moved,
    Place,
    Pressed,
    Said,
    Sender,
    Typed,
    Unsupported,
    Update,
)
from perdure.channels.services.quotations import with_quotations
from perdure.channels.services.splitting import split
from perdure.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    PerdureError,
    ProviderError,
    RateLimited,
    TooLarge,
    Unavailable,
    loggable,
)
from perdure.files.kinds import IMAGES
from perdure.files.store import Owner
from perdure.runtime import Runtime
from perdure.sessions.conversations import list_conversations
from perdure.sessions.ending import request_end
from perdure.sessions.reading import find_live
from perdure.sessions.routing import scope_of
from perdure.settings import OnBusy
from perdure.text.untrusted import first_line, is_storable
from perdure.turns.calls.approvals import Decider, Decision, decide
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import MAX_NAME_CHARS, parse_incoming
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable
from perdure.turns.reading import find_owner
from perdure.users.identities import redeem, user_of_identity

log = logging.getLogger(__name__)

HELP = """/new  start a new conversation
/list  list the conversations
/open NUMBER  continue a conversation of the list
/end  end this conversation
/cancel  cancel messages that are not answered yet
/link CODE  link this chat to the account that showed the code
/help  show this"""
_NO_FILES = "I can only read text, images and files. Please write what you need."
_UNREAD_FILE = "I could not read the file. Please send it again."
FILE_ATTEMPTS = 3
"""The most attempts to read and store the files of a message, for which the channel's later messages wait."""

HISTORY_ATTEMPTS = 10
"""The most attempts to read the missed messages of a chat, for which all new messages wait."""

_MOST_REMEMBERED = 1_000
_MOST_AUTHOR_CHARS = 80
_ID_CHARS = 200
_MOST_LISTED = 20
_CAUGHT_UP_S = 7 * 86_400
_MOST_CAUGHT_UP = 200
"""The most chats whose missed messages are read after a reconnect.

Each of these chats was active in the last `_CAUGHT_UP_S` seconds.
"""
_NUMBER_DIGITS = 4
_OPEN, _OTHER = "→", "•"
"""The marks of the conversations that `/list` shows. No service takes them for markup."""


@dataclass(frozen=True, slots=True)
class _Seat:
    """The keys of an event's user and conversation.

    `own` is the key of the chat's default conversation, which is in use until `/new` or `/open` chooses another one.
    """

    user: UserKey
    conversation: str | None
    own: str | None


@dataclass(frozen=True, slots=True)
class Written:
    """An answer that is a message of its own, without markup. `once`: no second answer with the same key is sent."""

    place: Place
    text: str
    key: str
    once: bool = False


@dataclass(frozen=True, slots=True)
class Replaced:
    """An answer that replaces the message with the pressed button."""

    place: Place
    text: str


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The confirmation of a pressed button that decides nothing."""

    place: Place


Answer = Written | Replaced | Confirmed


class Ingress:
    """Handles the events of one channel. Its users are in no tenant. Thread-safe."""

    def __init__(self, runtime: Runtime, channel: Channel) -> None:
        self._runtime = runtime
        self._channel = channel
        self._buttons = Buttons(runtime.settings.signing_keys())
        self._quoting_key = runtime.settings.signing_key()
        self._indicators = Indicators(runtime, channel)
        self._failed: dict[str, int] = {}
        """The failed attempts to read a file or a chat's history, by message or chat; see `_is_last_attempt`."""
        self._claimed: dict[str, None] = {}
        """The keys of the newest answers that are sent once."""
        self._lock = Lock()
        self._caught_up: set[str] = set()
        """The chats that an interrupted call of `_catch_up` finished. The next call skips these chats."""

    def close(self) -> None:
        self._indicators.close()

    def take(self, update: Update) -> None:
        """Handle one update of the service, and send the answers to it.

        Raises:
            Unavailable: as in `handle`.
        """
        self.send(self.handle(update))

    def handle(self, update: Update) -> list[Answer]:
        """Handle one update of the service; returns the answers to it. A malformed update is logged and dropped.

        Raises:
            Unavailable: the database cannot be reached, or a file or a chat's history cannot be read, of which the
                attempts are limited. In all cases, the caller may safely pass the update again.
        """
        try:
            events = self._channel.parse(update)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            log.warning("%s sent a malformed update, which was dropped: %s", self._channel.name, type(error).__name__)
            return []
        answers: list[Answer] = []
        for event in events:
            answer = self._answer_to(event)
            if answer is not None:
                answers.append(answer)
            if isinstance(event, Said | Commanded | Unsupported):
                self._see(event)
        return answers

    def send(self, answers: Iterable[Answer]) -> None:
        """Send the answers that `handle` has returned. A failure is logged."""
        for answer in answers:
            key = answer.key if isinstance(answer, Written) and answer.once else None
            if key is not None and not self._claim(key):
                continue
            try:
                self._send(answer)
            except (DeliveryFailed, PerdureError) as error:
                log.warning("an answer on %s could not be sent: %s", self._channel.name, loggable(error))
                self._claimed.pop(key or "", None)

    def _claim(self, key: str) -> bool:
        """Whether this process has sent no answer with the key, and no other thread sends one."""
        with self._lock:
            if key in self._claimed:
                return False
            self._claimed[key] = None
            if len(self._claimed) > _MOST_REMEMBERED:
                del self._claimed[next(iter(self._claimed))]
        return True

    def _send(self, answer: Answer) -> None:
        match answer:
            case Written():
                first, *_ = split(answer.text, self._channel.most_chars, self._channel.length)
                self._channel.send(answer.place, first, (), answer.key, plain=True)
            case Replaced():
                self._channel.mark(answer.place, answer.text)
            case Confirmed():
                self._channel.acknowledge(answer.place)
            case _:
                assert_never(answer)

    def _answer_to(self, event: Event) -> Answer | None:
        """Handle an event; returns the answer to it, if it has one."""
        match event:
            case Said() | Edited() | Deleted() | Unsupported():
                return self._written(event)
            case Pressed():
                return self._pressed(event)
            case Commanded():
                return self._commanded(event)
            case Typed():
                user = self._user(event.place, event.sender)
                note_activity(self._runtime, user, self._channel.name, TYPING)
            case Moved():
                self._move(event)
            case Connected():
                self._catch_up()
            case _:
                assert_never(event)
        return None

    def _written(self, event: Said | Edited | Deleted | Unsupported) -> Answer | None:
        match event:
            case Said():
                return self._said(event)
            case Edited():
                self._edited(event)
            case Deleted():
                self._deleted(event)
            case Unsupported():
                if not event.if_known or self._is_known(self._seat(event.place, event.sender)):
                    return _refusal(event, _NO_FILES)
            case _:
                assert_never(event)
        return None

    def _see(self, event: Said | Commanded | Unsupported) -> None:
        """Record the id of a chat's newest handled message. `_catch_up` reads the later messages.

        Does not record an interaction. An interaction may arrive by webhook while no process listens for messages. If
        `_see` recorded the interaction, `_catch_up` would omit the unhandled messages that are older.
        """
        if self._channel.reads_history and event.place.token is None and event.message_id.isdecimal():
            at = self._at(self._user(event.place, event.sender), event.place)
            self._runtime.database.run(queries.SEE, {**at, "message_id": event.message_id})

    def _catch_up(self) -> None:
        """In the recently active chats, handle the messages that were sent while no process listened.

        A chat whose history cannot be read in `HISTORY_ATTEMPTS` attempts is left out, because new messages wait.

        Raises:
            Unavailable: the database or the service cannot be reached; another call is safe.
        """
        if not self._channel.reads_history:
            return
        given = {"channel": self._channel.name, "within_s": _CAUGHT_UP_S, "most": _MOST_CAUGHT_UP}
        for row in self._runtime.database.run(queries.SEEN, given):
            if row.chat in self._caught_up:
                continue
            try:
                updates = self._channel.missed(row.chat, row.last_message_id)
            except DeliveryFailed as error:
                # A pause that the service asks for ends, so it does not count.
                if isinstance(error, NotAsked) or not self._is_last_attempt(f"chat {row.chat}", HISTORY_ATTEMPTS):
                    raise Unavailable(f"The history of {self._channel.name} cannot be read: {error}.") from error
                log.warning("the missed messages of a chat on %s are not read: %s", self._channel.name, loggable(error))
                updates = ()
            for update in updates:
                self.take(update)
            self._caught_up.add(row.chat)
        self._caught_up.clear()

    def _said(self, event: Said) -> Answer | None:
        """Accept a message; returns the answer to a message that is not accepted."""
        seat = self._seat(event.place, event.sender)
        if event.if_known and not self._is_known(seat):
            return None
        try:
            self._accept(seat, event)
        except Conflict as error:  # the service repeated an edited message, or the session is busy
            log.info("a message from %s was not accepted: %s", self._channel.name, error.code)
            used = self._runtime.database.run(queries.IS_USED, self._message(seat, event.message_id))[0].used
            return None if used else _refusal(event, error.message)
        except (RateLimited, TooLarge, InvalidRequest) as error:
            return _refusal(event, error.message)
        except (DeliveryFailed, ProviderError, OSError) as error:
            if not self._is_last_attempt(f"message {event.message_id}", FILE_ATTEMPTS):
                raise Unavailable(f"A file on {self._channel.name} cannot be stored: {loggable(error)}.") from error
            log.warning("a file on %s was not accepted: %s", self._channel.name, loggable(error))
            return _refusal(event, _UNREAD_FILE)
        return None

    def _is_last_attempt(self, key: str, most: int) -> bool:
        """Count a failed attempt of this process; returns whether it was the last of `most` attempts."""
        with self._lock:
            failed = self._failed.pop(key, 0) + 1
            if failed < most:
                self._failed[key] = failed
            if len(self._failed) > _MOST_REMEMBERED:
                del self._failed[next(iter(self._failed))]
        return failed >= most

    def _accept(self, seat: _Seat, event: Said) -> None:
        given: dict[str, Any] = {
            "user_id": user_of(seat.user),
            "message_id": event.message_id,
            "conversation": seat.conversation,
        }
        place = event.place
        if event.is_album:  # one turn answers the files that wait, so their replies have one target
            given["on_busy"], place = OnBusy.MERGE, replace(place, message=None)
        target = {"channel": self._channel.name, "asker": event.sender.external_id, "place": asdict(place)}
        said = self._content(seat.user, event)
        message = parse_incoming({**given, **said, "channel": self._channel.name})
        # As an answer to a question, a message that only forwards another one says what that one says.
        answer = self._with_quotations(event.text, event) if event.text == FORWARDED else event.text
        accepted = accept(self._runtime, message, target=target, said=answer)
        if not accepted.duplicate:
            self._follow(seat, event.place, accepted)

    def _content(self, user: UserKey, event: Said) -> dict[str, Any]:
        """The `text` of a message, or its `parts` if it has files, which are stored.

        Raises:
            InvalidRequest, TooLarge: a file cannot be used.
            DeliveryFailed: the service cannot be reached.
            ProviderError, OSError: the file cannot be stored.
        """
        text = self._with_quotations(_line(event.place, event.sender, event.text), event)
        if not event.files:
            return {"text": text}
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        for shared in event.files:
            with self._runtime.files.spool() as content:
                try:
                    self._channel.download(shared, content.write)
                except Undeliverable as error:
                    log.info("a file on %s cannot be read: %s", self._channel.name, loggable(error))
                    raise InvalidRequest(_UNREAD_FILE) from error
                name = shared.name and first_line(shared.name, MAX_NAME_CHARS)
                stored = self._runtime.files.put(content, Owner.of(user), named=shared.media_type, name=name)
            kind = "image" if stored.media_type in IMAGES else "file"
            parts.append({"type": kind, "file_id": str(stored.file_id)})
        return {"parts": parts}

    def _with_quotations(self, text: str, event: Said | Edited) -> str:
        return with_quotations(text, event.quoted, self._quoting_key, self._runtime.settings.guard.max_chars)

    def _edited(self, event: Edited) -> None:
        seat = self._seat(event.place, event.sender)
        text = self._with_quotations(_line(event.place, event.sender, event.text), event)
        if is_storable(text) and len(text) <= self._runtime.settings.guard.max_chars:
            self._runtime.database.run(queries.EDIT, {**self._message(seat, event.message_id), "text": text})

    def _deleted(self, event: Deleted) -> None:
        if event.sender is None and not event.place.group:
            return
        seat = self._seat(event.place, event.sender or Sender(""))
        rows = self._runtime.database.run(queries.WAITING, self._message(seat, event.message_id))
        if rows and rows[0].messages == 1:
            cancel(self._runtime, rows[0].turn_id)

    def _pressed(self, event: Pressed) -> Answer:
        """Apply the decision of a pressed button to the tool call for which the button was made.

        If the button was made for another chat or person, only confirms the press: the request stays as it is for the
        person whom it asks. If the call no longer waits for approval, only replaces the button's message.
        """
        named = self._buttons.turn_of(event.token)
        user = self._user(event.place, event.sender)
        call = None if named is None else self._call_of(event, named[1], user)
        if named is None or call is None:
            return Confirmed(event.place)
        decision, turn_id = named
        text = f"{'Approved' if decision == 'approve' else 'Denied'}: {call.tool}"
        try:
            decide(self._runtime, turn_id, Decision(call_id=call.call_id, decision=decision), Decider.user(user))
        except (Conflict, Forbidden, NotFound) as error:
            text = error.message
        return Replaced(event.place, text)

    def _call_of(self, event: Pressed, turn_id: UUID, user: UserKey) -> Row[Any] | None:
        """The call for which the pressed button was made, for this chat and person; `None` if there is no such call."""
        found = find_owner(self._runtime.database, turn_id)
        if found is None or found[0] != user:
            return None
        name, person = self._channel.name, event.sender.external_id
        for row in self._runtime.database.run(queries.CALLS, {"turn_id": turn_id}):
            # The button of a group that has moved was made for the group's old id. Only the new group has its user.
            chats = {event.place.chat, row.chat or ""} if event.place.group else {event.place.chat}
            if any(self._buttons.is_for(event.token, row.call_id, Chat(name, chat, person)) for chat in chats):
                return row
        return None

    def _commanded(self, event: Commanded) -> Answer:
        match event.command:
            case "new":
                text = self._open_new(event)
            case "list":
                text = self._list(event)
            case "open":
                text = self._open(event)
            case "end":
                text = self._end(event)
            case "cancel":
                text = self._cancel(event)
            case "link":
                text = self._link(event)
            case _:
                text = HELP
        return Written(event.place, text, f"{event.message_id}:command")

    def _end(self, event: Commanded) -> str:
        session_id = self._live(self._seat(event.place, event.sender))
        if session_id is not None:
            try:
                requested = request_end(self._runtime.database, session_id, f"ended on {self._channel.name}")
                requested.wake(self._runtime.wake)
            except (NotFound, Conflict) as error:
                log.info("/end: the conversation had already ended (%s)", error.code)
        return "This conversation has ended." if session_id is not None else "There is no conversation to end."

    def _open_new(self, event: Commanded) -> str:
        self._set_open(event, f"{self._channel.name}-{secrets.token_hex(4)}")
        return "Your next message starts a new conversation."

    def _list(self, event: Commanded) -> str:
        seat = self._seat(event.place, event.sender)
        found = self._conversations(seat)
        if not found:
            return "There is one conversation; /new starts another."
        lines = [(seat.own, "the conversation of this chat")] + [(key, title) for key, title in found]
        marks = [_OPEN if key == seat.conversation else _OTHER for key, _ in lines]
        shown = [f"{mark} {n}: {title}" for n, (mark, (_, title)) in enumerate(zip(marks, lines, strict=True))]
        return "\n".join([*shown, "/open NUMBER continues one."])

    def _open(self, event: Commanded) -> str:
        found = self._conversations(self._seat(event.place, event.sender))
        number = event.argument
        if not (number.isascii() and number.isdigit() and len(number) <= _NUMBER_DIGITS and int(number) <= len(found)):
            return "Send /open NUMBER. /list shows the numbers."
        if int(number) == 0:
            self._set_open(event, None)
            return "This chat continues its own conversation."
        key, title = found[int(number) - 1]
        self._set_open(event, key)
        return f"This chat continues: {title}"

    def _conversations(self, seat: _Seat) -> list[tuple[str, str]]:
        """The keys and titles of the conversations that `/open` can choose, most recently active first."""
        found = list_conversations(self._runtime.database, seat.user, _MOST_LISTED, archived=False)
        return [(each["conversation"], each["title"]) for each in found if each["conversation"] != seat.own]

    def _set_open(self, event: Commanded, key: str | None) -> None:
        user = self._user(event.place, event.sender)
        self._runtime.database.run(queries.OPEN, {**self._at(user, event.place), "conversation": key})

    def _cancel(self, event: Commanded) -> str:
        session_id = self._live(self._seat(event.place, event.sender))
        rows = () if session_id is None else self._runtime.database.run(queries.UNSETTLED, {"session_id": session_id})
        for row in rows:
            cancel(self._runtime, row.turn_id)
        return "Cancelled." if rows else "There is nothing to cancel."

    def _link(self, event: Commanded) -> str:
        if event.place.group:
            return "Send the code in a private chat: here others can see it."
        if not event.argument:
            return "Send /link CODE. `perdure link` shows a code."
        try:
            user = redeem(self._runtime.database, self._channel.name, event.sender.external_id, event.argument, None)
        except (NotFound, RateLimited, InvalidRequest) as error:
            return error.message
        return f"This chat is linked to {first_line(user_of(user), _MOST_AUTHOR_CHARS)}."

    def _live(self, seat: _Seat) -> UUID | None:
        session = self._runtime.settings.session
        scope = scope_of(session.scope, self._channel.name, seat.conversation)
        found = find_live(self._runtime.database, seat.user, scope, session.idle_timeout_s)
        return None if found is None else found[0]

    def _seat(self, place: Place, sender: Sender) -> _Seat:
        user = self._user(place, sender)
        opened = self._runtime.database.run(queries.OPENED, self._at(user, place))
        key = opened[0].conversation if opened else None
        own = place.thread if place.group else None
        return _Seat(user, key or own, own)

    def _user(self, place: Place, sender: Sender) -> UserKey:
        return self._user_of(f"group:{place.chat}" if place.group else sender.external_id)

    def _user_of(self, external_id: str) -> UserKey:
        name = self._channel.name
        linked = user_of_identity(self._runtime.database, None, name, external_id)
        return linked or user_key(None, f"{name}:{external_id}")

    def _move(self, event: Moved) -> None:
        """Let the new group have the user of the old one, whose conversations and memories it continues."""
        given = {
            "tenant": "",
            "channel": self._channel.name,
            "chat": event.place.chat,
            "to": event.to,
            "external_id": f"group:{event.to}",
            "user_id": self._user_of(f"group:{event.place.chat}"),
        }
        self._runtime.database.run(queries.MOVE, given)

    def _at(self, user: UserKey, place: Place) -> dict[str, Any]:
        thread = place.thread or "" if place.group else ""
        return {"user_id": user, "channel": self._channel.name, "chat": place.chat, "thread": thread}

    def _is_known(self, seat: _Seat) -> bool:
        given = {"user_id": seat.user, "conversation": seat.own}
        return bool(self._runtime.database.run(queries.IS_KNOWN, given)[0].known)

    def _message(self, seat: _Seat, message_id: str) -> dict[str, Any]:
        return {"user_id": seat.user, "channel": self._channel.name, "message_id": message_id[:_ID_CHARS]}

    def _follow(self, seat: _Seat, place: Place, accepted: Accepted) -> None:
        if self._indicators.show(accepted.turn_id, place, own=not accepted.joined):
            note_activity(self._runtime, seat.user, self._channel.name, TYPING, AGENT)


def _refusal(event: Said | Unsupported, text: str) -> Written:
    """Why a message was not accepted. Slack reports a mention as two events, so the answer is sent once."""
    return Written(event.place, text, f"{event.message_id}:refused", once=True)


def _line(place: Place, sender: Sender, text: str) -> str:
    """The message as the agent reads it; in a group, prefixed with the author's name."""
    if not place.group:
        return text
    author = first_line(sender.name or sender.external_id, _MOST_AUTHOR_CHARS).replace(":", "")
    return f"{author}: {text}"
