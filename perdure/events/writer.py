"""Writes turns' provisional events to Redis streams, in batches, with one thread per process.

The thread writes the first piece of a step's text at once. It writes the later pieces in one batch every
`PERDURE_STREAM__BATCH_MS` milliseconds. While a turn has no listener, the text of its current step stays in memory. A
client that begins to follow the turn receives all of this text.

If Redis fails, the entries of the batch may be lost. The next batch then begins with a `rewind`, followed by the whole
text of the step. If Redis refuses the id of an entry, another worker with a higher fencing token has written events of
the turn. This worker then stops writing events of the turn.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
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
from perdure.events.event import (
    COMMITTED,
    PER_TOKEN,
    EventId,
    EventKind,
    hexes,
    news_channel,
    rewind_to,
)
from perdure.events.listening import EventListening
from perdure.memory.redis.event_streams import stream_key, streams_key
from perdure.redis import client_url
from perdure.settings import StreamSettings
from perdure.text.untrusted import load_object, storable

log = logging.getLogger(__name__)

MAX_ENTRIES = 20_000
"""The maximum number of entries of one stream: enough for a quarter of an hour of text at 20 batches a second."""

_MOST_CALLS = 100
"""The calls of a step whose progress is recorded."""

_MOST_FOLLOWED = 1_000

_LONGEST_TURN_MS = 86_400_000
"""One day. The Redis set that lists a session's streams expires this much later than the streams.

Within a day, each turn ends, or another worker continues the turn and adds it to the set again.
"""

_TIMEOUT_S = 1.0
_PAUSE_S = 1.0
_HIGH_SURROGATES = "\ud800", "\udbff"
_REFUSED_ID = "equal or smaller"


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One entry of a Redis stream."""

    id: EventId
    kind: str
    data: Mapping[str, Any]


def parse_entry(identifier: bytes, fields: Mapping[bytes, bytes]) -> StreamEntry | None:
    """Parse an entry as Redis returns it. `None`: it is invalid, which is logged."""
    try:
        epoch, _, number = identifier.decode("ascii").partition("-")
        data = load_object(fields[b"data"].decode())
        return StreamEntry(EventId(int(epoch), int(number)), fields[b"kind"].decode(), data)
    except (KeyError, ValueError, TypeError) as error:
        log.warning("an entry of a turn's events is invalid and skipped: %s", loggable(error))
        return None


class Outlet(Protocol):
    """Writes the events of turns."""

    def has_listener(self, turn_id: UUID) -> bool:
        """Whether a client follows the turn."""
        ...

    def changed(self, turn: TurnEvents, *, at_once: bool = False) -> None:
        """Report that the turn has new entries. The outlet writes them with the next batch or `at_once`."""
        ...

    def next_number(self) -> int:
        """A number greater than all numbers that this method has returned in this process.

        The ids of a turn's events therefore increase even if the turn is opened again under the same fencing token.
        """
        ...


