"""A gateway on a real socket in a thread of the test's process, and raw connections to it."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID, uuid4

import httpx2
from fastapi import FastAPI
from sqlalchemy import text

from perdure.channels.http.app import create_app
from perdure.cli.serve.connection_limits import Door
from perdure.cli.serve.listening import bind
from perdure.cli.serve.server import GatewayServer
from perdure.runtime import Runtime
from tests.databases import engine_of

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Served:
    """A gateway running in a thread."""

    app: FastAPI
    server: GatewayServer
    address: tuple[str, int]
    listener: socket.socket

    def interrupt(self) -> None:
        """Send the server a SIGTERM."""
        self.server.handle_exit(signal.SIGTERM, None)

    def waiting(self) -> int:
        """The number of turns that requests wait for."""
        return len(self.app.state.gateway._settlements._waiting)

    def url(self, path: str) -> str:
        """The URL of a path."""
        return "http://{}:{}{}".format(*self.address, path)

    def until_connections(self, number: int) -> None:
        """Wait until exactly `number` connections are open."""
        deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while (found := len(self.server.server_state.connections)) != number:
            assert time.monotonic() < deadline, f"{found} connections are open"
            pause.wait(0.01)

    def until(self, waiting: int) -> None:
        """Wait until requests wait for exactly `waiting` turns."""
        deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while self.waiting() != waiting:
            assert time.monotonic() < deadline, f"requests wait for {self.waiting()} turns"
            pause.wait(0.01)

    def until_refused(self) -> None:
        """Wait until `/readyz` responds with 503."""
        deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while httpx2.get("http://{}:{}/readyz".format(*self.address)).status_code != 503:
            assert time.monotonic() < deadline, "the gateway stays ready"
            pause.wait(0.01)


@contextmanager
def serving(runtime: Runtime, door: Door, listener: socket.socket | None = None) -> Iterator[Served]:
    """A gateway while the `with` block runs, on a free port or on `listener`."""
    app = create_app(runtime, lambda: True)
    listener = listener or bind("127.0.0.1", 0, "--port")
    server = GatewayServer(app, lambda: None, door)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield Served(app, server, listener.getsockname(), listener)
    finally:
        server.should_exit = True
        thread.join(timeout=PATIENCE_S)
        assert not thread.is_alive()


def connect(address: tuple[str, int], sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    """A connection over which `sent` has been sent."""
    client = socket.create_connection(address, timeout=PATIENCE_S, source_address=(source, 0))
    client.sendall(sent)
    return client


def rest(client: socket.socket) -> bytes:
    """Everything that the server sends until it closes or resets the connection."""
    received = b""
    with client:
        while True:
            try:
                chunk = client.recv(65_536)
            except ConnectionResetError:
                return received
            if not chunk:
                return received
            received += chunk


def long_transcript(database_url: str, messages: int, size: int, user: str = "ann") -> tuple[UUID, UUID]:
    """Store a settled turn with so many messages of `size` characters; returns the session's and the turn's id."""
    session_id, turn_id = uuid4(), uuid4()
    given = {"session": session_id, "turn": turn_id, "messages": messages, "size": size, "user": user}
    engine = engine_of(database_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in _LONG:
            connection.execute(text(statement), given)
    engine.dispose()
    return session_id, turn_id


_LONG = (
    "INSERT INTO users VALUES (:user, now()) ON CONFLICT DO NOTHING",
    """
    INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, channels,
                          message_count)
    VALUES (:session, :user, '', false, 'assistant', 'active', now(), now(), ARRAY['http'], :messages)
    """,
    """
    INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, first_seq, accepted_at,
                       settled_at)
    VALUES (:turn, :session, 1, :user, 'assistant', 'http', 5, 'cancelled', 1, now(), now())
    """,
    """
    INSERT INTO messages (session_id, seq, turn_id, role, content, channel, token_count, created_at)
    SELECT :session, n, :turn, 'assistant', n || repeat('x', :size), 'http', 1, now()
    FROM generate_series(1, :messages) AS n
    """,
)
