"""Server-sent events: each has the lines `id`, `event` and `data` (JSON), in this order."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse

from perdure.events.event import Event

HEARTBEAT_S = 15.0
"""Seconds without an event after which a comment is sent, so that no proxy closes the connection."""

MEDIA_TYPE = "text/event-stream"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def encode(event: Event | None) -> bytes:
    """An event in the format of server-sent events; `None` becomes a comment."""
    if event is None:
        return b": still running\n\n"
    data = json.dumps(event.data, ensure_ascii=False, separators=(",", ":"))
    return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()


async def chunks(first: Event | None, others: AsyncIterator[Event | None]) -> AsyncIterator[bytes]:
    """`first` and then `others`, each encoded."""
    yield encode(first)
    async for event in others:
        yield encode(event)


def response(chunks: AsyncIterator[bytes]) -> StreamingResponse:
    """A streaming response with headers that forbid caching and buffering by proxies."""
    return StreamingResponse(chunks, media_type=MEDIA_TYPE, headers=_HEADERS)
