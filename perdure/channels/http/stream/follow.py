"""The events of one turn for one client, from any position.

Committed messages come from PostgreSQL, provisional events from the turn's Redis stream. A client's text never has a
gap: a piece of text is sent only if it continues the text that the client has. The client receives a `rewind` if text
was withdrawn, or if its position is unknown because Redis lost the stream.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any
from uuid import UUID

from perdure.channels.http.stream.hub import Hub, News
from perdure.events.event import COMMITTED, Event, EventId, EventKind, rewind_to
from perdure.events.writer import StreamEntry
from perdure.turns.committed import Committed

Read = Callable[[UUID, int], Awaitable[Committed]]
"""Runs `read_committed` in a thread. Takes the turn's id and the number of messages that the client has."""

Memory = Callable[[], AbstractAsyncContextManager[None]]
"""Reserves memory for a page of messages and a page of entries, until the client has been sent their events."""


class Follower:
    """Yields the events of a turn after the position `last`, or from the beginning if `last` is `None`."""

    def __init__(
        self, hub: Hub, read: Read, turn_id: UUID, last: EventId | None = None, memory: Memory = nullcontext
    ) -> None:
        self._hub = hub
        self._read = read
        self._turn_id = turn_id
        self._memory = memory
        self._client = _Client(last or EventId(0))
        self._settled = False

    async def events(self, pause_s: float) -> AsyncGenerator[Event | None, None]:
        """Yield events until the turn is settled or the gateway stops.

        Yields `None` after every `pause_s` seconds without an event.

        Raises:
            NotFound: there is no such turn.
            RateLimited: too many streams are open.
        """
        resumes = True
        while True:
            turn_id = self._turn_id
            with self._hub.listening(turn_id) as news:
                async with aclosing(self._catch_up(resumes=resumes, memory=self._memory)) as events:
                    async for event in events:
                        yield event
                while not (self._is_over() or turn_id != self._turn_id):
                    if news.pending:
                        async with self._memory():
                            async for event in self._new(news):
                                yield event
                    if not (self._is_over() or news.pending or await news.wait(pause_s)):
                        yield None
            if self._is_over():
                return
            resumes = False  # the turn's message has joined another turn, whose events follow

    def _is_over(self) -> bool:
        return self._settled or self._hub.stopped

    async def _catch_up(self, *, resumes: bool = False, memory: Memory = nullcontext) -> AsyncGenerator[Event, None]:
        """Yield the events of all that is committed and that the client does not have, page by page.

        Between two pages, streams that wait for memory get it first: a long turn does not keep its memory until its
        last page is read.
        """
        while True:
            async with memory():
                committed = await self._read(self._turn_id, self._client.messages)
                for event in await self._resume(committed) if resumes else ():
                    yield event
                for event in self._client.catch_up(committed):
                    yield event
            self._turn_id = committed.turn_id
            if committed.is_last:
                self._settled = committed.settled
                return
            resumes = False
            await asyncio.sleep(0)

    async def _resume(self, committed: Committed) -> list[Event]:
        """A `rewind` if the client has provisional events that are outdated or not in the stream; otherwise empty."""
        last = self._client.position
        if last.number == 0 and last.epoch <= committed.total:
            return []
        if committed.settled and last.epoch > committed.total:  # the client has the `error` event, or all events
            return []
        if last.epoch == committed.total and not committed.settled:
            known = await self._hub.entries_until(self._turn_id, last)
            if known and known[-1].id == last and self._client.restore(known):
                return []
        return [self._client.rewind_to(min(last.epoch, committed.total))]

    async def _new(self, news: News) -> AsyncIterator[Event]:
        """Yield the events since the last call. Stop once the turn is settled."""
        changed = news.take()
        async for entry in self._hub.entries(self._turn_id, self._client.position):
            if entry.id.epoch > self._client.messages or entry.kind == EventKind.STATE:
                changed = False
                async for event in self._catch_up():
                    yield event
            if self._settled:
                return
            for event in self._client.provisional(entry):
                yield event
        if changed:
            async for event in self._catch_up():
                yield event


