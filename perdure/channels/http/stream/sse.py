"""Server-sent events: each has the lines `id`, `event` and `data` (JSON), in this order."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from perdure.errors import PerdureError, loggable
from perdure.events.event import Event

log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""Seconds without an event after which a comment is sent, so that no proxy closes the connection."""

MEDIA_TYPE = "text/event-stream"
_HEADERS = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
"""A proxy that compresses holds events back until its buffer is full; `no-transform` forbids it."""


def encode(event: Event | None) -> bytes:
    """An event in the format of server-sent events; `None` becomes a comment."""
    if event is None:
        return b": still running\n\n"
    data = json.dumps(event.data, ensure_ascii=False, separators=(",", ":"))
    return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()


async def chunks(first: Event | None, others: AsyncGenerator[Event | None, None]) -> AsyncGenerator[bytes, None]:
    """`first` and then `others`, each encoded. An error ends them early: the client resumes after its last event."""
    async with aclosing(others):
        yield encode(first)
        try:
            async for event in others:
                yield encode(event)
        except PerdureError as error:
            log.warning("a stream of events ends early: %s", loggable(error))


class _Stream(StreamingResponse):
    """Closes its generator when it ends: garbage collection would keep what the generator holds for long."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if isinstance(self.body_iterator, AsyncGenerator):
                await self.body_iterator.aclose()


def response(chunks: AsyncIterator[bytes]) -> StreamingResponse:
    """A streaming response with headers that forbid caching, compression and buffering by proxies."""
    return _Stream(chunks, media_type=MEDIA_TYPE, headers=_HEADERS)
