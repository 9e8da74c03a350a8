"""Reads the progress of running turns from their event streams, for a process that shows it in chats.

Workers write the events of a turn only while the turn has a listener. So this process announces the turns that it
reads, as a gateway does. It polls, because it shows a change only every few seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any
from uuid import UUID

import redis

from perdure.clock import Clock
from perdure.errors import loggable
from perdure.events.event import EventId, EventKind
from perdure.events.listening import ANNOUNCE_S, announce
from perdure.events.writer import parse_entry
from perdure.memory.redis.event_streams import stream_key
from perdure.redis import connect

log = logging.getLogger(__name__)

_MOST_READ = 20
"""The most new entries of one turn that a call of `read` looks at: the newest."""


@dataclass(slots=True)
class Progress:
    """The progress of one turn's calls, as far as it was read. `calls` has tool and text, by the call's id.

    The calls of a round stay when the round is committed, until a call of a later round reports.
    """

    calls: dict[str, tuple[str, str]] = field(default_factory=dict)
    position: EventId = field(default_factory=lambda: EventId(0))
    announced_at: float = -inf
    _epoch: int = 0

    def take(self, rows: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        """Record entries of the turn's stream, the newest first."""
        for row in reversed(rows):
            entry = parse_entry(*row)
            if entry is None:
                continue
            self.position = entry.id
            if entry.kind != EventKind.PROGRESS:
                continue
            if entry.id.epoch != self._epoch:
                self._epoch, self.calls = entry.id.epoch, {}
            call_id, tool, text = (str(entry.data.get(each, "")) for each in ("call_id", "tool", "text"))
            self.calls.pop(call_id, None)  # the newest report last
            self.calls[call_id] = tool, text


class ProgressReader:
    """Reads progress from the Redis at `url`. Not thread-safe."""

    def __init__(self, url: str, prefix: str, clock: Clock) -> None:
        self._client: Any = connect(url)
        self._prefix = prefix
        self._clock = clock
        self._failing = False

    def read(self, turns: Sequence[tuple[UUID, Progress]]) -> None:
        """Announce the turns that are due, and record the new progress of all. Without Redis, does nothing."""
        if not turns:
            return
        now = time.monotonic()
        due = [each for each in turns if now - each[1].announced_at >= ANNOUNCE_S]
        pipeline = self._client.pipeline(transaction=False)
        for turn_id, progress in turns:
            pipeline.xrevrange(stream_key(self._prefix, turn_id), "+", f"({progress.position}", count=_MOST_READ)
        if due:
            announce(pipeline, self._prefix, self._clock.now().timestamp(), [turn_id for turn_id, _ in due])
        try:
            found = pipeline.execute()
        except redis.RedisError as error:
            if not self._failing:
                log.warning("chats show no progress while Redis is unavailable: %s", loggable(error))
            self._failing = True
            return
        self._failing = False
        for _, progress in due:
            progress.announced_at = now
        for (_, progress), rows in zip(turns, found, strict=False):  # the answers to the announcement come last
            progress.take(rows)

    def close(self) -> None:
        self._client.close()
