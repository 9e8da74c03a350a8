"""The client of the gateway's benchmark, in a process of its own: `python -m benchmarks.requester`.

Reads one order a line from stdin, a JSON object, and answers each with one line: the requests' latencies in
milliseconds, the seconds they took, and what was answered last. Each connection is kept alive and has one request
under way.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length: "


@dataclass
class Order:
    """Requests to send: `paths` and `bodies` in turn, on so many connections, until `seconds` have passed."""

    port: int
    method: str
    paths: list[str]
    bodies: list[dict[str, Any]]
    connections: int
    seconds: float
    status: int
    latencies: list[float] = field(default_factory=list)
    last: bytes = b""

    def requests(self) -> Iterator[bytes]:
        """The requests' bytes, without end."""
        number = 0
        while True:
            path = self.paths[number % len(self.paths)]
            body = b""
            if self.bodies:
                message = {**self.bodies[number % len(self.bodies)], "message_id": f"{time.time_ns()}"}
                body = json.dumps(message).encode()
            head = f"{self.method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            yield head.encode() + body
            number += 1


class _Connection(asyncio.Protocol):
    def __init__(self, order: Order, requests: Iterator[bytes], ends: float) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._order = order
        self._requests = requests
        self._ends = ends
        self._received = b""
        self._began = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(_HEAD_END)
        if not found or len(body) < _length(head):
            return
        now = time.perf_counter()
        if int(head[9:12]) != self._order.status:
            self.done.set_exception(RuntimeError(self._received.decode()))
            return
        self._order.latencies.append((now - self._began) * 1_000)
        self._order.last, self._received = body, b""
        if now < self._ends:
            self._send()
        else:
            self._transport.close()
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or RuntimeError("the server closed a connection that is kept alive"))

    def _send(self) -> None:
        request = next(self._requests)
        self._began = time.perf_counter()
        self._transport.write(request)


def _length(head: bytes) -> int:
    start = head.index(_LENGTH) + len(_LENGTH)
    return int(head[start : head.find(b"\r", start) if b"\r" in head[start:] else None])


async def _carry_out(order: Order) -> dict[str, Any]:
    loop, requests = asyncio.get_running_loop(), order.requests()
    began = time.perf_counter()
    made = [
        await loop.create_connection(
            lambda: _Connection(order, requests, began + order.seconds), "127.0.0.1", order.port
        )
        for _ in range(order.connections)
    ]
    await asyncio.gather(*(protocol.done for _, protocol in made))
    took = time.perf_counter() - began
    return {"latencies": order.latencies, "seconds": took, "last": json.loads(order.last)}


def main() -> None:
    """Carry out orders until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_carry_out(Order(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