class _Client:
    """The client's state: its position, its committed messages, and the length of the current step's text."""

    def __init__(self, last: EventId) -> None:
        self.position = last
        self.messages = last.epoch
        """The number of committed messages that the client has."""
        self._token = 0
        self._length = 0
        """The length of the client's text of the current step. `_token` is the fencing token of the text's writer."""
        self._shown = _hash("")
        """The hash of this text, which may be long."""
        self._has_gap = False
        """Whether a piece of the step's text did not continue this text."""
        self._status: tuple[object, ...] | None = None
        self._approvals: set[str] = set()
        self._decisions: set[str] = set()

    def restore(self, entries: list[StreamEntry]) -> bool:
        """Record that the client has these entries of the current epoch. False if its text is not known from them.

        The stream may lack entries that the client has received: Redis writes its file once a second, and a killed one
        loses what came after, without an error for a worker that connects again; a long stream loses its beginning.
        """
        self._move(entries[0].id.epoch)
        for entry in entries:
            for _ in self.provisional(entry):
                pass
        return not self._has_gap

    def rewind_to(self, epoch: int) -> Event:
        """The event that withdraws everything after the first `epoch` messages."""
        self._move(epoch)
        return self._event(EventKind.REWIND, rewind_to(epoch))

    def catch_up(self, committed: Committed) -> Iterator[Event]:
        """Yield new messages; after the last one, `error` and `done` of a settled turn, or an unsettled one's state."""
        if self._length and self._is_replaced(committed):
            yield self._withdraw()
        for number, message in enumerate(committed.messages, start=committed.after + 1):
            if number > self.messages:
                # Tool events precede their message: a client that resumes after the message would not receive them.
                for kind, data in _tool_events(message):
                    yield self._event(kind, data)
                self._move(number)
                yield self._event(EventKind.MESSAGE, message)
        if committed.is_last:
            yield from self._ending(committed) if committed.settled else self._state(committed.turn)

    def _is_replaced(self, committed: Committed) -> bool:
        """Whether the next reply does not begin with the text that the client has.

        It is the error's message of a failed turn, or a hook has changed it. The stream's `rewind` may come later.
        """
        numbered = enumerate(committed.messages, start=committed.after + 1)
        replies = (each for number, each in numbered if number > self.messages and each["role"] == "assistant")
        reply = next(replies, None)
        return reply is not None and ("error" in reply or not self._shows(reply["content"]))

    def _shows(self, content: str) -> bool:
        """Whether `content` begins with the client's text of the current step."""
        return _hash(content[: self._length]).digest() == self._shown.digest()

    def provisional(self, entry: StreamEntry) -> Iterator[Event]:
        """The events of one entry of the stream; empty if the entry belongs to another epoch."""
        if entry.id.epoch != self.messages or entry.id <= self.position or entry.kind == COMMITTED:
            return
        if entry.id.token != self._token:
            if self._length:
                yield self._withdraw()
            self._token = entry.id.token
        self.position = entry.id
        match entry.kind:
            case EventKind.DELTA:
                yield from self._continue(entry.data)
            case EventKind.REWIND if self._length:
                yield self._withdraw()
            case EventKind.PROGRESS:
                yield self._event(EventKind.PROGRESS, entry.data)
            case _:
                pass  # states come from PostgreSQL; other kinds are from a newer release

    def _ending(self, committed: Committed) -> Iterator[Event]:
        error_id = committed.error_id
        if error_id is not None and self.position < error_id:
            yield Event(error_id, EventKind.ERROR, committed.turn["error"])
        if self.position < committed.done_id:
            yield Event(committed.done_id, EventKind.DONE, committed.turn)

    def _state(self, turn: dict[str, Any]) -> Iterator[Event]:
        waiting = turn["waiting_for"]
        state = turn["status"], waiting, turn["attempts"], turn["resumed"]
        if state != self._status:
            self._status = state
            also = {} if waiting is None else {"waiting_for": waiting}
            also |= {} if turn["resumed"] is None else {"resumed": turn["resumed"]}
            yield self._event(EventKind.STATE, {"status": turn["status"], **also})
            if waiting is not None and waiting["progress"] is not None:  # of a task, which is stored
                data = {"call_id": waiting["call_id"], "tool": waiting["name"], "text": waiting["progress"]}
                yield self._event(EventKind.PROGRESS, data)
        for approval in turn["pending_approvals"]:
            if approval["call_id"] not in self._approvals:
                self._approvals.add(approval["call_id"])
                yield self._event(EventKind.APPROVAL_REQUIRED, approval)
        for decision in turn["decisions"]:
            if decision["call_id"] not in self._decisions:
                self._decisions.add(decision["call_id"])
                yield self._event(EventKind.APPROVAL_DECIDED, decision)

    def _continue(self, delta: Any) -> Iterator[Event]:
        if delta.get("at") == self._length:
            self._length = delta["to"]
            self._shown.update(delta["text"].encode())
            yield self._event(EventKind.DELTA, {"text": delta["text"]})
        else:
            self._has_gap = True

    def _withdraw(self) -> Event:
        self._length, self._shown, self._has_gap = 0, _hash(""), False
        return self._event(EventKind.REWIND, rewind_to(self.messages))

    def _move(self, messages: int) -> None:
        self.messages, self.position = messages, EventId(messages)
        self._token = self._length = 0
        self._shown, self._has_gap = _hash(""), False

    def _event(self, kind: EventKind, data: Any) -> Event:
        return Event(self.position, kind, data)


def _hash(text: str) -> hashlib.blake2b:
    return hashlib.blake2b(text.encode(), digest_size=16)


def _tool_events(message: dict[str, Any]) -> Iterator[tuple[EventKind, dict[str, Any]]]:
    """A `tool_call` for each tool call in a message; a `tool_result` if the message is a tool's result."""
    for call in message.get("tool_calls", ()):
        yield EventKind.TOOL_CALL, call
    if "tool_call_id" in message:
        yield EventKind.TOOL_RESULT, {"id": message["tool_call_id"], "content": message["content"]}
