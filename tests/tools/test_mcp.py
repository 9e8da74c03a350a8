"""Tools of MCP servers over stdio and HTTP, including servers that fail or misbehave."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCRequest, JSONRPCResponse

from perdure import Agent, McpServer, OutcomeUnknown, ToolContext, ToolError, tool
from perdure.clock import MovedClock
from perdure.resilience.registry import Breakers
from perdure.settings import Settings
from perdure.tools.mcp.connections import Connections
from perdure.tools.mcp.filtering import FilteredTransport, Item, Streams
from perdure.tools.mcp.stdio import _next, _too_long
from perdure.tools.registry import Effect
from perdure.tools.sources import RunnableTool

PROGRAM = str(Path(__file__).with_name("mcp_server.py"))
WAIT_S = 60.0


class Rig:
    """MCP connections with a clock that the test advances."""

    def __init__(self, failure_threshold: int = 50) -> None:
        self.clock = MovedClock()
        breaker = {"failure_threshold": failure_threshold}
        settings = Settings.model_validate({"mcp": {"commands": sys.executable}, "breaker": breaker})
        self.breakers = Breakers(settings.breaker, self.clock)
        self.connections = Connections(settings, self.breakers, self.clock, jitter=lambda: 0.5)

    def tool(self, server: McpServer, name: str) -> RunnableTool:
        """Wait until `server` is connected; returns its tool `name`."""
        agent = Agent("a", "Answer.", tools=[server])
        self.until(lambda: agent.toolset(self.connections).find(f"{server.name}:{name}") is not None)
        found = agent.toolset(self.connections).find(f"{server.name}:{name}")
        assert found is not None
        return found

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, advancing the clock past the pauses between connection attempts."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "the condition did not become true in time"
            self.clock.advance(timedelta(seconds=1))
            time.sleep(0.02)

    @contextmanager
    def calling(self, add: RunnableTool) -> Iterator[Future[str]]:
        """A running call of the server's tool `add`. Its result is 3."""
        with ThreadPoolExecutor(1) as pool:
            yield pool.submit(add.call, {"a": 1, "b": 2}, context())

    def pass_pause(self, call: Future[str], caplog: pytest.LogCaptureFixture) -> None:
        """Advance the clock past the pause before the next connection attempt, but not to the time limit of `call`."""
        wait_for_process(lambda: call.done() or "is not connected" in caplog.text)
        wait([call], timeout=0.3)  # the pause begins shortly after that line is logged
        self.clock.advance(timedelta(seconds=2))

    def answers(self, server: McpServer) -> None:
        """Wait until a call of the server's tool `add` succeeds."""
        add = self.tool(server, "add")

        def answered() -> bool:
            try:
                return add.call({"a": 1, "b": 2}, context()) == "3"
            except ToolError:
                return False

        self.until(answered)


def context() -> ToolContext:
    """The context of a call."""
    return ToolContext("u", uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "cli", threading.Event())


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """The connections that most tests of this module share."""
    made = Rig()
    yield made
    made.connections.close()
    made.breakers.close()


@pytest.fixture(scope="module")
def local() -> McpServer:
    """The declaration of the test server as a child process, over stdio."""
    return McpServer("local", command=[sys.executable, PROGRAM, "stdio"], env={"GIVEN": "1"}, connect_timeout_s=WAIT_S)


