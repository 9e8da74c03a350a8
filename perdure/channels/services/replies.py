"""Sends replies, approval requests and questions from the outbox to chats.

A long reply is sent in parts. Each part has an idempotency key, which is the same in every attempt: the number of a
part of a reply, and the call's id of a request, because the calls that wait may change between two attempts. When the
service has accepted a part and others follow, the delivery's row records it, and every later attempt, by any worker,
omits it. A service without idempotency keys may still show a part twice: the one that it accepted just before the
worker died.

Each file that a line at the end of a reply names is a part. If the file cannot be read, the service refuses it, or has
not confirmed it in half of the attempts, the line is sent in its place, so that the parts after it arrive.

Each channel has a circuit breaker, `channel:NAME`.
"""

from __future__ import annotations

import json
import logging
import mimetypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2s
from http import HTTPStatus
from typing import Any
from uuid import UUID

from perdure.channels.services.buttons import Buttons, Chat
from perdure.channels.services.protocol import Attachment, Button, Channel, Place
from perdure.channels.services.splitting import split
from perdure.errors import CircuitBreakerOpen, NotFound, ProviderError, loggable
from perdure.files.results import ending_files
from perdure.resilience.registry import BreakerRegistry
from perdure.runtime import Runtime
from perdure.text.untrusted import cut, shown_json
from perdure.tools.registry import USER
from perdure.turns.outbox import MAX_ATTEMPTS, DeliveryFailed, NotAsked, Undeliverable
from perdure.turns.reading import cut_off, find_owner, question_of

TIMEOUT_S = 30.0
"""Seconds after which the circuit breaker may treat a call as ended."""

log = logging.getLogger(__name__)

_NOT_SHOWN = "The answer could not be shown in this chat. Ask again, or for a shorter answer."
_FRAME_CHARS = 20
_NAMED_KINDS = frozenset({"image", "audio", "video"})
_UNCONFIRMED = "unconfirmed"
_MOST_UPLOADS = MAX_ATTEMPTS // 2
_NO_PATH = str.maketrans(dict.fromkeys("/\\", "_"))


Note = Callable[[UUID, Sequence[str], Sequence[str]], None]
"""Records the accepted messages of a delivery; see `perdure.turns.outbox.note_sent`."""


ReadFile = Callable[[UUID, UUID, int], Attachment | None]
"""Reads a file of the turn's user, of at most so many bytes; see `read_file`."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One message of a delivery. `key` names it among the delivery's messages, in all attempts.

    Of a part with the file `file_id`, `text` is the line that is sent if the file cannot be sent.
    """

    key: str
    text: str
    buttons: tuple[Button, ...] = ()
    file_id: UUID | None = None
    file: Attachment | None = None

    @property
    def mark(self) -> str:
        """What the row records of the message. Another release may split a reply differently: its parts are others."""
        return f"{self.key} {blake2s(self.text.encode(errors='replace'), digest_size=4).hexdigest()}"

    @property
    def unconfirmed(self) -> str:
        """What the row records of an attempt in which the service did not confirm the part's file."""
        return f"{self.mark} {_UNCONFIRMED}"


class ChatCarrier:
    """A `perdure.turns.outbox.Carrier` for targets `{"channel": ..., "place": ..., "sent": [...]}`. Thread-safe."""

    def __init__(
        self,
        channels: Mapping[str, Channel],
        buttons: Buttons,
        breakers: BreakerRegistry | None = None,
        note: Note | None = None,
        read_file: ReadFile | None = None,
    ) -> None:
        self._channels = channels
        self._buttons = buttons
        self._breakers = breakers
        self._note = note
        self._read_file = read_file

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        """Send the turn's reply or its approval requests.

        If `target["approval"]` is true, sends one request for each tool call that waits for approval. If
        `target["question"]` is true, sends the question for which the turn waits. Otherwise, sends the reply, or
        nothing if the turn has no reply. Omits the messages in `target["sent"]`, and adds to it those that it sends.

        Raises:
            DeliveryFailed: the service has not confirmed a message.
            Undeliverable: the channel is not configured, or the service refuses the chat permanently.
            NotAsked: the channel's breaker is open, or the service asks for a pause.
            Overtaken: another attempt sends the delivery.
        """
        channel = self._channels.get(target["channel"])
        if channel is None:
            raise Undeliverable(f"the channel {target['channel']!r} is not configured")
        turn, place = json.loads(body), _place(target)
        if target.get("question"):
            parts = _parts(channel, [question_of(turn) or ""])
        else:
            parts = self._requests(channel, target, turn) if target.get("approval") else _replies(channel, turn)
        sent = [str(each) for each in target.get("sent") or ()]
        unsent = [part for part in parts if part.mark not in sent]
        for part in unsent:
            # Only the first part answers an interaction.
            answering = place if all(each.endswith(_UNCONFIRMED) for each in sent) else replace(place, token=None)
            shown = self._with_file(part, channel, turn, sent)
            try:
                self._post(channel, answering, shown, f"{message_id}:{part.key}")
            except DeliveryFailed as failed:
                if shown.file is not None and not isinstance(failed, NotAsked | Undeliverable):
                    self._record(target, message_id, sent, part.unconfirmed)
                raise
            if part is unsent[-1]:  # the delivery is over
                target["sent"] = [*sent, part.mark]
            else:
                sent = self._record(target, message_id, sent, part.mark)

    def _record(self, target: dict[str, Any], message_id: str, sent: list[str], mark: str) -> list[str]:
        """Record a part that was sent, or a file that was not confirmed; returns all marks."""
        marks = target["sent"] = [*sent, mark]
        if self._note is not None:
            self._note(UUID(message_id), sent, marks)
        return marks

    def _with_file(self, part: _Part, channel: Channel, turn: dict[str, Any], sent: Sequence[str]) -> _Part:
        """The part with the content of its file, if it has one that can be read and may still be tried."""
        if part.file_id is None or self._read_file is None:
            return part
        if sent.count(part.unconfirmed) >= _MOST_UPLOADS:
            log.warning("%s has not confirmed a file in %d attempts: its line is sent", channel.name, _MOST_UPLOADS)
            return part
        return replace(part, file=self._read_file(UUID(turn["turn_id"]), part.file_id, channel.most_file_bytes))

    def _requests(self, channel: Channel, target: dict[str, Any], turn: dict[str, Any]) -> list[_Part]:
        """One message for each tool call that waits for approval.

        The messages about calls that the user approves have the buttons `Approve` and `Deny`.
        """
        chat = Chat(channel.name, target["place"]["chat"], target["asker"])
        turn_id = UUID(turn["turn_id"])
        return [
            _Part(
                call["call_id"],
                _request(channel, call),
                (
                    Button("Approve", self._buttons.token("approve", turn_id, call["call_id"], chat)),
                    Button("Deny", self._buttons.token("deny", turn_id, call["call_id"], chat)),
                )
                if call["approver"] == USER
                else (),
            )
            for call in turn["pending_approvals"]
        ]

    def _post(self, channel: Channel, place: Place, part: _Part, key: str) -> None:
        """Send a part through the channel's breaker."""

        def post() -> None:
            try:
                _post(channel, place, part, key)
            except NotAsked as pause:  # a service may ask for a pause in one chat only
                raise NotAsked(str(pause), pause.retry_s, alone=True) from pause

        if self._breakers is None:
            post()
            return
        try:
            self._breakers.get(f"channel:{channel.name}").execute(post, TIMEOUT_S)
        except CircuitBreakerOpen as error:
            raise NotAsked(f"the breaker of {channel.name} is open", error.retry_after_s or 0.0) from None


