"""Clients that do not read what they asked for, and one that reads slowly."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from uuid import UUID

import httpx2
import psutil
import pytest
from sqlalchemy import text
from websockets.sync.client import connect as connect_socket

from perdure.access.tenants import UserKey
from perdure.channels.http.limits.shares import CHUNKED_BYTES, MOST_UNSENT_OF_USER, Unsent
from perdure.channels.http.openai.answers import read_answer
from perdure.channels.http.openai.wire import response_id
from perdure.cli.serve.connection_limits import Door
from perdure.runtime import Runtime
from perdure.sessions.reading import read_messages
from perdure.turns.calls.client import Exchange
from perdure.turns.committed import read_committed
from perdure.turns.inbox import accept
from perdure.turns.inbox.incoming import Incoming
from tests.cli.conftest import Perdure
from tests.cli.serving import PATIENCE_S, Served, connect, long_transcript, rest, serving
from tests.databases import engine_of
from tests.processes.faults import wait_until
from tests.processes.gateway import GatewayProcess

_UNREAD_S = 1.5
_MESSAGES, _SIZE = 800, 10_000


@pytest.fixture
def served(runtime: Runtime) -> Iterator[Served]:
    """A gateway that resets unread connections soon."""
    with serving(runtime, Door(1_000, unread_s=_UNREAD_S)) as made:
        yield made


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def _until_released(served: Served) -> None:
    gateway = served.app.state.gateway
    wait_until(
        lambda: (gateway._unsent._in_all, gateway._hub._open, gateway._streams._held) == (0, 0, {}),
        "streams and memory are released",
        PATIENCE_S,
    )


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/v1/sessions/{}/messages", marks=pytest.mark.long),
        pytest.param("/v1/users/ann/export", marks=pytest.mark.long),
        pytest.param("/v1/turns/{}/events", marks=pytest.mark.long),
    ],
)
def test_an_unread_response_is_cut_off(served: Served, database_url: str, path: str) -> None:
    """Otherwise a client that does not read holds a connection, and what the gateway has read for it, for ever."""
    session_id, turn_id = long_transcript(database_url, _MESSAGES, _SIZE)
    sent = _get(path.format(turn_id if "turns" in path else session_id))
    clients = [connect(served.address, sent) for _ in range(8)]
    served.until_connections(len(clients))
    served.until_connections(0)
    for client in clients:
        assert len(rest(client)) < _MESSAGES * _SIZE / 2
    _until_released(served)


@pytest.mark.long
def test_an_unread_socket_is_cut_off(served: Served, database_url: str) -> None:
    """A client whose WebSocket's frames are unread is disconnected, and follows nothing any more."""
    _, turn_id = long_transcript(database_url, _MESSAGES, _SIZE)
    url = served.url("/v1/ws").replace("http", "ws")
    with connect_socket(url, compression=None, max_queue=1, close_timeout=0.1) as client:
        client.send('{"type": "auth"}')
        client.send(json.dumps({"type": "follow", "turn_id": str(turn_id)}))
        served.until_connections(1)
        served.until_connections(0)
    _until_released(served)


@pytest.mark.long
def test_a_slow_reader_gets_the_whole_transcript(served: Served, runtime: Runtime, database_url: str) -> None:
    """A client that goes on reading is not cut off, although its response takes longer than the time limit."""
    session_id, _ = long_transcript(database_url, _MESSAGES, _SIZE)
    received, pause = bytearray(), threading.Event()
    with connect(served.address) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        client.sendall(_get(f"/v1/sessions/{session_id}/messages").replace(b"HTTP/1.1", b"HTTP/1.0"))
        while chunk := client.recv(2**17):
            received += chunk
            pause.wait(0.03)
    assert json.loads(received.partition(b"\r\n\r\n")[2]) == read_messages(runtime.database, session_id)


@pytest.mark.exhaustive
def test_a_client_that_reads_a_little_now_and_then_is_cut_off(served: Served, database_url: str) -> None:
    """Otherwise a client keeps its place and the memory for its response for hours."""
    session_id, _ = long_transcript(database_url, _MESSAGES, _SIZE)
    received, pause = 0, threading.Event()
    with connect(served.address) as client, suppress(ConnectionResetError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        client.sendall(_get(f"/v1/sessions/{session_id}/messages").replace(b"HTTP/1.1", b"HTTP/1.0"))
        while chunk := client.recv(2**12):
            received += len(chunk)
            pause.wait(0.1)
    assert received < _MESSAGES * _SIZE / 2
    _until_released(served)


def _events(served: Served, turn_id: UUID) -> list[tuple[str, str]]:
    """The id and the kind of each event of a settled turn."""
    text = httpx2.get(served.url(f"/v1/turns/{turn_id}/events"), timeout=PATIENCE_S).text
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in text.split("\n\n") if block]
    return [(block["id"], block["event"]) for block in blocks]


