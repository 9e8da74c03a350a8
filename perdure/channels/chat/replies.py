"""Sends the replies of settled turns to chats, for the outbox.

A long reply is sent in parts. Their keys differ and stay the same at each attempt, so a channel whose service knows
such keys sends no part twice; for the others, this process remembers the parts that a failed attempt has sent. Each
channel has a breaker, `channel:NAME`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

from perdure.channels.chat.protocol import Channel, Place
from perdure.channels.chat.splitting import split
from perdure.errors import CircuitBreakerOpen
from perdure.resilience.registry import BreakerRegistry
from perdure.turns.outbox import NotAsked, Undeliverable

TIMEOUT_S = 30.0
"""Seconds after which a probe of the breaker counts as lost."""

_MOST_REMEMBERED = 10_000


class ChatCarrier:
    """A `perdure.turns.outbox.Carrier` to `{"channel": ..., "place": ...}`. Threads may share it."""

    def __init__(self, channels: Mapping[str, Channel], breakers: BreakerRegistry | None = None) -> None:
        self._channels = channels
        self._breakers = breakers
        self._sent: OrderedDict[str, int] = OrderedDict()
        self._lock = Lock()

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        """Send the reply of the turn in `body`, if it has one.

        Raises:
            DeliveryFailed: the service has not confirmed it.
            Undeliverable: the channel is not configured here any more, or the service refuses the chat for good.
            NotAsked: the channel's breaker is open, or the service asks for a pause.
        """
        channel = self._channels.get(target["channel"])
        if channel is None:
            raise Undeliverable(f"the channel {target['channel']!r} is not configured")
        reply = json.loads(body)["reply"]
        if reply is None:  # cancelled
            return
        parts = split(reply["text"], channel.most_chars)
        if self._breakers is None:
            self._send(channel, Place(**target["place"]), parts, message_id)
            return
        breaker = self._breakers.get(f"channel:{channel.name}")
        try:
            breaker.execute(lambda: self._send(channel, Place(**target["place"]), parts, message_id), TIMEOUT_S)
        except CircuitBreakerOpen as error:
            raise NotAsked(f"the breaker of {channel.name} is open", error.retry_after_s or 0.0) from None

    def _send(self, channel: Channel, place: Place, parts: list[str], message_id: str) -> None:
        for number in range(self._sent.get(message_id, 0), len(parts)):
            # Only the first part answers an interaction.
            where = place if number == 0 else Place(place.chat, place.thread, place.message, place.group)
            channel.send(where, parts[number], (), f"{message_id}:{number}")
            self._remember(message_id, number + 1)

    def _remember(self, message_id: str, sent: int) -> None:
        with self._lock:
            self._sent[message_id] = sent
            self._sent.move_to_end(message_id)
            if len(self._sent) > _MOST_REMEMBERED:
                self._sent.popitem(last=False)
