"""The client of the gateway's benchmark, in its own process: `python -m benchmarks.requester`.

The client reads orders from stdin, one JSON object per line. It answers each order with one JSON object: the latencies
of the requests in milliseconds, the seconds of the whole order, and the last response. Connections are kept alive, with
one request in flight on each.

In a closed loop (`per_s` is 0), a connection sends its next request as soon as the previous one is answered. This
measures capacity. In an open loop, the client sends `per_s` requests per second, however slow the server is. Latencies
in an open loop count from the time at which a request is due. They include the wait for a connection (no coordinated
omission).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length: "


_SEED = 1
"""Seed of the random gaps between requests of an open loop, so that all sides of a comparison get the same gaps."""


@dataclass
class Order:
    """Requests to send: `paths` and `bodies` in rotation, on `connections` connections, for `seconds`.

    `per_s` is the rate of an open loop; 0 means a closed loop. If `random` is true, the gaps between requests are
    exponentially distributed instead of equal. Each response must have the given `status`. `latencies` (in
    milliseconds) and `last` (the last response body) are results.
    """

    port: int
    method: str
    paths: list[str]
    bodies: list[dict[str, Any]]
    connections: int
    seconds: float
    status: int
    per_s: float = 0.0
    random: bool = False
    latencies: list[float] = field(default_factory=list)
    last: bytes = b""

    def requests(self) -> Iterator[bytes]:
        """Yield the bytes of each request, without end."""
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


class _Load:
    """Carries out one order. Tracks its connections, the idle connections, and the due times of queued requests."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.made: list[_Connection] = []
        self._requests = order.requests()
        self._idle: deque[_Connection] = deque()
        self._due: deque[float] = deque()
        self._gaps = random.Random(_SEED)  # noqa: S311 (arrivals)
        self._ends = 0.0

    def connection(self) -> _Connection:
        """Add a connection and return it. This is the protocol factory of `create_connection`."""
        self.made.append(_Connection(self))
        return self.made[-1]

    def begin(self) -> None:
        """Send the first requests."""
        now = time.perf_counter()
        self._ends = now + self.order.seconds
        if self.order.per_s:
            self._idle.extend(self.made)
            self._arrive(now)
            return
        for connection in self.made:
            connection.send(next(self._requests), now)

    def answered(self, connection: _Connection, now: float) -> None:
        """Reuse `connection` after a response.

        If a request is queued, send this request. If no request is queued and the order has ended, close `connection`.
        In all other cases, an open loop marks the connection idle, and a closed loop sends the next request.
        """
        if self._due:
            connection.send(next(self._requests), self._due.popleft())
        elif now >= self._ends:
            connection.close()
        elif self.order.per_s:
            self._idle.append(connection)
        else:
            connection.send(next(self._requests), now)

    def _arrive(self, due: float) -> None:
        """Send the request that is due, or queue it if no connection is idle; schedule the next request."""
        if due >= self._ends:
            for connection in self._idle:
                connection.close()
            return
        if self._idle:
            self._idle.popleft().send(next(self._requests), due)
        else:
            self._due.append(due)
        rate = self.order.per_s
        following = due + (self._gaps.expovariate(rate) if self.order.random else 1 / rate)
        asyncio.get_running_loop().call_later(following - time.perf_counter(), self._arrive, following)


class _Connection(asyncio.Protocol):
    def __init__(self, load: _Load) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._load = load
        self._received = b""
        self._began = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(_HEAD_END)
        if not found or len(body) < _length(head):
            return
        now, order = time.perf_counter(), self._load.order
        if int(head[9:12]) != order.status:
            self.done.set_exception(RuntimeError(self._received.decode()))
            return
        order.latencies.append((now - self._began) * 1_000)
        order.last, self._received = body, b""
        self._load.answered(self, now)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or RuntimeError("the server closed a connection that is kept alive"))

    def send(self, request: bytes, began: float) -> None:
        """Send a request; its latency counts from `began`."""
        self._began = began
        self._transport.write(request)

    def close(self) -> None:
        """Close the connection, which must have no request in flight."""
        self._transport.close()
        self.done.set_result(None)


def _length(head: bytes) -> int:
    start = head.index(_LENGTH) + len(_LENGTH)
    return int(head[start : head.find(b"\r", start) if b"\r" in head[start:] else None])


async def _carry_out(order: Order) -> dict[str, Any]:
    loop, load = asyncio.get_running_loop(), _Load(order)
    for _ in range(order.connections):
        await loop.create_connection(load.connection, "127.0.0.1", order.port)
    began = time.perf_counter()
    load.begin()
    await asyncio.gather(*(connection.done for connection in load.made))
    took = time.perf_counter() - began
    return {"latencies": order.latencies, "seconds": took, "last": json.loads(order.last)}


def main() -> None:
    """Carry out orders until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_carry_out(Order(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