@pytest.mark.long
def test_a_server_over_stdio_is_listed_and_called(rig: Rig, local: McpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent has its own tools and the server's tools.

    The server's tools keep their schemas, and their names begin with the server's name.
    """
    monkeypatch.setenv("PERDURE_SECRET_KEY", "ours")

    @tool
    def add(text: str) -> str:
        """Add to a note."""
        return text

    toolset = Agent("a", "Answer.", tools=[add, local]).toolset(rig.connections)
    found = toolset.find("local:add")

    assert found is not None
    assert toolset.names[:2] == ("add", "local:add")
    assert found.schema().description == "Add two numbers."
    assert found.schema().parameters["properties"]["b"]["description"] == "The other one."
    assert found.effect is Effect.UNSAFE
    assert found.call(found.parse('{"a": 2, "b": 3}'), context()) == "5"
    with pytest.raises(ToolError, match="they are empty"):
        found.parse("")


@pytest.mark.long
def test_a_server_gets_its_own_keys(rig: Rig, local: McpServer) -> None:
    """Anthropic refuses keys with brackets, so the model gets others."""
    found = rig.tool(local, "list_orders")
    assert set(found.schema().parameters["properties"]) == {"page_size_"}
    assert found.schema().parameters["required"] == ["page_size_"]
    arguments = found.parse('{"page_size_": {"page_size_": 3}}')
    assert found.call(arguments, context()) == "{'page[size]': {'page_size_': 3}}"
    with pytest.raises(ToolError, match="'page\\[size\\]' appears twice"):
        found.parse('{"page_size_": {}, "page[size]": {}}')


@pytest.mark.long
def test_a_server_gets_no_variable_of_perdure(rig: Rig, local: McpServer) -> None:
    """The server's process gets none of perdure's environment variables, because the server is not trusted."""
    names = rig.tool(local, "environment").call({}, context()).split()

    assert "GIVEN" in names
    assert set(names) <= {"GIVEN", "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LC_CTYPE"}


def test_a_call_carries_its_idempotency_key(rig: Rig, local: McpServer) -> None:
    """A call carries its effect id as an idempotency key, by which the server can deduplicate calls."""
    given = context()

    assert rig.tool(local, "key").call({}, given) == str(given.effect_id)


def test_a_servers_progress_is_passed_on(rig: Rig, local: McpServer) -> None:
    """A progress notification is a report of the call, with its message or its numbers."""
    reports: list[str] = []
    given = replace(context(), report=reports.append)

    assert rig.tool(local, "count").call({}, given) == "counted"
    wait_for_process(lambda: len(reports) == 2)
    assert reports == ["1 of 3", "almost there"]


def test_content_that_is_no_text_is_named(rig: Rig, local: McpServer) -> None:
    """A result names its images and links instead of including them.

    Characters that PostgreSQL cannot store are replaced.
    """
    text = rig.tool(local, "things").call({}, context())

    assert text == (
        "see:\N{REPLACEMENT CHARACTER}\n\n[image image/png, about 6 bytes: not shown]\n\n"
        "[resource note://1]\nremember\n\n[link to more: note://2]"
    )


@pytest.mark.parametrize("arguments", ["[1]", '{"a": NaN}', '{"a": 1, "a": 2}'])
def test_arguments_must_be_a_strict_object(rig: Rig, local: McpServer, arguments: str) -> None:
    """Arguments that are not a strict JSON object are refused. Only the server checks arguments against the schema."""
    with pytest.raises(ToolError, match="arguments of local:add were refused"):
        rig.tool(local, "add").parse(arguments)


def test_a_failure_is_the_servers_own_message(rig: Rig, local: McpServer) -> None:
    """If the server returns `isError` or refuses arguments, the model gets the server's own message."""
    with pytest.raises(ToolError, match=r"^No seats are left\.$"):
        rig.tool(local, "refuse").call({}, context())
    with pytest.raises(ToolError, match="validation error"):
        rig.tool(local, "add").call({"a": "x"}, context())


def test_an_answer_too_long_to_read_fails_only_its_own_call(rig: Rig, local: McpServer) -> None:
    """An oversized answer fails only its own call. The worker does not store the answer, and keeps the connection."""
    rig.answers(local)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(ToolError, match="longer than 4,000,000 bytes") as caught:
        rig.tool(local, "big").call({"megabytes": 60}, context())

    assert not isinstance(caught.value, OutcomeUnknown)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KiB
    assert rig.tool(local, "add").call({"a": 1, "b": 2}, context()) == "3"


def test_a_result_too_long_for_the_transcript_is_cut_visibly(rig: Rig, local: McpServer) -> None:
    """A result longer than the limit is cut with a notice, because it would fill the model's context."""
    text = rig.tool(local, "big").call({"megabytes": 1}, context())

    assert len(text) <= local.max_result_chars
    assert "[cut: 1,000,000 characters in all" in text


def test_an_abandoned_call_is_cancelled_at_the_server(rig: Rig, local: McpServer, tmp_path: Path) -> None:
    """A cancelled call ends at once, and the server is notified of the cancellation."""
    hang, given, mark = rig.tool(local, "hang"), context(), tmp_path / "mark"

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(hang.call, {"mark": str(mark)}, given)
        wait_for_process(mark.with_suffix(".begun").exists)
        given.cancelled.set()
        with pytest.raises(OutcomeUnknown, match="the turn no longer needs it"):
            call.result(WAIT_S)
    wait_for_process(mark.with_suffix(".cancelled").exists)


def test_a_call_without_an_answer_ends_at_its_time(rig: Rig, local: McpServer, tmp_path: Path) -> None:
    """If a call gets no answer in time, its outcome is unknown. Later calls to the server succeed."""
    hang, mark = rig.tool(local, "hang"), tmp_path / "mark"

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(hang.call, {"mark": str(mark)}, context())
        wait_for_process(mark.with_suffix(".begun").exists)
        rig.clock.advance(timedelta(seconds=31))
        with pytest.raises(OutcomeUnknown, match="none within 30 s"):
            call.result(WAIT_S)
    rig.answers(local)


@pytest.mark.long
def test_a_server_announces_a_new_tool(rig: Rig, local: McpServer) -> None:
    """A tool that a connected server adds later becomes available without a restart."""
    assert rig.tool(local, "grow").call({}, context()) == "grown"

    assert rig.tool(local, "grown").call({}, context()) == "new"


@pytest.mark.long
def test_a_server_that_dies_in_mid_call_is_started_again(
    rig: Rig, local: McpServer, caplog: pytest.LogCaptureFixture
) -> None:
    """If a server dies, the running call's outcome is unknown. The next call waits until the server runs again."""
    die, add = rig.tool(local, "die"), rig.tool(local, "add")

    with pytest.raises(OutcomeUnknown, match="local:die was called, but there is no answer"):
        die.call({}, context())

    assert "local:add" in Agent("a", "x", tools=[local]).toolset(rig.connections).names
    with rig.calling(add) as call:
        rig.pass_pause(call, caplog)
        assert call.result(WAIT_S) == "3"


@pytest.mark.long
def test_a_lost_server_is_waited_for_once(rig: Rig, tmp_path: Path) -> None:
    """A call waits a limited time for a server that died. Later calls fail at once. The server's tools stay listed."""
    mark = tmp_path / "started"
    script = f"import pathlib, runpy, sys; pathlib.Path({str(mark)!r}).touch(exist_ok=False)\n"
    script += f"sys.argv = ['', 'stdio']; runpy.run_path({PROGRAM!r}, run_name='__main__')"
    server = McpServer("once", command=[sys.executable, "-c", script], connect_timeout_s=WAIT_S)
    die, add = rig.tool(server, "die"), rig.tool(server, "add")
    with pytest.raises(OutcomeUnknown):
        die.call({}, context())

    with rig.calling(add) as call:
        rig.until(call.done)
        with pytest.raises(ToolError, match="Not called: the server once cannot be reached") as caught:
            call.result()
    assert not isinstance(caught.value, OutcomeUnknown)
    with pytest.raises(ToolError, match="Not called"):  # at once: the test does not advance the clock
        add.call({"a": 1, "b": 2}, context())
    assert "once:add" in Agent("a", "x", tools=[server]).toolset(rig.connections).names


@pytest.mark.exhaustive
def test_repeated_failures_open_a_servers_breaker(local: McpServer) -> None:
    """Repeated failures open the breaker of all the server's tools. A later success closes the breaker."""
    rig = Rig(failure_threshold=2)
    try:
        die, add = rig.tool(local, "die"), rig.tool(local, "add")

        def opened() -> bool:
            with pytest.raises(ToolError):  # the server dies or is not running
                die.call({}, context())
            return [(each.name, each.state) for each in rig.breakers.list()] == [("mcp:local", "open")]

        rig.until(opened)
        with pytest.raises(ToolError, match=r"Not called: the server local failed too often recently\. Try again in"):
            add.call({"a": 1, "b": 2}, context())
        rig.answers(local)
        assert [(each.name, each.state) for each in rig.breakers.list()] == [("mcp:local", "closed")]
    finally:
        rig.connections.close()


@pytest.mark.long
def test_a_flooding_server_is_killed() -> None:
    """A server that writes an endless line is killed. Its output is not kept in memory."""
    script = "import os\nwhile True: os.write(1, b'y' * 65536); os.write(2, b'z' * 65536)"
    server = McpServer("flood", command=[sys.executable, "-S", "-c", script], connect_timeout_s=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rig = Rig()
    try:
        assert rig.connections.tools([server]) == ()
        groups = set(rig.connections._process_groups)
    finally:
        rig.connections.close()

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KiB
    wait_for_process(lambda: not any(alive(group) for group in groups | rig.connections._process_groups))


def test_a_server_that_does_not_start_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    """If a server does not start, the cause is logged. Only the first turn waits for the server."""
    rig = Rig()
    server = McpServer("gone", command=[sys.executable, "-S", "-c", "raise SystemExit(7)"], connect_timeout_s=WAIT_S)
    try:
        assert rig.connections.tools([server]) == ()
        assert "MCP server gone is not connected" in caplog.text
        begun = time.monotonic()
        for _ in range(100):
            assert rig.connections.tools([server]) == ()
        assert time.monotonic() - begun < 10
    finally:
        rig.connections.close()


@pytest.mark.exhaustive
def test_a_server_over_http_is_called_again_after_an_outage(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """While an HTTP server cannot be reached, calls fail without being sent. After its restart, calls succeed again."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    remote = McpServer("remote", url=f"http://127.0.0.1:{port}/mcp", connect_timeout_s=WAIT_S, trust_hints=True)
    served = serve(port)
    try:
        rig.answers(remote)
        add, given = rig.tool(remote, "add"), context()
        assert add.effect is Effect.PURE
        assert rig.tool(remote, "key").call({}, given) == str(given.effect_id)
        with pytest.raises(ToolError, match="longer than"):
            rig.tool(remote, "big").call({"megabytes": 20}, context())
        with pytest.raises(OutcomeUnknown, match="remote:die was called, but there is no answer"):
            rig.tool(remote, "die").call({}, context())
        served.wait(WAIT_S)
        served = serve(port)
        with rig.calling(add) as call:
            rig.pass_pause(call, caplog)
            assert call.result(WAIT_S) == "3"
        served.kill()
        served.wait()
        with rig.calling(add) as call:
            rig.until(call.done)
            with pytest.raises(ToolError, match="Not called: the server remote cannot be reached") as caught:
                call.result()
        assert not isinstance(caught.value, OutcomeUnknown)
        served = serve(port)
        rig.answers(remote)
    finally:
        served.kill()
        served.wait()


@pytest.mark.long
def test_closing_leaves_no_process(rig: Rig, local: McpServer) -> None:
    """Closing the connections ends running calls, the servers and the servers' child processes.

    This test must be the last one that uses the shared server.
    """
    rig.answers(local)
    started = int(rig.tool(local, "child").call({}, context()))
    groups = set(rig.connections._process_groups)  # more than one if a former process of the server is still ending
    assert groups
    hang, add = rig.tool(local, "hang"), rig.tool(local, "add")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(hang.call, {"mark": "/nowhere/mark"}, context())
        rig.connections.close()
        with pytest.raises(ToolError):
            call.result(WAIT_S)

    wait_for_process(lambda: not any(map(alive, groups)) and not alive(started))
    with pytest.raises(ToolError, match="cannot be reached"):
        add.call({"a": 1, "b": 2}, context())


def test_a_servers_requests_are_answered_one_by_one() -> None:
    """A server's requests are answered one at a time. The SDK by itself would start a task for each request."""

    async def flooded() -> tuple[Any, int]:
        incoming, read = anyio.create_memory_object_stream[Item](2_000)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](2_000)
        for number in range(1_000):
            method = "ping" if number % 2 else "sampling/createMessage"
            await incoming.send(SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=number, method=method)))
        await incoming.send(ValueError("a line that was no message"))
        await incoming.send(SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=7, result={})))
        ended = anyio.Event()
        async with FilteredTransport(_Plain(read, write), ended) as (inbox, _):
            passed = await inbox.receive()
            incoming.close()
            with pytest.raises(anyio.EndOfStream):
                await inbox.receive()
            assert ended.is_set()
        count = outgoing.statistics().current_buffer_used
        for stream in (read, write, outgoing):
            stream.close()
        assert isinstance(passed, SessionMessage)
        return passed.message, count

    message, answered = anyio.run(flooded)

    assert message.id == 7
    assert answered == 1_000


