"""A turn's provisional events, batched into its Redis stream by one thread per process.

The first piece of text is written at once; then a batch is written every `PERDURE_STREAM__BATCH_MS`. A turn without a
listener only keeps the text of its current step in memory, so that a listener who comes later receives all of it.

If Redis fails, the entries are lost: the next batch begins with a `rewind`, followed by the whole text. If Redis
refuses an id, a worker with a higher token writes this turn, and this one is silent.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID
from weakref import WeakValueDictionary

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from perdure.clock import Clock
from perdure.errors import loggable
from perdure.redis import client_url
from perdure.settings import StreamSettings
from perdure.text.untrusted import storable
from perdure.turns.events.event import (
    COMMITTED,
    PER_TOKEN,
    EventId,
    EventKind,
    hexes,
    news_channel,
    rewind_to,
    stream_key,
)
from perdure.turns.events.listening import Listening

log = logging.getLogger(__name__)

MAX_ENTRIES = 20_000
"""Entries of one stream. At 20 batches a second this is a quarter of an hour of text."""

_TIMEOUT_S = 1.0
_PAUSE_S = 1.0
_HIGH_SURROGATES = "\ud800", "\udbff"
_REFUSED_ID = "equal or smaller"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream."""

    id: EventId
    kind: str
    data: Mapping[str, Any]


class Outlet(Protocol):
    """Writes the events of turns."""

    def has_listener(self, turn_id: UUID) -> bool:
        """Whether the turn's events are wanted."""
        ...

    def changed(self, turn: TurnEvents) -> None:
        """The turn has something to write."""
        ...

    def next_number(self) -> int:
        """A number above all that this process used before: a turn that is begun again has the same token."""
        ...


class TurnEvents:
    """The events of one turn under one lease. Thread-safe. Without an `outlet`, nothing is written.

    `epoch` counts the turn's committed messages.
    """

    def __init__(self, turn_id: UUID, token: int, epoch: int, outlet: Outlet | None = None) -> None:
        self.turn_id = turn_id
        self._outlet = outlet
        self._lock = threading.Lock()
        self._token = token
        self._epoch = epoch
        self._text: list[str] = []
        self._length = 0
        self._written = 0
        """Characters of the step's text that the stream has."""
        self._pending: list[tuple[int, str, Mapping[str, Any]]] = []
        self._silent = False

    def delta(self, text: str) -> None:
        """Add streamed text of the current step."""
        with self._lock:
            self._text.append(text)
            self._length += len(text)
        self._changed()

    def rewind(self) -> None:
        """Withdraw the text of the current step."""
        with self._lock:
            self._withdraw()
        self._changed()

    def committed(self, messages: int) -> None:
        """The turn has `messages` more committed messages, which replace the text of the current step."""
        with self._lock:
            self._epoch += messages
            self._text, self._length, self._written = [], 0, 0
            self._append(COMMITTED, {})
        self._changed()

    def state(self, status: str) -> None:
        """The turn's status has changed."""
        with self._lock:
            self._append(EventKind.STATE, {"status": status})
        self._changed()

    def take(self) -> list[Entry]:
        """The entries to write now, which are then considered written."""
        with self._lock:
            if self._silent:
                return []
            pending, self._pending = self._pending, []
            if (delta := self._unwritten_text()) is not None:
                pending.append((self._epoch, EventKind.DELTA, delta))
            return [Entry(self._id(epoch, kind), kind, data) for epoch, kind, data in pending]

    def lost(self) -> None:
        """What `take` returned last may not have been written."""
        with self._lock:
            self._written = max(self._written, 1)
            self._withdraw(keep_text=True)

    def silence(self) -> None:
        """Write nothing from now on: another worker writes this turn."""
        with self._lock:
            self._silent = True

    def _unwritten_text(self) -> dict[str, Any] | None:
        """The text that the stream lacks, with the positions of its beginning and end in the step's text."""
        if self._written == self._length:
            return None
        text = "".join(self._text)
        self._text = [text]
        begin, end = self._written, self._length
        if _HIGH_SURROGATES[0] <= text[-1] <= _HIGH_SURROGATES[1]:
            end -= 1  # the second half of the pair comes with the next piece
        self._written = end
        return {"text": storable(text[begin:end]), "at": begin, "to": end} if end > begin else None

    def _withdraw(self, *, keep_text: bool = False) -> None:
        if self._written:
            self._append(EventKind.REWIND, rewind_to(self._epoch))
        self._written = 0
        if not keep_text:
            self._text, self._length = [], 0

    def _append(self, kind: str, data: Mapping[str, Any]) -> None:
        if self._outlet is not None and self._outlet.has_listener(self.turn_id):
            self._pending.append((self._epoch, kind, data))

    def _id(self, epoch: int, kind: str) -> EventId:
        if kind == COMMITTED or self._outlet is None:
            return EventId(epoch)
        return EventId(epoch, self._token * PER_TOKEN + self._outlet.next_number())

    def _changed(self) -> None:
        if self._outlet is not None and self._outlet.has_listener(self.turn_id):
            self._outlet.changed(self)


