"""MCP servers that other libraries made: what their statuses, sessions, lists and first messages mean."""

from __future__ import annotations

import json
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from perdure import McpServer, OutcomeUnknown, ToolError
from perdure.errors import SettingsError
from tests.tools.test_mcp import WAIT_S, Rig, context

JSON, TEXT = "application/json", "text/plain"
ADD = {"name": "add", "inputSchema": {"type": "object"}}
INITIALIZED = {"protocolVersion": "2025-06-18", "serverInfo": {"name": "s", "version": "1"}}
THREE = {"content": [{"type": "text", "text": "3"}]}


@dataclass
class Remote:
    """A server over HTTP with sessions. It announces no change of its tools, and forgets its sessions at a restart."""

    tools: list[dict[str, Any]] = field(default_factory=lambda: [ADD])
    answer: tuple[int, str, bytes] | None = None
    """The status, type and body of the answer to each call of a tool; by default its result."""
    refusal: tuple[int, str, bytes] = (404, TEXT, b"no such session")
    """The answer to a request of a session that the server does not know."""
    sessions: set[str] = field(default_factory=set)
    tokens: list[str | None] = field(default_factory=list)
    """The header `authorization` of each request."""
    headers: list[dict[str, str]] = field(default_factory=list)
    """All headers of each request, by their names in lower case."""
    together: threading.Barrier | None = None
    """Calls of an unknown session are answered when so many have arrived."""
    lists: int = 0
    """The number of lists of tools that were requested."""

    def restart(self) -> None:
        self.sessions.clear()

    def respond(self, request: dict[str, Any], session: str | None) -> tuple[int, str, bytes, str | None]:
        method = request["method"]
        if method == "initialize":
            self.sessions.add(made := uuid.uuid4().hex)
            return 200, JSON, _result(request, {**INITIALIZED, "capabilities": {"tools": {}}}), made
        if method == "server/discover":
            return 400, TEXT, b"no session", None
        self.lists += method == "tools/list"
        if session not in self.sessions:
            if method == "tools/call" and self.together is not None:
                self.together.wait(WAIT_S)
            return *self.refusal, None
        if method == "tools/list":
            return 200, JSON, _result(request, {"tools": self.tools}), None
        if method == "tools/call" and self.answer is not None:
            return *self.answer, None
        return (200, JSON, _result(request, THREE), None) if "id" in request else (202, JSON, b"", None)