@pytest.mark.parametrize(
    ("head", "tail", "found"),
    [
        (b'{"jsonrpc":"2.0","id":7,"result":{"content":[', b'xxxx"}]}}\n', 7),
        (b'{"id": 7, "jsonrpc": "2.0", "result": {"content"', b'xxxx"}]}}\n', 7),
        (b'{"result":{"content":[{"id":3,"text":"', b'xxxx"}]},"jsonrpc":"2.0","id":7}\n', 7),
        (b'{"result":{"content":[{"id":3,"text":"', b'xxxx"}]},"id":7,"jsonrpc":"2.0"}\n', 7),
        (b'{"result":{"content":[{"text":"', b'xxxx\\"jsonrpc\\":\\"2.0\\",\\"id\\":3}"}]}}\n', None),
    ],
)
def test_the_call_is_found_whose_answer_is_too_long(head: bytes, tail: bytes, found: int | None) -> None:
    """The id of an oversized answer is found at the answer's beginning or end, but never inside a string value."""
    refusal = _too_long((head, tail))

    assert (None if refusal is None else getattr(refusal.message, "id", None)) == found


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        (b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"', b'"}}'),
        (b'{"method": "notifications/message", "params": {"id": 7, "data": "', b'"}}'),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "sampling/createMessage", "params": {"data": "', b'"}}'),
        (b' {"id" : 7, "jsonrpc" : "2.0", "method" : "sampling/createMessage", "params": {"data": "', b'"}}'),
        (b'{"params":{"data":"', b'"},"method":"notifications/message","jsonrpc":"2.0"}'),
        (b'{"id":7,"params":{"data":"', b'"},"method":"sampling/createMessage"}'),
    ],
)
def test_what_a_server_sends_unasked_is_skipped_if_it_is_too_long(begins: bytes, ends: bytes) -> None:
    """An oversized notification or request from a server does not fail a call, and does not end the connection."""

    async def read() -> SessionMessage | None:
        stdout = asyncio.StreamReader(limit=1_000)
        stdout.feed_data(begins + b"x" * 9_000 + ends + b'\n{"jsonrpc":"2.0","id":8,"result":{}}\n')
        stdout.feed_eof()
        return await _next("s", stdout)

    found = asyncio.run(read())
    assert found is not None
    assert getattr(found.message, "id", None) == 8


class _Plain:
    """A transport that returns the given pair of streams."""

    def __init__(self, *streams: Any) -> None:
        self._streams: Any = streams

    async def __aenter__(self) -> Streams:
        streams: Streams = self._streams
        return streams

    async def __aexit__(self, *_: object) -> None:
        """Do nothing."""


def wait_for_process(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another process fulfils."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        os.kill(pid, signal.SIG_DFL)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def serve(port: int) -> subprocess.Popen[bytes]:
    """Start the test server over HTTP, and wait until it listens."""
    quiet = subprocess.DEVNULL
    served = subprocess.Popen([sys.executable, PROGRAM, "http", str(port)], stdout=quiet, stderr=quiet)
    wait_for_process(lambda: listens(port))
    return served


def listens(port: int) -> bool:
    """Whether a server listens on the port."""
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