def read_file(runtime: Runtime, turn_id: UUID, file_id: UUID, most: int) -> Attachment | None:
    """A file of the turn's user; `None` if the user has no such file, it is too large, or it cannot be read."""
    owner, row = find_owner(runtime.database, turn_id), runtime.files.rows([file_id]).get(file_id)
    if owner is None or row is None or row.user_id != owner[0] or row.size > most:
        return None
    try:
        data = runtime.files.read(row)
    except (NotFound, ProviderError) as error:
        log.warning("turn %s: a file of its reply cannot be read: %s", turn_id, loggable(error))
        return None
    kind = row.media_type.partition("/")[0]
    name = row.name or f"{kind if kind in _NAMED_KINDS else 'file'}{mimetypes.guess_extension(row.media_type) or ''}"
    return Attachment(data, name.translate(_NO_PATH), row.media_type)


def _post(channel: Channel, place: Place, part: _Part, key: str) -> None:
    """Send a part: its file or, if it has none or the service refuses it, its text."""
    if part.file is not None:
        try:
            channel.send_file(place, part.file, f"{key}:file")
        except Undeliverable as refused:
            log.warning("%s refuses a file, so the line about it is sent: %s", channel.name, loggable(refused))
        else:
            return
    _post_text(channel, place, part, key)


def _post_text(channel: Channel, place: Place, part: _Part, key: str) -> None:
    """Send a part; if the service refuses its form, as plain text. If it refuses that, too, the person is told so.

    A service deduplicates by the key, so each form has a key of its own.
    """
    try:
        channel.send(place, part.text, part.buttons, key)
    except Undeliverable as refused:
        if refused.status_code != HTTPStatus.BAD_REQUEST:
            raise
        log.warning(
            "%s refuses the form of a message, which is sent as plain text: %s", channel.name, loggable(refused)
        )
        try:
            channel.send(place, part.text, part.buttons, f"{key}:plain", plain=True)
        except Undeliverable:
            with suppress(DeliveryFailed):
                channel.send(place, _NOT_SHOWN, (), f"{key}:notice", plain=True)
            raise


def _parts(channel: Channel, texts: Iterable[str | tuple[UUID, str]]) -> list[_Part]:
    """The messages for these texts, and files with their lines."""
    parts = [
        (part, None if isinstance(each, str) else each[0])
        for each in texts
        for part in ([each[1]] if isinstance(each, tuple) else split(each, channel.most_chars, channel.length))
    ]
    return [_Part(str(number), part, file_id=file_id) for number, (part, file_id) in enumerate(parts)]


def _replies(channel: Channel, turn: dict[str, Any]) -> list[_Part]:
    reply = turn["reply"]  # None: the turn was cancelled
    if reply is None:
        return []
    text, files = ending_files(reply["text"])
    note = cut_off(turn)
    return _parts(channel, [*([] if files and not text else [text]), *files, *([] if note is None else [note])])


def _request(channel: Channel, call: dict[str, Any]) -> str:
    """The text of an approval request. Replaces backquotes in the arguments, because they could end the code block."""
    arguments = shown_json(call["arguments"], indent=2).replace("`", "'")
    question = f"`{call['tool']}` needs {'your approval' if call['approver'] == USER else 'the approval of staff'}:"
    most = channel.most_chars - len(question) - _FRAME_CHARS
    while channel.length(text := f"{question}\n```\n{cut(arguments, most)}\n```") > channel.most_chars:
        most = most * 3 // 4
    return text


def _place(target: dict[str, Any]) -> Place:
    try:
        return Place(**target["place"])
    except (KeyError, TypeError) as error:  # an imported session, or another release, may have written the place
        raise Undeliverable("the place of the reply is malformed") from error
