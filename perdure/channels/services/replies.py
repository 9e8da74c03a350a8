"""Sends replies and approval requests from the outbox to chats.

A long reply is sent in parts. Each part has an idempotency key, which is the same in every attempt. If an attempt
fails, this process remembers the number of sent parts, and the next attempt begins after these parts. A service without
idempotency keys may still show a part twice, for example if the process restarts between two attempts.

Each channel has a circuit breaker, `channel:NAME`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any
from uuid import UUID

from perdure.channels.services.buttons import Buttons, Chat
from perdure.channels.services.protocol import Button, Channel, Place
from perdure.channels.services.splitting import split
from perdure.errors import CircuitBreakerOpen
from perdure.resilience.registry import BreakerRegistry
from perdure.text.untrusted import cut
from perdure.tools.registry import USER
from perdure.turns.outbox import NotAsked, Undeliverable

TIMEOUT_S = 30.0
"""Seconds after which the circuit breaker may treat a call as ended."""

_MOST_REMEMBERED = 10_000
_FRAME_CHARS = 20


@dataclass(frozen=True, slots=True)
class _Part:
    """One message of a delivery."""

    text: str
    buttons: tuple[Button, ...] = ()


class ChatCarrier:
    """A `perdure.turns.outbox.Carrier` for targets `{"channel": ..., "place": ...}`. Thread-safe."""

    def __init__(
        self, channels: Mapping[str, Channel], buttons: Buttons, breakers: BreakerRegistry | None = None
    ) -> None:
        self._channels = channels
        self._buttons = buttons
        self._breakers = breakers
        self._sent: OrderedDict[str, int] = OrderedDict()
        self._lock = Lock()

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        """Send the turn's reply or its approval requests.

        If `target["approval"]` is true, sends one request for each tool call that waits for approval. Otherwise, sends
        the reply, or nothing if the turn has no reply.

        Raises:
            DeliveryFailed: the service has not confirmed a message.
            Undeliverable: the channel is not configured, or the service refuses the chat permanently.
            NotAsked: the channel's breaker is open, or the service asks for a pause.
        """
        channel = self._channels.get(target["channel"])
        if channel is None:
            raise Undeliverable(f"the channel {target['channel']!r} is not configured")
        turn, place = json.loads(body), _place(target)
        parts = self._requests(channel, target, turn) if target.get("approval") else _replies(channel, turn)
        if self._breakers is None:
            self._send(channel, place, parts, message_id)
            return
        breaker = self._breakers.get(f"channel:{channel.name}")
        try:
            breaker.execute(lambda: self._send(channel, place, parts, message_id), TIMEOUT_S)
        except CircuitBreakerOpen as error:
            raise NotAsked(f"the breaker of {channel.name} is open", error.retry_after_s or 0.0) from None

    def _requests(self, channel: Channel, target: dict[str, Any], turn: dict[str, Any]) -> list[_Part]:
        """One message for each tool call that waits for approval.

        The messages about calls that the user approves have the buttons `Approve` and `Deny`.
        """
        chat = Chat(channel.name, target["place"]["chat"], target["asker"])
        turn_id = UUID(turn["turn_id"])
        return [
            _Part(
                _request(call, channel.most_chars),
                (
                    Button("Approve", self._buttons.token("approve", turn_id, call["call_id"], chat)),
                    Button("Deny", self._buttons.token("deny", turn_id, call["call_id"], chat)),
                )
                if call["approver"] == USER
                else (),
            )
            for call in turn["pending_approvals"]
        ]

    def _send(self, channel: Channel, place: Place, parts: list[_Part], message_id: str) -> None:
        for number in range(self._sent.get(message_id, 0), len(parts)):
            # Only the first part answers an interaction.
            where = place if number == 0 else replace(place, token=None)
            try:
                channel.send(where, parts[number].text, parts[number].buttons, f"{message_id}:{number}")
            except NotAsked as pause:  # a service may ask for a pause in one chat only
                raise NotAsked(str(pause), pause.retry_s, alone=True) from pause
            self._remember(message_id, number + 1)

    def _remember(self, message_id: str, sent: int) -> None:
        with self._lock:
            self._sent[message_id] = sent
            self._sent.move_to_end(message_id)
            if len(self._sent) > _MOST_REMEMBERED:
                self._sent.popitem(last=False)


def _replies(channel: Channel, turn: dict[str, Any]) -> list[_Part]:
    reply = turn["reply"]  # None: the turn was cancelled
    return [] if reply is None else [_Part(text) for text in split(reply["text"], channel.most_chars)]


def _request(call: dict[str, Any], most: int) -> str:
    """The text of an approval request. Replaces backquotes in the arguments, because they could end the code block."""
    arguments = json.dumps(call["arguments"], ensure_ascii=False, indent=2).replace("`", "'")
    question = f"`{call['tool']}` needs {'your approval' if call['approver'] == USER else 'the approval of staff'}:"
    return f"{question}\n```\n{cut(arguments, most - len(question) - _FRAME_CHARS)}\n```"


def _place(target: dict[str, Any]) -> Place:
    try:
        return Place(**target["place"])
    except (KeyError, TypeError) as error:  # an imported session, or another release, may have written the place
        raise Undeliverable("the place of the reply is malformed") from error
