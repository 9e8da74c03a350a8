"""Sends replies, approval requests and questions from the outbox to chats.

A long reply is sent in parts. Each part has an idempotency key, which is the same in every attempt: the number of a
part of a reply, and the call's id of a request, because the calls that wait may change between two attempts. When the
service has accepted a part and others follow, the delivery's row records it, and every later attempt, by any worker,
omits it. A service without idempotency keys may still show a part twice: the one that it accepted just before the
worker died.

Each channel has a circuit breaker, `channel:NAME`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2s
from http import HTTPStatus
from typing import Any
from uuid import UUID

from perdure.channels.services.buttons import Buttons, Chat
from perdure.channels.services.protocol import Button, Channel, Place
from perdure.channels.services.splitting import split
from perdure.errors import CircuitBreakerOpen, loggable
from perdure.resilience.registry import BreakerRegistry
from perdure.text.untrusted import cut, shown_json
from perdure.tools.registry import USER
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable
from perdure.turns.reading import cut_off, question_of

TIMEOUT_S = 30.0
"""Seconds after which the circuit breaker may treat a call as ended."""

log = logging.getLogger(__name__)

_NOT_SHOWN = "The answer could not be shown in this chat. Ask again, or for a shorter answer."
_FRAME_CHARS = 20


Note = Callable[[UUID, Sequence[str], Sequence[str]], None]
"""Records the accepted messages of a delivery; see `perdure.turns.outbox.note_sent`."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One message of a delivery. `key` names it among the delivery's messages, in all attempts."""

    key: str
    text: str
    buttons: tuple[Button, ...] = ()

    @property
    def mark(self) -> str:
        """What the row records of the message. Another release may split a reply differently: its parts are others."""
        return f"{self.key} {blake2s(self.text.encode(errors='replace'), digest_size=4).hexdigest()}"


class ChatCarrier:
    """A `perdure.turns.outbox.Carrier` for targets `{"channel": ..., "place": ..., "sent": [...]}`. Thread-safe."""

    def __init__(
        self,
        channels: Mapping[str, Channel],
        buttons: Buttons,
        breakers: BreakerRegistry | None = None,
        note: Note | None = None,
    ) -> None:
        self._channels = channels
        self._buttons = buttons
        self._breakers = breakers
        self._note = note

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
            self._post(channel, replace(place, token=None) if sent else place, part, f"{message_id}:{part.key}")
            before, sent = sent, [*sent, part.mark]
            target["sent"] = sent
            if self._note is not None and part is not unsent[-1]:  # after the last one, the delivery is over
                self._note(UUID(message_id), before, sent)

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


def _post(channel: Channel, place: Place, part: _Part, key: str) -> None:
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


def _parts(channel: Channel, texts: Iterable[str]) -> list[_Part]:
    parts = [part for text in texts for part in split(text, channel.most_chars, channel.length)]
    return [_Part(str(number), part) for number, part in enumerate(parts)]


def _replies(channel: Channel, turn: dict[str, Any]) -> list[_Part]:
    reply = turn["reply"]  # None: the turn was cancelled
    texts = [] if reply is None else [reply["text"], cut_off(turn)]
    return _parts(channel, (text for text in texts if text is not None))


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