class EventWriter:
    """Writes the events of this process's turns to the Redis at `url`, with `prefix` before each key."""

    def __init__(self, url: str, prefix: str, limits: StreamSettings, clock: Clock) -> None:
        self._prefix = prefix
        self._batch_s = limits.batch_ms / 1000
        self._ttl_ms = max(1, int(limits.ttl_s * 1000))
        # No retry: a repeated XADD would refuse its own ids.
        self._client: Any = redis.Redis.from_url(
            client_url(url),
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=20,
        )
        self._listening = Listening(self._client, prefix, clock, self._on_listener)
        self._turns: WeakValueDictionary[UUID, TurnEvents] = WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._condition = threading.Condition()
        self._waiting: dict[UUID, TurnEvents] = {}
        self._closing = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="perdure-events", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._listening.start()
        self._thread.start()

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._listening.close()
        with self._condition:
            self._closing.set()
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(_TIMEOUT_S * 2)
        self._client.close()

    def open(self, turn_id: UUID, token: int, epoch: int) -> TurnEvents:
        """The events of a turn that begins or goes on under `token`, with `epoch` committed messages."""
        turn = TurnEvents(turn_id, token, epoch, self)
        self._turns[turn_id] = turn
        return turn

    def has_listener(self, turn_id: UUID) -> bool:
        """Whether the turn's events are wanted."""
        return self._listening.has(turn_id)

    def changed(self, turn: TurnEvents) -> None:
        """Write the turn's events with the next batch."""
        with self._condition:
            self._waiting[turn.turn_id] = turn
            self._condition.notify()

    def next_number(self) -> int:
        """A number above all that this process used before."""
        return next(self._numbers)

    def _on_listener(self, turn_id: UUID) -> None:
        turn = self._turns.get(turn_id)
        if turn is not None:
            self.changed(turn)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._closing.is_set():
                    self._condition.wait()
                waiting, self._waiting = list(self._waiting.values()), {}
            if not waiting:
                return
            try:
                self._write([(turn, entries) for turn in waiting if (entries := turn.take())])
            except Exception:
                log.exception("writing events raised an error and continues")
            self._closing.wait(self._batch_s)

    def _write(self, batches: list[tuple[TurnEvents, list[Entry]]]) -> None:
        if not batches:
            return
        pipeline = self._client.pipeline(transaction=False)
        for turn, entries in batches:
            key = stream_key(self._prefix, turn.turn_id)
            for entry in entries:
                fields = {"kind": entry.kind, "data": json.dumps(entry.data, ensure_ascii=False)}
                pipeline.xadd(key, fields, id=str(entry.id), maxlen=MAX_ENTRIES, approximate=True)
            pipeline.pexpire(key, self._ttl_ms)
        pipeline.publish(news_channel(self._prefix), f"e {hexes([turn.turn_id for turn, _ in batches])}")
        try:
            answers = iter(pipeline.execute(raise_on_error=False))
        except redis.RedisError as error:
            self._failed(error)
            for turn, _ in batches:
                turn.lost()
                self.changed(turn)
            self._closing.wait(_PAUSE_S)
            return
        self._failing = False
        for turn, entries in batches:
            self._check(turn, [next(answers) for _ in entries])
            next(answers)  # of PEXPIRE

    def _check(self, turn: TurnEvents, answers: list[Any]) -> None:
        errors = [each for each in answers if isinstance(each, redis.RedisError)]
        if not errors:
            return
        if any(_REFUSED_ID in str(each) for each in errors):
            log.info("turn %s: another worker writes its events", turn.turn_id)
            turn.silence()
        else:
            self._failed(errors[0])
            turn.lost()

    def _failed(self, error: redis.RedisError) -> None:
        if not self._failing:
            log.warning("events of turns are not written: %s", loggable(error))
        self._failing = True