class TurnEvents:
    """Collects the events of one turn under one lease. Thread-safe. Without an `outlet`, it discards the events.

    `token` is the fencing token of the lease. `epoch` is the number of messages that the turn has committed.
    """

    def __init__(self, turn_id: UUID, session_id: UUID, token: int, epoch: int, outlet: Outlet | None = None) -> None:
        self.turn_id = turn_id
        self.session_id = session_id
        self.listed = False
        """Whether this turn is in the Redis set of the session's turns that have a stream."""
        self._outlet = outlet
        self._lock = threading.Lock()
        self._token = token
        self._epoch = epoch
        self._text: list[str] = []
        self._length = 0
        self._written = 0
        """The number of characters of the step's text that were written to the stream."""
        self._pending: list[tuple[int, str, Mapping[str, Any]]] = []
        self._progress: dict[str, Mapping[str, str]] = {}
        """The last report of each call of the current step, by the call's id; `_reports`: those to write."""
        self._reports: set[str] = set()
        self._silent = False

    def delta(self, text: str) -> None:
        """Add streamed text of the current step."""
        with self._lock:
            self._text.append(text)
            self._length += len(text)
            first = self._written == 0
        self._changed(at_once=first)

    def progress(self, call_id: str, tool: str, text: str) -> None:
        """Record the progress of a call of the current step. Of several reports within a batch, the last is written."""
        given = {"call_id": call_id, "tool": tool, "text": text}
        with self._lock:
            if self._progress.get(call_id) == given:
                return
            if len(self._progress) >= _MOST_CALLS and call_id not in self._progress:
                return
            self._progress[call_id] = given
            self._reports.add(call_id)
        self._changed()

    def rewind(self) -> None:
        """Discard the text of the current step, and make clients discard it."""
        with self._lock:
            self._withdraw()
        self._changed(at_once=True)  # before the commit that may follow

    def committed(self, messages: int) -> None:
        """Record that `messages` more messages were committed, and discard the text of the current step."""
        with self._lock:
            self._epoch += messages
            self._text, self._length, self._written = [], 0, 0
            self._progress, self._reports = {}, set()
            self._append(COMMITTED, {})
        self._changed()

    def state(self, status: str) -> None:
        """Record that the turn's status has changed."""
        with self._lock:
            self._append(EventKind.STATE, {"status": status})
        self._changed()

    def take(self) -> list[StreamEntry]:
        """Remove and return the entries to write now. They count as written unless the caller calls `lost`."""
        with self._lock:
            if self._silent:
                return []
            pending, self._pending = self._pending, []
            if (delta := self._unwritten_text()) is not None:
                pending.append((self._epoch, EventKind.DELTA, delta))
            pending += [(self._epoch, EventKind.PROGRESS, self._progress[call_id]) for call_id in self._reports]
            self._reports = set()
            return [StreamEntry(self._id(epoch, kind), kind, data) for epoch, kind, data in pending]

    def lost(self) -> None:
        """Record that the entries of the last `take` may not have been written."""
        with self._lock:
            self._written = max(self._written, 1)
            self._reports = set(self._progress)
            self._withdraw(keep_text=True)

    def silence(self) -> None:
        """Write nothing from now on, because another worker writes this turn's events."""
        with self._lock:
            self._silent = True

    def _unwritten_text(self) -> dict[str, Any] | None:
        """The text that is not yet in the stream, with its start and end positions in the step's text."""
        if self._written == self._length:
            return None
        text = "".join(self._text)
        self._text = [text]
        begin, end = self._written, self._length
        if _HIGH_SURROGATES[0] <= text[-1] <= _HIGH_SURROGATES[1]:
            end -= 1  # do not split a surrogate pair: its second half is in the next piece
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

    def _changed(self, *, at_once: bool = False) -> None:
        if self._outlet is not None and self._outlet.has_listener(self.turn_id):
            self._outlet.changed(self, at_once=at_once)


