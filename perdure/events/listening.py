"""Tracks, in a worker process, which turns have listeners: clients that follow the turn's events.

A gateway announces a turn when a client begins to follow it, and then every `ANNOUNCE_S` seconds (`announce`). So does
a process that shows progress in a chat. To announce a turn, the process adds the turn to a sorted set and publishes the
turn's id on a channel. A worker reads the set when it subscribes to the channel, and then reads further turns from the
channel. If a turn has no listener, the worker writes none of the turn's events to Redis.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import redis

from perdure.clock import Clock
from perdure.errors import loggable
from perdure.events.event import hexes, listening_key, parse_hexes

log = logging.getLogger(__name__)

INTEREST_S = 60.0
"""Seconds for which a turn counts as having a listener after a gateway's last announcement."""

ANNOUNCE_S = 20.0
"""Seconds between two announcements of a turn."""

_WAIT_S = 0.5
_PAUSE_S = 1.0


def announce(pipeline: Any, prefix: str, now: float, turn_ids: list[UUID]) -> None:
    """Add the commands to a pipeline that announce turns to the workers. `now` is the Unix time."""
    key = listening_key(prefix)
    pipeline.zadd(key, {turn_id.hex: now + INTEREST_S for turn_id in turn_ids})
    pipeline.zremrangebyscore(key, "-inf", now)
    pipeline.publish(key, hexes(turn_ids))


class EventListening:
    """Reads the announcements in a thread of its own, and calls `on_listener` with each announced turn."""

    def __init__(self, client: Any, prefix: str, clock: Clock, on_listener: Callable[[UUID], None]) -> None:
        self._client = client
        self._key = listening_key(prefix)
        self._clock = clock
        self._on_listener = on_listener
        self._until: dict[UUID, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perdure-listening", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Waits at most one second for its end."""
        self._closing.set()
        if self._thread.ident is not None:
            with suppress(redis.RedisError):
                self._client.publish(self._key, b"")  # wakes the thread
            self._thread.join(_WAIT_S * 2)

    def has(self, turn_id: UUID) -> bool:
        return self._until.get(turn_id, 0.0) > self._clock.monotonic()

    def turns(self) -> list[UUID]:
        """The turns that have a listener."""
        now = self._clock.monotonic()
        return [turn_id for turn_id, until in list(self._until.items()) if until > now]

    def _run(self) -> None:
        failing = False
        while not self._closing.is_set():
            try:
                with self._client.pubsub(ignore_subscribe_messages=True) as subscription:
                    subscription.subscribe(self._key)
                    self._note(self._announced())
                    failing = False
                    self._follow(subscription)
            except redis.RedisError as error:
                if not failing:
                    log.warning("turns are not streamed while Redis is unavailable: %s", loggable(error))
                failing = True
                self._closing.wait(_PAUSE_S)
            except Exception:
                log.exception("following the listeners raised an error and continues")
                self._closing.wait(_PAUSE_S)

    def _follow(self, subscription: Any) -> None:
        while not self._closing.is_set():
            message = subscription.get_message(timeout=_WAIT_S)
            if message is not None:
                self._note(parse_hexes(message["data"]))

    def _announced(self) -> list[UUID]:
        now = self._clock.now().timestamp()
        return parse_hexes(b" ".join(self._client.zrangebyscore(self._key, now, "+inf")))

    def _note(self, turn_ids: list[UUID]) -> None:
        now = self._clock.monotonic()
        kept = {turn_id: until for turn_id, until in self._until.items() if until > now}
        self._until = {**kept, **dict.fromkeys(turn_ids, now + INTEREST_S)}
        for turn_id in turn_ids:
            self._on_listener(turn_id)
