"""Wakes the streams and the waiting requests of one gateway when their turns change.

Workers announce turns with new events, and settled turns, on one Redis channel. The gateway subscribes to the channel
on one connection and reads the turns' streams on another. Every `ANNOUNCE_S` seconds, the gateway announces to the
workers which turns have listeners. Every `_LOOK_S` seconds, and more often while Redis is unavailable, one query reads
the turns' states from PostgreSQL. This query finds changes that Redis lost, and changes that no worker announced.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import redis.asyncio
from sqlalchemy.exc import SQLAlchemyError

from perdure.channels.http.threads import Threads
from perdure.errors import PerdureError, RateLimited, loggable
from perdure.events.event import EventId, news_channel, parse_hexes
from perdure.events.listening import ANNOUNCE_S, announce
from perdure.events.writer import StreamEntry, parse_entry
from perdure.memory.redis.event_streams import stream_key
from perdure.redis import client_url
from perdure.runtime import Runtime
from perdure.turns.committed import states_of

log = logging.getLogger(__name__)

_LOOK_S = 2.0
_LOOK_WITHOUT_REDIS_S = 0.25
_TIMEOUT_S = 1.0
_PAUSE_S = 1.0
_RETRY_AFTER_S = 5.0
_CANCEL_AGAIN_S = 0.1
_ERASED: tuple[object, ...] = ()
"""The state of a turn that the database does not have: its streams read it, and end."""

_MOST_READ = 1_000
"""The most stream entries that one `XRANGE` reads."""

_READS = 32
"""The number of concurrent reads; each occupies a connection to Redis, of which redis-py refuses the 101st."""


@dataclass(eq=False)
class News:
    """The changes of one turn that wait to be processed by one client's open stream."""

    pending: bool = True
    """Whether there are changes to take: Redis may have new entries."""
    _changed: bool = False
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> bool:
        """Take all changes; returns whether the turn's state may have changed, too."""
        changed = self._changed
        self.pending = self._changed = False
        return changed

    def add(self, *, changed: bool) -> None:
        """Record new entries and wake the stream. `changed`: the turn's state may have changed, too."""
        self.pending = True
        self._changed |= changed
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for a change; returns whether there is one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        woken = self._event.is_set()
        self._event.clear()
        return woken