class EventWriter:
    """Writes the events of this process's turns to the Redis at `url`, with `prefix` before each key."""

    def __init__(self, url: str, prefix: str, limits: StreamSettings, clock: Clock) -> None:
        self._prefix = prefix
        self._batch_s = limits.batch_ms / 1000
        self._ttl_ms = max(1, int(limits.ttl_s * 1000))
        # No retry: Redis would refuse the ids of a repeated XADD.
        self._client: Any = redis.Redis.from_url(
            client_url(url),
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=20,
        )
        self._listening = EventListening(self._client, prefix, clock, self._on_listener)
        self._turns: WeakValueDictionary[UUID, TurnEvents] = WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._condition = threading.Condition()
        self._waiting: dict[UUID, TurnEvents] = {}
        self._urgent: set[UUID] = set()
        self._due = 0.0
        self._closing = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="perdure-events", daemon=True)

    def start(self) -> None:
        self._listening.start()
        self._thread.start()

    def close(self) -> None:
        """Write the waiting events, and end the threads."""
        self._listening.close()
        with self._condition:
            self._closing.set()
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(_TIMEOUT_S * 2)
        self._client.close()

    def open(self, turn_id: UUID, session_id: UUID, token: int, epoch: int) -> TurnEvents:
        """Return the `TurnEvents` of a turn that begins or continues under the fencing token `token`.

        `epoch` is the number of messages that the turn has committed.
        """
        turn = TurnEvents(turn_id, session_id, token, epoch, self)
        self._turns[turn_id] = turn
        return turn

    def has_listener(self, turn_id: UUID) -> bool:
        return self._listening.has(turn_id)

    def followed(self) -> list[UUID]:
        """Turns that have a listener, at most `_MOST_FOLLOWED`."""
        return self._listening.turns()[:_MOST_FOLLOWED]

    def announce(self, turn_id: UUID, *, followed: bool = True) -> None:
        """Make the gateways read a turn again whose state has changed, if it has a listener or not `followed`."""
        if not followed or self.has_listener(turn_id):
            try:
                self._client.publish(news_channel(self._prefix), f"c {hexes([turn_id])}")
            except redis.RedisError as error:
                self._failed(error)

    def changed(self, turn: TurnEvents, *, at_once: bool = False) -> None:
        """Write the turn's events with the next batch, or `at_once`."""
        with self._condition:
            self._waiting[turn.turn_id] = turn
            if at_once:
                self._urgent.add(turn.turn_id)
            self._condition.notify()

    def next_number(self) -> int:
        return next(self._numbers)

    def _on_listener(self, turn_id: UUID) -> None:
        turn = self._turns.get(turn_id)
        if turn is not None:
            self.changed(turn)

    def _run(self) -> None:
        while turns := self._next():
            try:
                self._write([(turn, entries) for turn in turns if (entries := turn.take())])
            except Exception:
                log.exception("writing events raised an error and continues")

    def _next(self) -> list[TurnEvents]:
        """Wait until turns have entries to write, and return these turns.

        Returns urgent turns at once, and all waiting turns when a batch is due or the writer is closed. An empty list
        means that the writer is closed and no turn waits.
        """
        with self._condition:
            while not self._closing.is_set():
                left_s = self._due - time.monotonic()
                if self._waiting and left_s <= 0:
                    break
                if self._urgent:
                    urgent, self._urgent = self._urgent, set()
                    return [self._waiting.pop(turn_id) for turn_id in urgent]
                self._condition.wait(left_s if self._waiting else None)
            self._due = time.monotonic() + self._batch_s
            turns, self._waiting, self._urgent = list(self._waiting.values()), {}, set()
            return turns

    def _write(self, batches: list[tuple[TurnEvents, list[StreamEntry]]]) -> None:
        if not batches:
            return
        pipeline = self._client.pipeline(transaction=False)
        unlisted = [turn for turn, _ in batches if not turn.listed]
        # List the turns before writing their streams, because the erasure of a user deletes only listed streams.
        for turn in unlisted:
            self._list(pipeline, turn)
        for turn, entries in batches:
            self._append(pipeline, turn, entries)
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
        for turn in unlisted:
            added, kept = next(answers), next(answers)
            turn.listed = not isinstance(added, Exception) and not isinstance(kept, Exception)
        for turn, entries in batches:
            self._check(turn, [next(answers) for _ in entries])
            next(answers)  # the answer to PEXPIRE

    def _list(self, pipeline: Any, turn: TurnEvents) -> None:
        key = streams_key(self._prefix, turn.session_id)
        pipeline.sadd(key, str(turn.turn_id))
        pipeline.pexpire(key, self._ttl_ms + _LONGEST_TURN_MS)

    def _append(self, pipeline: Any, turn: TurnEvents, entries: list[StreamEntry]) -> None:
        key = stream_key(self._prefix, turn.turn_id)
        for entry in entries:
            fields = {"kind": entry.kind, "data": json.dumps(entry.data, ensure_ascii=False)}
            pipeline.xadd(key, fields, id=str(entry.id), maxlen=MAX_ENTRIES, approximate=True)
        pipeline.pexpire(key, self._ttl_ms)

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
            log.warning("events of turns cannot be written to Redis: %s", loggable(error))
        self._failing = True
