"""A worker that streams, a gateway's hub, and a client that applies events as the documentation describes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import pytest

from perdure.access.tenants import UserKey
from perdure.channels.http.stream.follow import Follower
from perdure.channels.http.stream.hub import Hub
from perdure.channels.http.threads import Threads
from perdure.clock import SystemClock
from perdure.events.event import Event, EventId, EventKind
from perdure.events.writer import EventWriter
from perdure.memory.redis.memory import RedisMemory
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.runtime import Runtime
from perdure.turns.committed import Committed, read_committed
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.run.loop import Runner
from tests.turns.conftest import harness
from tests.turns.harness import Harness

__all__ = ["harness"]

T = TypeVar("T")

PATIENCE_S = 20.0
PAUSE_S = 0.05


class Typist:
    """A model that the test controls: `type` streams text, and `reply` ends the call."""

    name = "typist"

    def __init__(self) -> None:
        self.called = threading.Semaphore(0)
        self._keys: queue.SimpleQueue[str | ModelReply | Exception | None] = queue.SimpleQueue()

    def type(self, *texts: str) -> None:
        """Stream these pieces."""
        for text in texts:
            self._keys.put(text)

    def withdraw(self) -> None:
        """Withdraw the streamed text, as happens before a fallback model replies."""
        self._keys.put(None)

    def reply(self, reply: str | ModelReply | Exception) -> None:
        """End the call: return `reply`, or raise it if it is an exception."""
        self._keys.put(ModelReply(reply, model=self.name) if isinstance(reply, str) else reply)

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Stream the text given to `type` until `reply` is called."""
        self.called.release()
        while True:
            try:
                key = self._keys.get(timeout=0.05)
            except queue.Empty:
                call.remaining()
                continue
            match key:
                case str():
                    call.delta(key)
                case None:
                    call.rewind()
                case Exception():
                    raise key
                case _:
                    return key


@dataclass
class Streaming:
    """A worker and a gateway's hub over one database and one Redis."""

    harness: Harness
    runtime: Runtime
    model: Typist
    workers: list[threading.Thread] = field(default_factory=list)

    def send(self, text: str = "hello", **given: Any) -> tuple[UUID, UUID]:
        """Accept a message. Returns the ids of its turn and its session."""
        accepted = accept(self.runtime, Incoming.model_validate({"user": UserKey("ana"), "text": text, **given}))
        return accepted.turn_id, accepted.session_id

    def start(self, session_id: UUID) -> threading.Thread:
        """Start a worker that runs the session's turns."""
        runner = Runner(self.runtime, "test")
        thread = threading.Thread(target=partial(runner.run, session_id), daemon=True)
        thread.start()
        self.workers.append(thread)
        return thread

    def ask(self, text: str = "hello") -> UUID:
        """Send a message and start a worker. Returns the turn's id after the worker has called the model."""
        turn_id, session_id = self.send(text)
        self.start(session_id)
        assert self.model.called.acquire(timeout=PATIENCE_S)
        return turn_id

    @asynccontextmanager
    async def hub(self) -> AsyncIterator[Watching]:
        """Run a gateway's hub within the block."""
        threads = Threads(4)
        hub = Hub(self.runtime, threads, lambda _: None)
        hub.start()
        try:
            yield Watching(self.runtime, hub, threads)
        finally:
            await hub.close()
            threads.close()


@dataclass
class Watching:
    """A gateway's hub, from which a test opens event streams."""

    runtime: Runtime
    hub: Hub
    threads: Threads

    def events(self, turn_id: UUID, last: EventId | None = None) -> AsyncIterator[Event | None]:
        """The turn's events after `last`; all of its events if `last` is `None`."""
        return Follower(self.hub, self._read, turn_id, last).events(PAUSE_S)

    async def _read(self, turn_id: UUID, after: int) -> Committed:
        return await self.threads.run(partial(read_committed, self.runtime.database, turn_id, after))


@dataclass
class Client:
    """A client that shows provisional text, keeps committed messages, and records the id of its last event."""

    last: EventId | None = None
    shown: str = ""
    committed: list[str] = field(default_factory=list)
    kinds: list[EventKind] = field(default_factory=list)
    done: dict[str, Any] | None = None
    states: list[dict[str, Any]] = field(default_factory=list)
    progress: list[tuple[str, str, str]] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """Apply an event to what the client shows and keeps."""
        self.last = event.id
        self.kinds.append(event.kind)
        match event.kind:
            case EventKind.DELTA:
                self.shown += event.data["text"]
            case EventKind.REWIND:
                self.shown = ""
            case EventKind.MESSAGE:
                self.shown = ""
                assert event.id.epoch == len(self.committed) + 1, "a message is missing or repeated"
                self.committed.append(event.data["content"])
            case EventKind.STATE:
                self.states.append(dict(event.data))
            case EventKind.PROGRESS:
                self.progress.append((event.data["call_id"], event.data["tool"], event.data["text"]))
            case EventKind.DONE:
                self.done = dict(event.data)
            case _:
                pass

    async def follow(self, events: AsyncIterator[Event | None], until: Callable[[Client], bool] | None = None) -> None:
        """Apply events until the stream ends or `until` is true."""
        async with asyncio.timeout(PATIENCE_S):
            async for event in events:
                if event is not None:
                    self.apply(event)
                    if until is not None and until(self):
                        return


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine."""
    return asyncio.run(main)


@pytest.fixture
def streaming(harness: Harness, redis_url: str) -> Iterator[Streaming]:
    """A worker that streams to Redis, with a `Typist` as its model."""
    clock = SystemClock()
    writer = EventWriter(redis_url, harness.settings.redis_prefix, harness.settings.stream, clock)
    model = Typist()
    harness.redis_memory = RedisMemory.at(redis_url, harness.settings.memory, clock)
    harness.events, harness.redis_url, harness.any_model = writer, redis_url, model
    writer.start()
    made = Streaming(harness, harness.runtime, model)
    yield made
    for thread in made.workers:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a worker still runs"
    writer.close()
    harness.redis_memory.close()