@pytest.mark.exhaustive
def test_events_of_a_long_turn_are_complete(served: Served, database_url: str) -> None:
    """The messages are read page by page. The last page is followed by the end, and only that one."""
    _, turn_id = long_transcript(database_url, _MESSAGES, _SIZE)
    database = served.app.state.gateway.runtime.database
    assert len(read_committed(database, turn_id).messages) < _MESSAGES / 10
    messages = [(f"{number}-0", "message") for number in range(1, _MESSAGES + 1)]
    assert _events(served, turn_id) == [*messages, (f"{_MESSAGES + 1}-0", "done")]
    assert read_answer(database, Exchange(turn_id)).text.count("x") == _MESSAGES * _SIZE


def _all_wait(unsent: Unsent, count: int) -> bool:
    """Whether `count` clients have read nothing for a while. Until then, they release their memory between pages."""
    waited = [place.reader.waited_s(time.monotonic()) for place in list(unsent._places)]
    return len(waited) == count and min(waited) > 0.3


@pytest.mark.exhaustive
def test_streams_reserve_memory_while_they_have_events(runtime: Runtime, database_url: str) -> None:
    """Events that the client has not read take memory of its user; a stream that waits for events takes none."""
    _, turn_id = long_transcript(database_url, _MESSAGES, _SIZE)
    idle = accept.accept(runtime, Incoming(user=UserKey("ben"), text="hello")).turn_id
    with serving(runtime, Door(1_000, unread_s=PATIENCE_S * 9)) as served, ExitStack() as stack:
        gateway = served.app.state.gateway
        gateway._unsent = Unsent(wait_s=0.1)
        for _ in range(16):
            stack.enter_context(connect(served.address, _get(f"/v1/turns/{turn_id}/events")))
        following = stack.enter_context(connect(served.address, _get(f"/v1/turns/{idle}/events")))
        assert b" 200 " in following.recv(100)
        wait_until(lambda: _all_wait(gateway._unsent, 16), "the streams' memory is reserved", PATIENCE_S)
        assert gateway._unsent._reserved == {"ann": 2**24}
        assert httpx2.get(served.url(f"/v1/turns/{turn_id}/events")).status_code == 429
        url = served.url("/v1/ws").replace("http", "ws")
        with connect_socket(url, close_timeout=0.1) as client:
            client.send('{"type": "auth"}')
            client.send(json.dumps({"type": "follow", "turn_id": str(turn_id)}))
            frames = [json.loads(client.recv(PATIENCE_S)) for _ in range(3)]
        assert [frame.get("code") for frame in frames] == [None, None, "RATE_LIMITED"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", ["/v1/sessions/{}/messages", "/v1/turns/{}/events"])
def test_slow_users_do_not_keep_others_from_reading(runtime: Runtime, database_url: str, path: str) -> None:
    """Users who have read nothing of their responses for a second make room, however many they are."""
    slow = [long_transcript(database_url, 200, _SIZE, f"slow {number}") for number in range(12)]
    mine, _ = long_transcript(database_url, 200, _SIZE)
    with serving(runtime, Door(1_000, unread_s=PATIENCE_S * 9)) as served, ExitStack() as stack:
        gateway = served.app.state.gateway
        gateway._unsent = Unsent(wait_s=PATIENCE_S, most=8 * CHUNKED_BYTES)
        for session_id, turn_id in slow:
            sent = _get(path.format(turn_id if "turns" in path else session_id))
            stack.enter_context(connect(served.address, sent))
        wait_until(lambda: len(gateway._unsent._places) == 8, "all memory is reserved", PATIENCE_S)
        for _ in range(3):
            response = httpx2.get(served.url(f"/v1/sessions/{mine}/messages"), timeout=PATIENCE_S / 3)
            assert len(response.json()) == 200


@pytest.mark.exhaustive
def test_the_process_has_a_bound_on_unsent_bytes(runtime: Runtime, database_url: str) -> None:
    """Above the bound, the connections whose clients have not read for the longest time are reset at once."""
    session_id, _ = long_transcript(database_url, _MESSAGES, _SIZE)
    with serving(runtime, Door(1_000, unread_s=PATIENCE_S * 9, most_unsent=100_000)) as served, ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connect(served.address, _get(f"/v1/sessions/{session_id}/messages")))
        served.until_connections(8)
        wait_until(lambda: len(served.server.server_state.connections) <= 2, "most are reset", PATIENCE_S)


@pytest.mark.exhaustive
def test_unread_transcripts_take_little_memory(perdure: Perdure, database_url: str) -> None:
    """Unread transcripts of 20 MB each do not grow the gateway, and their connections end."""
    session_id, _ = long_transcript(database_url, 2_000, _SIZE)
    gateway = GatewayProcess(perdure)
    gateway.start()
    try:
        assert gateway._process is not None
        process = psutil.Process(gateway._process.pid)
        port = int(gateway.url.rpartition(":")[2])
        path = f"/v1/sessions/{session_id}/messages"
        assert len(httpx2.get(gateway.url + path, timeout=60).json()) == 2_000
        before = process.memory_info().rss

        def established() -> int:
            found = process.net_connections("tcp")
            return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr[1] == port for each in found)

        with ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(connect(("127.0.0.1", port), _get(path)))
            wait_until(lambda: established() == 40, "the requests are open", 60)
            grown = 0

            def ended() -> bool:
                nonlocal grown
                grown = max(grown, process.memory_info().rss - before)
                return established() == 0

            wait_until(ended, "unread connections end", 120)
            assert grown < 100 * 2**20
        gateway.stop()
    finally:
        gateway.kill()