class Hub:
    """Wakes listeners in one event loop. `on_settled` is called with the turns that workers announce as settled."""

    def __init__(self, runtime: Runtime, threads: Threads, on_settled: Callable[[list[UUID]], None]) -> None:
        settings = runtime.settings
        self._database = runtime.database
        self._clock = runtime.clock
        self._prefix = settings.redis_prefix
        self._most = settings.stream.max_open
        self._threads = threads
        self._on_settled = on_settled
        self._listeners: defaultdict[UUID, list[News]] = defaultdict(list)
        self._open = 0
        self._states: dict[UUID, tuple[object, ...]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._new: set[UUID] = set()
        self._announce_soon = asyncio.Event()
        self._has_listeners = asyncio.Event()
        self.connected = False
        self.stopped = False
        # Any: redis-py's types mix the values of its synchronous and its asynchronous client.
        self._client: Any = _client(runtime.redis_url)
        self._reads = asyncio.Semaphore(_READS)

    def start(self) -> None:
        """Start the tasks that subscribe, announce listeners and poll PostgreSQL."""
        tasks = [self._look_forever()]
        if self._client is not None:
            tasks += [self._subscribe_forever(), self._announce_forever()]
        self._tasks = [asyncio.ensure_future(_logged(task)) for task in tasks]

    def stop(self) -> None:
        """Wake the open streams, which then end."""
        self.stopped = True
        for listeners in self._listeners.values():
            for news in listeners:
                news.add(changed=False)

    async def close(self) -> None:
        """End the tasks and close the connections."""
        pending = set(self._tasks)
        while pending:  # see `_answered`: redis-py may also connect again while it listens
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
        if self._client is not None:
            await self._client.aclose()

    @contextmanager
    def listening(self, turn_id: UUID) -> Iterator[News]:
        """Register an open stream of a turn until the `with` block ends; yields the stream's news.

        Raises:
            RateLimited: `PERDURE_STREAM__MAX_OPEN` streams are open.
        """
        if self._open >= self._most:
            raise RateLimited(
                f"This gateway has {self._most} open streams (PERDURE_STREAM__MAX_OPEN). Try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        news = News()
        self._open += 1
        self._listeners[turn_id].append(news)
        self._new.add(turn_id)
        self._announce_soon.set()
        self._has_listeners.set()
        try:
            yield news
        finally:
            self._open -= 1
            self._listeners[turn_id].remove(news)
            if not self._listeners[turn_id]:
                del self._listeners[turn_id]
                self._states.pop(turn_id, None)
            if not self._listeners:
                self._has_listeners.clear()

    def entries(self, turn_id: UUID, after: EventId) -> AsyncIterator[StreamEntry]:
        """The entries of a turn's stream after the id `after`; none while Redis is unavailable."""
        return self._range(turn_id, f"({after}", "+")

    async def entries_until(self, turn_id: UUID, last: EventId) -> list[StreamEntry]:
        """The entries in the epoch of `last`, up to and including `last`; empty while Redis is unavailable."""
        return [entry async for entry in self._range(turn_id, str(EventId(last.epoch)), str(last))]

    async def _range(self, turn_id: UUID, first: str, last: str) -> AsyncIterator[StreamEntry]:
        """Yield the entries of a range, and read the next ones when those before them are taken."""
        rows: list[Any] | None = None
        while self._client is not None and (rows is None or len(rows) == _MOST_READ):
            try:
                async with self._reads:
                    key = stream_key(self._prefix, turn_id)
                    rows = await _answered(self._client.xrange(key, first, last, count=_MOST_READ))
            except redis.RedisError as error:
                log.warning("the events of turn %s cannot be read: %s", turn_id, loggable(error))
                return
            for row in rows or ():
                first = f"({row[0].decode()}"
                if (entry := parse_entry(*row)) is not None:
                    yield entry

    async def _subscribe_forever(self) -> None:
        while True:
            try:
                async with self._client.pubsub(ignore_subscribe_messages=True) as subscription:
                    await _answered(subscription.subscribe(news_channel(self._prefix)))
                    self.connected = True
                    self._wake_all()
                    async for message in subscription.listen():
                        self._on_news(message["data"])
            except (redis.RedisError, OSError) as error:
                if self.connected:
                    log.warning("streams and waiting requests poll PostgreSQL, without Redis: %s", loggable(error))
            finally:
                self.connected = False
            await asyncio.sleep(_PAUSE_S)

    def _on_news(self, message: bytes) -> None:
        settled = message[:2] == b"s "
        changed = settled or message[:2] == b"c "
        turn_ids = parse_hexes(message[2:])
        if changed:
            self._on_settled(turn_ids)
        for turn_id in turn_ids:
            for news in self._listeners.get(turn_id, ()):
                news.add(changed=changed)

    def _wake_all(self) -> None:
        for listeners in self._listeners.values():
            for news in listeners:
                news.add(changed=True)
        self._new.update(self._listeners)
        self._announce_soon.set()

    async def _announce_forever(self) -> None:
        """Announce turns with new listeners at once, and all turns with listeners every `ANNOUNCE_S` seconds."""
        loop = asyncio.get_running_loop()
        due = loop.time() + ANNOUNCE_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._announce_soon.wait()
            self._announce_soon.clear()
            new, self._new = self._new, set()
            if loop.time() >= due:
                new, due = set(self._listeners), loop.time() + ANNOUNCE_S
            if new:
                await self._announce(list(new))

    async def _announce(self, turn_ids: list[UUID]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        announce(pipeline, self._prefix, self._clock.now().timestamp(), turn_ids)
        try:
            await _answered(pipeline.execute())
        except (redis.RedisError, OSError) as error:
            log.warning("listeners of %d turns cannot be announced to the workers: %s", len(turn_ids), loggable(error))

    async def _look_forever(self) -> None:
        while True:
            await self._has_listeners.wait()
            await asyncio.sleep(_LOOK_S if self.connected else _LOOK_WITHOUT_REDIS_S)
            turn_ids = list(self._listeners)
            try:
                states = await self._threads.run(partial(states_of, self._database, turn_ids))
            except (SQLAlchemyError, PerdureError) as error:
                log.warning("streams cannot read the state of their turns from PostgreSQL: %s", loggable(error))
                continue
            for turn_id in turn_ids:
                state = states.get(turn_id, _ERASED)
                listeners = self._listeners.get(turn_id, ())
                if not listeners or self._states.get(turn_id) == state:
                    continue
                self._states[turn_id] = state
                for news in listeners:
                    news.add(changed=True)


async def _answered(command: Awaitable[Any]) -> Any:
    """The answer to a command. A cancellation that arrives while redis-py connects is often lost: raised here instead.

    Otherwise, an event loop that ends without `Hub.close`, as `asyncio.run` may, waits for its tasks without end.
    """
    answer = await command
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return answer


async def _logged(task: Coroutine[Any, Any, None]) -> None:
    try:
        await task
    except Exception:
        log.exception("streams and waiting requests of this gateway are woken late: a task has ended")


def _client(url: str | None) -> Any:
    if url is None:
        return None
    return redis.asyncio.Redis.from_url(
        client_url(url),
        socket_connect_timeout=_TIMEOUT_S,
        health_check_interval=20,
    )
