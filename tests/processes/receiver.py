"""HTTP services that receive replies on free loopback ports: `Receiver` answers, `SilentReceiver` never does."""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Delivery:
    """One POST as received."""

    raw: bytes
    headers: Mapping[str, str]

    @property
    def body(self) -> dict[str, Any]:
        """The parsed body."""
        body: dict[str, Any] = json.loads(self.raw)
        return body


class Receiver:
    """Answers each request with the next of `statuses`, or with 204 if none is left. Appends each request to `came`."""

    def __init__(self) -> None:
        self.statuses: deque[int] = deque()
        self.came: list[Delivery] = []
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="receiver", daemon=True).start()

    @property
    def url(self) -> str:
        """The URL for `reply_to`."""
        return f"http://127.0.0.1:{self._server.server_port}/replies"

    def of(self, turn_id: str) -> list[Delivery]:
        """The deliveries of one turn."""
        return [each for each in list(self.came) if each.body["turn_id"] == turn_id]

    def take(self, delivery: Delivery) -> int:
        """Record a delivery; returns the status to answer."""
        self.came.append(delivery)
        return self.statuses.popleft() if self.statuses else 204

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class SilentReceiver:
    """Accepts connections and never answers; `connections` counts them."""

    def __init__(self) -> None:
        self.connections = 0
        self._held: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0), backlog=100)
        threading.Thread(target=self._accept, name="silent-receiver", daemon=True).start()

    @property
    def url(self) -> str:
        """The URL for `reply_to`."""
        return f"http://127.0.0.1:{self._server.getsockname()[1]}/replies"

    def close(self) -> None:
        """Close the server and its connections."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for each in self._held:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # `close` was called
            self._held.append(connection)
            self.connections += 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, owner: Receiver) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because the tests kill workers in the middle of requests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        raw = self.rfile.read(length)
        if len(raw) < length:  # the sender died in the middle of the request
            return
        self.send_response(self.server.owner.take(Delivery(raw, dict(self.headers))))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the parent's name)
        """Log nothing on stderr."""
