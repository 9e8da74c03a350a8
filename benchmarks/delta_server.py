"""A model server of constant work: every reply to Chat Completions has the same deltas, encoded once.

`python -m benchmarks.delta_server PORT` serves replies on loopback. The request's model decides how the deltas arrive:
`packet`, all in one write; `apart`, one every `INTERVAL_S` seconds. The server does not read the prompt.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

PACKET, APART = "packet", "apart"
DELTAS = tuple(f"word{number:02} " for number in range(50))
INTERVAL_S = 0.004

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(choices: list[dict[str, Any]], **members: Any) -> bytes:
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "deltas"}
    return _chunk(b"data: " + json.dumps({**base, "choices": choices, **members}).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _choice(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


_USAGE = {"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1_000}
_FIRST = _HEAD + _event([_choice({"role": "assistant", "content": ""})])
_EVENTS = [_event([_choice({"content": text})]) for text in DELTAS]
_LAST = _event([_choice({}, "stop")]) + _event([], usage=_USAGE) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(headers.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            body = json.loads(await reader.readexactly(length))
            if body["model"] == PACKET:
                writer.write(_FIRST + b"".join(_EVENTS) + _LAST)
                continue
            writer.write(_FIRST)
            clock = asyncio.get_running_loop()
            due = clock.time()
            for event in _EVENTS:
                due += INTERVAL_S
                await asyncio.sleep(max(due - clock.time(), 0))
                writer.write(event)
            writer.write(_LAST)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client has closed the connection
    finally:
        writer.close()


async def _main(port: int) -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", port, backlog=1_024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