def _result(request: dict[str, Any], result: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": request.get("id"), "result": result}).encode()


@contextmanager
def serving(remote: Remote) -> Iterator[McpServer]:
    """Run `remote`; yields its declaration."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            remote.tokens.append(self.headers.get("Authorization"))
            remote.headers.append({name.lower(): value for name, value in self.headers.items()})
            self._send(*remote.respond(request, self.headers.get("Mcp-Session-Id")))

        def do_DELETE(self) -> None:
            self._send(204, "", b"", None)

        def do_GET(self) -> None:
            self._send(405, TEXT, b"", None)

        def _send(self, status: int, kind: str, body: bytes, session: str | None) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Mcp-Session-Id": session}.items():
                if value:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield McpServer("remote", url=f"http://127.0.0.1:{server.server_port}/mcp", connect_timeout_s=WAIT_S)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Connections of this test alone."""
    made = Rig()
    yield made
    made.connections.close()
    made.breakers.close()


def _error(code: int) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": "Bad Request"}}).encode()


@pytest.mark.parametrize(
    ("answer", "raised", "text"),
    [
        pytest.param((504, JSON, b'{"message": "timed out"}'), OutcomeUnknown, "504 Gateway", id="a gateway's JSON"),
        pytest.param((500, "application/problem+json", b"{}"), OutcomeUnknown, "500 Internal", id="a problem"),
        pytest.param((202, JSON, b""), OutcomeUnknown, "202 without an answer", id="accepted"),
        pytest.param((204, "", b""), OutcomeUnknown, "204 without an answer", id="no content"),
        pytest.param((200, "text/html", b"<html>"), ToolError, "was called, but.* cannot be read", id="a page"),
        pytest.param((401, JSON, b'{"error": "invalid_token"}'), ToolError, "refused.*401 Unauth", id="a token"),
        pytest.param((429, TEXT, b"slow down"), ToolError, "refused the call: HTTP status 429 Too", id="too many"),
        pytest.param((400, JSON, _error(-32_000)), ToolError, "refused the call: Bad Request", id="refused"),
    ],
)
def test_a_status_says_whether_the_call_may_have_taken_effect(
    rig: Rig, answer: tuple[int, str, bytes], raised: type[ToolError], text: str
) -> None:
    """A call that a gateway gave up is in doubt, not refused: the model would make it again. A refusal has a reason."""
    with serving(Remote(answer=answer)) as server, pytest.raises(ToolError, match=text) as caught:
        rig.tool(server, "add").call({}, context())
    assert type(caught.value) is raised


def test_a_function_gives_the_headers_of_each_request(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """For tokens that expire. While it fails, no request is sent, and the log has the reason without its message."""
    remote, tokens = Remote(), count()
    fails = threading.Event()

    def signed() -> dict[str, str]:
        if fails.is_set():
            raise RuntimeError("SECRET")
        return {"Authorization": f"Bearer {next(tokens)}"}

    with serving(remote) as unsigned:
        server = replace(unsigned, headers=signed)
        add = rig.tool(server, "add")
        assert add.call({}, context()) == "3"
        assert len(set(remote.tokens)) == len(remote.tokens) >= 4  # initialize, initialized, tools/list, tools/call
        fails.set()
        sent = len(remote.tokens)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(_outcome, add.call)
            rig.until(call.done)
        assert "the server remote cannot be reached at present" in call.result()
        assert len(remote.tokens) == sent
        assert "the function of its headers failed: RuntimeError" in caplog.text
        assert "SECRET" not in caplog.text
        fails.clear()
        rig.answers(server)


@pytest.mark.parametrize("is_function", [False, True])
def test_the_headers_of_the_protocol_stay(rig: Rig, is_function: bool) -> None:
    """A server answers another `Accept` than the protocol's with 406. The client may have another name."""
    given = {"Accept": JSON, "content-type": TEXT, "Mcp-Session-Id": "x", "Accept-Encoding": "gzip", "User-Agent": "me"}
    remote = Remote()
    with serving(remote) as server:
        headers: Any = (lambda: given) if is_function else given
        assert rig.tool(replace(server, headers=headers), "add").call({}, context()) == "3"
    last = remote.headers[-1]
    assert [last["accept"], last["content-type"]] == ["application/json, text/event-stream", JSON]
    assert [last["mcp-session-id"]] == list(remote.sessions)
    assert [last["accept-encoding"], last["user-agent"]] == ["identity", "me"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"Authorization": "Bearer SECRET\n"}, "it returned the header 'Authorization' with characters that HTTP"),
        ({"Authorization": "Bearer SECRET…"}, "it returned the header 'Authorization' with characters that HTTP"),
        ({"X Y": "SECRET"}, "it returned the header 'X Y' with characters that HTTP"),
        ("SECRET", "it returned a value of type str, not a mapping"),
    ],
    ids=["a line break", "no ASCII", "a space in a name", "no mapping"],
)
def test_headers_that_cannot_be_sent_are_named_without_their_values(
    rig: Rig, caplog: pytest.LogCaptureFixture, given: Any, why: str
) -> None:
    """A token that is read from a file ends with a line break. The call is not sent, and no text has the token."""
    remote, headers = Remote(), [{"Authorization": "Bearer SECRET"}]
    with serving(remote) as unsigned:
        add = rig.tool(replace(unsigned, headers=lambda: headers[-1]), "add")
        assert add.call({}, context()) == "3"
        sent = len(remote.tokens)
        headers.append(given)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(_outcome, add.call)
            rig.until(call.done)
        outcome = call.result()
        rig.until(lambda: why in caplog.text)
    assert "OutcomeUnknown" not in outcome
    assert len(remote.tokens) == sent
    assert "SECRET" not in outcome + caplog.text
    if isinstance(given, dict):
        with pytest.raises(SettingsError, match="HTTP does not allow") as refused:
            replace(unsigned, headers=given)
        assert "SECRET" not in str(refused.value)


