"""The gateway's connections: bursts, upgrades that are refused or abandoned, and room for short requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_socket

from perdure.access.tenants import UserKey
from perdure.cli.serve.connection_limits import Door, Phase
from perdure.cli.serve.listening import ACCEPTED_AT_ONCE, bind
from perdure.runtime import Runtime
from perdure.turns.inbox import accept
from perdure.turns.inbox.incoming import Incoming
from tests.cli.serving import PATIENCE_S, Served, connect, rest, serving

pytestmark = pytest.mark.long

_COMPLETE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_LIMITS_S = {Phase.HEADER: 0.5, Phase.BODY: 0.5}
_MOST = 24


def _upgrade(path: str = "/v1/ws", key: str = "dGhlIHNhbXBsZSBub25jZQ==", more: str = "") -> bytes:
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{upgrade}Sec-WebSocket-Key: {key}\r\n{more}\r\n".encode()


UPGRADES = {
    "another origin": (_upgrade(more="Origin: http://foreign.example\r\n"), b" 403 "),
    "another route": (_upgrade("/v1/turns"), b" 403 "),
    "malformed": (_upgrade(key="AAAA"), b" 400 "),
    "without an auth frame": (_upgrade(), b" 101 "),
    "abandoned": (_upgrade(), b""),
}
"""Upgrades, and a part of the answer that the client reads before it leaves."""


@pytest.fixture
def served(runtime: Runtime) -> Iterator[Served]:
    """A gateway that may have few connections."""
    with serving(runtime, Door(_MOST, limits_s=_LIMITS_S)) as made:
        yield made


def test_a_burst_of_complete_requests_is_served(runtime: Runtime) -> None:
    """The loop accepts many connections before it reads from one, so new connections are not slow ones."""
    listener = bind("127.0.0.1", 0, "--port")
    clients = [connect(listener.getsockname(), _COMPLETE) for _ in range(3 * ACCEPTED_AT_ONCE)]
    with serving(runtime, Door(1_000, most_per_address=10), listener):
        assert [b" 200 " in rest(client) for client in clients] == [True] * len(clients)


def test_slow_bodies_make_room(served: Served) -> None:
    """Above the limit, a body that has been incomplete for long gives way to a request that is complete."""
    head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    half = [connect(served.address, head) for _ in range(_MOST + 1)]
    assert httpx2.get(served.url("/healthz")).status_code == 200
    assert rest(half[0]) == b""
    for client in half[1:]:
        client.close()


def test_idle_connections_make_room(served: Served) -> None:
    """Above the limit, the connection that has been idle for the longest time is closed."""
    idle = [connect(served.address, _COMPLETE.replace(b"close", b"keep-alive")) for _ in range(_MOST)]
    for client in idle:
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(65_536)
    for _ in range(3):
        assert httpx2.get(served.url("/healthz")).status_code == 200
    assert rest(idle[0]) == b""
    for client in idle[1:]:
        client.close()


@pytest.mark.parametrize("kind", UPGRADES)
def test_an_upgrade_frees_its_place(served: Served, kind: str) -> None:
    """Uvicorn does not notify the protocol that accepted a connection of the end of an upgraded one."""
    sent, answer = UPGRADES[kind]
    for _ in range(3 * _MOST):
        with connect(served.address, sent) as client:
            assert not answer or answer in client.recv(65_536)
    served.until_connections(0)
    assert httpx2.get(served.url("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "more",
    ["X: " + "x" * 9_000 + "\r\n", "".join(f"X{n}: x\r\n" for n in range(200)), "Content-Length: 5\r\n"],
    ids=["long header", "many headers", "body"],
)
def test_an_upgrade_that_is_rejected_silently_is_closed(served: Served, more: str) -> None:
    """The WebSocket library drops some requests without an answer, and waits for ever."""
    assert rest(connect(served.address, _upgrade(more=more))) == b""


def _signed_in(stack: ExitStack, served: Served) -> ClientConnection:
    socket = stack.enter_context(connect_socket(served.url("/v1/ws").replace("http", "ws"), open_timeout=PATIENCE_S))
    socket.send('{"type": "auth"}')
    assert json.loads(socket.recv(PATIENCE_S))["type"] == "ready"
    return socket


def test_sockets_leave_room_for_short_requests(runtime: Runtime, served: Served) -> None:
    """Long connections get 503 above three quarters of the limit, so that short requests and probes are served."""
    turn_id = accept.accept(runtime, Incoming(user=UserKey("ann"), text="hello")).turn_id
    with ExitStack() as stack:
        for _ in range(_MOST * 3 // 4):
            _signed_in(stack, served)
        for _ in range(_MOST):
            with pytest.raises(InvalidStatus) as refused:
                _signed_in(stack, served)
            assert refused.value.response.status_code == 503
            assert json.loads(refused.value.response.body or b"")["code"] == "UNAVAILABLE"
        assert httpx2.get(served.url(f"/v1/turns/{turn_id}/events")).status_code == 503
        assert httpx2.get(served.url(f"/v1/turns/{turn_id}?wait=9")).status_code == 503
        assert httpx2.get(served.url(f"/v1/turns/{turn_id}")).status_code == 200
    served.until_connections(0)
    with ExitStack() as stack:
        _signed_in(stack, served)


def test_requests_get_503_while_all_connections_are_busy(runtime: Runtime) -> None:
    """If no connection can be closed, a complete request is answered with the gateway's problem document."""
    turn_id = accept.accept(runtime, Incoming(user=UserKey("ann"), text="hello")).turn_id
    waiting = f"GET /v1/turns/{turn_id}?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with serving(runtime, Door(8)) as full, ExitStack() as stack:
        full.app.state.gateway.is_crowded = lambda: False  # as for requests that do not last, but take their time
        for _ in range(8):
            stack.enter_context(connect(full.address, waiting))
        full.until(waiting=1)
        full.until_connections(8)
        answer = httpx2.get(full.url("/v1/models"))
        assert httpx2.get(full.url("/healthz")).status_code == 200, "an orchestrator must not restart a busy gateway"
    assert (answer.status_code, answer.json()["code"]) == (503, "UNAVAILABLE")
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.exhaustive
def test_five_thousand_upgrades(runtime: Runtime) -> None:
    """After 5,000 upgrades without a key, refused, unanswered or abandoned, no connection counts any more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8_192) if hard > 0 else 8_192, hard))
    kinds = list(UPGRADES.values())
    answered = itertools.count()

    async def upgrade(number: int, address: tuple[str, int], places: asyncio.Semaphore) -> None:
        sent, answer = kinds[number % len(kinds)]
        async with places:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            if answer:
                with suppress(asyncio.IncompleteReadError):  # on busy cores, a header may arrive too late
                    assert answer in await reader.readuntil(b"\r\n")
                    next(answered)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def upgrade_all(address: tuple[str, int]) -> None:
        places = asyncio.Semaphore(150)
        await asyncio.gather(*(upgrade(number, address, places) for number in range(5_000)))

    with serving(runtime, Door(400)) as served:
        asyncio.run(upgrade_all(served.address))
        assert next(answered) > 500
        served.until_connections(0)
        assert httpx2.get(served.url("/healthz")).status_code == 200