@pytest.mark.exhaustive
def test_long_answers_reserve_memory_for_all_their_text(runtime: Runtime, database_url: str) -> None:
    """An OpenAI response has a turn's whole text: a few long ones take all of their user's memory."""
    _, turn_id = long_transcript(database_url, _MESSAGES, _SIZE)
    engine = engine_of(database_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("UPDATE turns SET status = 'done', reply_seq = 800"))
    engine.dispose()
    with serving(runtime, Door(1_000, unread_s=PATIENCE_S * 9)) as served, ExitStack() as stack:
        gateway = served.app.state.gateway
        gateway._unsent = Unsent(wait_s=0.1)
        path = f"/v1/responses/{response_id(Exchange(turn_id))}"
        stack.enter_context(connect(served.address, _get(path)))
        wait_until(lambda: gateway._unsent._reserved == {"ann": 2**24}, "memory is reserved", PATIENCE_S)
        assert httpx2.get(served.url(path)).status_code == 429


@pytest.mark.exhaustive
def test_a_stream_reserves_memory_for_the_text_that_it_keeps(runtime: Runtime, database_url: str) -> None:
    """The closing events of the Responses API repeat the whole text, so each stream keeps it until its end."""
    _, turn_id = long_transcript(database_url, _MESSAGES, _SIZE)
    with serving(runtime, Door(1_000, unread_s=PATIENCE_S * 9)) as served:
        gateway = served.app.state.gateway
        with connect(served.address, _get(f"/v1/responses/{response_id(Exchange(turn_id))}?stream=true")) as client:
            client.settimeout(PATIENCE_S)
            read = 0
            while read < 4_000_000 and (chunk := client.recv(2**18)):
                read += len(chunk)
            assert gateway._unsent._reserved["ann"] >= 2 * 2**20
            assert gateway._unsent._reserved["ann"] <= MOST_UNSENT_OF_USER // 2 + 2 * CHUNKED_BYTES
        _until_released(served)


@pytest.mark.exhaustive
def test_streams_of_long_turns_give_way_between_pages(runtime: Runtime, database_url: str) -> None:
    """Clients that read their events at a modest rate do not keep the memory until the end of a long turn."""
    reading = [long_transcript(database_url, 400, _SIZE, f"reading {number}") for number in range(8)]
    mine, _ = long_transcript(database_url, 20, _SIZE)
    ended = threading.Event()

    def read(client: socket.socket) -> None:
        while not ended.is_set() and (chunk := client.recv(2**12)):
            ended.wait(len(chunk) / 150_000)

    with serving(runtime, Door(1_000)) as served, ExitStack() as stack:
        gateway = served.app.state.gateway
        gateway._unsent = Unsent(wait_s=8, most=8 * CHUNKED_BYTES)
        for _, turn_id in reading:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**13)
            client.settimeout(PATIENCE_S)
            client.connect(served.address)
            client.sendall(_get(f"/v1/turns/{turn_id}/events"))
            thread = threading.Thread(target=read, args=(client,))
            thread.start()
            stack.callback(thread.join)
        stack.callback(ended.set)
        wait_until(lambda: len(gateway._unsent._places) == 8, "all memory is reserved", PATIENCE_S)
        response = httpx2.get(served.url(f"/v1/sessions/{mine}/messages"), timeout=PATIENCE_S)
        assert response.status_code == 200


@pytest.mark.long
def test_a_stream_that_gets_no_memory_ends_without_an_internal_error(
    runtime: Runtime, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client of a stream resumes; the log has a line, and no traceback."""
    _, turn_id = long_transcript(database_url, _MESSAGES, _SIZE)
    _, other = long_transcript(database_url, 1, 10)
    engine = engine_of(database_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, serving(runtime, Door(1_000)) as served, ExitStack() as stack:
        connection.execute(text(f"UPDATE turns SET status = 'running', settled_at = NULL WHERE turn_id = '{other}'"))  # noqa: S608 (constants)
        gateway = served.app.state.gateway
        gateway._unsent = Unsent(wait_s=0.5)
        idle = stack.enter_context(connect(served.address, _get(f"/v1/turns/{other}/events")))
        wait_until(lambda: gateway._hub._open == 1 and not gateway._unsent._in_all, "the stream is idle", PATIENCE_S)
        for _ in range(16):
            stack.enter_context(connect(served.address, _get(f"/v1/turns/{turn_id}/events")))
        wait_until(lambda: len(gateway._unsent._places) == 16, "all memory is reserved", PATIENCE_S)
        connection.execute(text(f"UPDATE turns SET status = 'done', settled_at = now() WHERE turn_id = '{other}'"))  # noqa: S608 (constants)
        wait_until(lambda: gateway._hub._open == 16, "the stream ends", PATIENCE_S)
        assert b"event: state" in idle.recv(2**16)
    engine.dispose()
    assert "Exception in ASGI application" not in caplog.text