def test_a_function_of_headers_that_hangs_holds_up_no_call_and_no_shutdown(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given up after `connect_timeout_s`."""
    remote, hangs, over = Remote(), threading.Event(), threading.Event()

    def signed() -> dict[str, str]:
        if hangs.is_set():
            over.wait(WAIT_S)
        return {"Authorization": "Bearer 1"}

    with serving(remote) as unsigned, ThreadPoolExecutor(1) as pool:
        add = rig.tool(replace(unsigned, headers=signed, connect_timeout_s=1.0), "add")
        hangs.set()
        call = pool.submit(_outcome, add.call)
        rig.pass_pause(call, caplog)
        rig.until(call.done)
        rig.connections.close()
        over.set()
    assert "the server remote cannot be reached at present" in call.result()
    assert "MCP server remote is not connected" in caplog.text
    assert "are killed" not in caplog.text


def test_calls_of_a_dropped_session_are_sent_in_the_next_one(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A server that restarted refuses the calls of all turns. None of them took effect, so each is sent again."""
    remote = Remote()
    with serving(remote) as server:
        add = rig.tool(server, "add")
        remote.restart()
        remote.together = threading.Barrier(20)
        with ThreadPoolExecutor(20) as pool:
            calls = [pool.submit(_outcome, add.call) for _ in range(20)]
            rig.pass_pause(calls[0], caplog)
        assert Counter(each.result() for each in calls) == {"3": 20}


def _outcome(call: Callable[..., str]) -> str:
    try:
        return call({}, context())
    except ToolError as error:
        return repr(error)


@pytest.mark.parametrize("body", [b"unknown session", _error(-32_000)])
def test_a_server_may_refuse_a_dropped_session_with_another_status(rig: Rig, body: bytes) -> None:
    """Servers of the TypeScript SDK answer 400. The call is refused, and perdure opens a new session."""
    remote = Remote(refusal=(400, JSON if body.startswith(b"{") else TEXT, body))
    with serving(remote) as server:
        rig.answers(server)
        remote.restart()
        with pytest.raises(ToolError, match=r"refused the call: .*Bad Request"):
            rig.tool(server, "add").call({}, context())
        rig.answers(server)


@pytest.mark.parametrize("refusal", [(429, TEXT, b""), (429, JSON, _error(-32_000)), (502, TEXT, b"")])
def test_a_rate_limit_or_a_gateway_does_not_end_the_session(
    rig: Rig, refusal: tuple[int, str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A list that is refused for now is read again a minute later. Running calls keep their connection."""
    remote = Remote()
    with serving(remote) as server:
        rig.tool(server, "add")
        kept, remote.refusal = set(remote.sessions), refusal
        remote.sessions.clear()
        with pytest.raises(ToolError):
            rig.tool(server, "add").call({}, context())
        rig.clock.advance(timedelta(seconds=60))
        asked = remote.lists
        rig.until(lambda: bool(rig.connections.tools([server])) and remote.lists > asked)
        remote.sessions |= kept
        remote.tools = [ADD, {**ADD, "name": "subtract"}]
        rig.tool(server, "subtract")
    assert remote.sessions == kept
    assert "is not connected (" not in caplog.text


def test_a_server_over_http_changes_its_tools_unannounced(rig: Rig) -> None:
    """A server without a stream for its notifications is asked again, at most once a minute, while turns run."""
    remote = Remote()
    with serving(remote) as server:
        rig.tool(server, "add")
        remote.tools = [{**ADD, "name": "subtract"}]
        rig.clock.advance(timedelta(seconds=60))
        rig.tool(server, "subtract")
        assert len(rig.connections.tools([server])) == 1


def test_a_malformed_tool_does_not_hide_the_others(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The SDK refuses a whole list for one tool without a schema. The log names the tool and its fault once."""
    malformed: list[Any] = [
        {"name": "bare"},
        {"name": "untyped", "inputSchema": {}},
        {**ADD, "name": "odd", "title": 5},
        "text",
    ]
    with serving(Remote([*malformed, ADD])) as server:
        rig.tool(server, "add")
        rig.clock.advance(timedelta(seconds=60))
        rig.answers(server)
        assert [each.name for each in rig.connections.tools([server])] == ["remote:add"]
    for name, where in (("bare", "inputSchema"), ("untyped", "inputSchema.type"), ("odd", "title"), (None, "")):
        assert caplog.text.count(f"the declaration of {name!r} is malformed ({where}: ") == 1


PIPED = """
import json, sys, time
def send(**given): print(json.dumps({"jsonrpc": "2.0", **given}), flush=True)
def tool(name): return {"name": name, "inputSchema": {"type": "object"}}
mode = sys.argv[1]
for line in sys.stdin:
    given = json.loads(line)
    method, number = given["method"], given.get("id")
    if method == "server/discover":
        if mode == "strict":
            sys.exit("the first message is not initialize")
        send(id=number, error={"code": -32601, "message": "unknown"})
    elif method == "initialize":
        info = {"name": "s", "version": "1"}
        able = {"tools": {"listChanged": True}}
        send(id=number, result={"protocolVersion": "2025-06-18", "capabilities": able, "serverInfo": info})
    elif method == "tools/list" and mode == "pages":
        page = int(given.get("params", {}).get("cursor", "0"))
        send(id=number, result={"tools": [tool(f"t{page}")], "nextCursor": str(page + 1) if page < 49 else ""})
    elif method == "tools/list":
        send(id=number, result={"tools": [tool("add")]})
    elif method == "tools/call":
        if mode == "busy":
            send(method="notifications/tools/list_changed")
            time.sleep(3)
        send(id=number, result={"content": [{"type": "text", "text": "3"}]})
"""


@pytest.fixture
def piped(tmp_path: Path) -> Callable[..., McpServer]:
    """Declares a server over stdio with the given mode."""
    program = tmp_path / "server.py"
    program.write_text(PIPED)
    return lambda mode, **given: McpServer("piped", command=[sys.executable, "-S", str(program), mode], **given)


def test_a_server_that_knows_only_older_protocols_is_connected_at_once(
    rig: Rig, piped: Callable[..., McpServer]
) -> None:
    """Some servers end if the first message is not `initialize`. The first turn waits for the second attempt."""
    (add,) = rig.connections.tools([piped("strict", connect_timeout_s=WAIT_S)])
    assert add.call({}, context()) == "3"


def test_a_list_of_many_pages_is_read(
    rig: Rig, piped: Callable[..., McpServer], caplog: pytest.LogCaptureFixture
) -> None:
    """A list ends with an empty cursor, too."""
    assert len(rig.connections.tools([piped("pages", connect_timeout_s=WAIT_S)])) == 50
    assert "lists more tools" not in caplog.text


def test_a_server_that_is_busy_with_a_call_may_list_its_tools_later(
    rig: Rig, piped: Callable[..., McpServer], caplog: pytest.LogCaptureFixture
) -> None:
    """A server that answers one message at a time announces a change in the middle of a call, and keeps the call."""
    add = rig.tool(piped("busy", connect_timeout_s=2), "add")
    assert add.call({}, context()) == "3"
    assert "is not connected (" not in caplog.text
