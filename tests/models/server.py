"""The base class of the providers' test servers, with scripted responses.

A response is streamed or whole, and correct or faulty: late, truncated, malformed or missing. The server records every
request. To a request that the provider would refuse, the server responds with status 400. A reply therefore shows that
the request was valid. The subclasses are in `openai_server` and `anthropic_server`.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self, assert_never

Wire = Mapping[str, Any]

_HEARTBEAT_S = 0.05


@dataclass(frozen=True)
class Call:
    """A tool call in an answer."""

    name: str
    arguments: str = "{}"
    id: str = "call_1"


@dataclass(frozen=True)
class Answer:
    """A valid reply. It is streamed if the request asks for a stream.

    A stream has pieces of `piece` characters, sent at intervals of `interval_s` seconds. `finish_reason` is a value of
    Chat Completions. `None` means "tool_calls" if the reply has calls, otherwise "stop".
    """

    text: str = ""
    calls: Sequence[Call] = ()
    piece: int = 4
    latency_s: float = 0.0
    interval_s: float = 0.0
    finish_reason: str | None = None
    usage: Wire | None = field(default_factory=lambda: {"prompt_tokens": 11, "completion_tokens": 7})


@dataclass(frozen=True)
class Chunks:
    """A stream of exactly these chunks or events.

    `done`: whether the stream's end mark follows the last chunk. `hang`: whether the response then stays open, with
    `heartbeat` sent again and again.
    """

    chunks: Sequence[Any]
    done: bool = True
    hang: bool = False
    heartbeat: bytes = b""


@dataclass(frozen=True)
class Status:
    """An error response in the provider's format."""

    status: int
    code: str | None = None
    message: str = "An error."
    headers: Wire = field(default_factory=dict)


@dataclass(frozen=True)
class Broken:
    """A stream that breaks after the first `after` chunks of `answer`.

    `then` says what the server does next. "close": it closes the connection. "hang": it keeps the connection open, but
    sends nothing more. An error or bytes: it sends the error or the bytes as the last chunk.
    """

    answer: Answer
    after: int
    then: Literal["close", "hang"] | Status | bytes


@dataclass(frozen=True)
class Raw:
    """A response with exactly these bytes as its body.

    `promised` is the `Content-Length`, by default the length of `body`. A larger value simulates a lost connection.
    """

    body: bytes
    content_type: str = "text/event-stream"
    promised: int | None = None
    status: int = 200
    headers: Wire = field(default_factory=dict)


@dataclass(frozen=True)
class Silence:
    """No response until the server stops. With `after_headers`, the server sends the headers, but no body."""

    after_headers: bool = False


@dataclass(frozen=True)
class Drip:
    """A stream without events: `endless` and dots, sent one byte every `interval_s` seconds."""

    interval_s: float = 0.02


Step = Answer | Chunks | Status | Broken | Raw | Silence | Drip
Player = Callable[[Wire], Step]


def play(last: str, tool: tuple[str, Wire] | None, latency_s: float = 0.0, words: int = 20) -> Answer:
    """A call of `tool`, a pair of name and schema. If `tool` is `None`, a reply that begins with `last`.

    `last` is the text of the request's last message or tool result. In the reply, `words - 1` filler words follow it.
    """
    if tool is None:
        filler = " ".join(f"word{number}" for number in range(max(0, words - 1)))
        return Answer(f"{last} {filler}".strip(), latency_s=latency_s)
    examples = {"string": "12*7+5", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    name, schema = tool
    required = {part: schema["properties"][part] for part in schema.get("required", [])}
    arguments = {part: examples.get(each.get("type")) for part, each in required.items()}
    return Answer(calls=[Call(name, json.dumps(arguments))], latency_s=latency_s)


def pieces(text: str, size: int) -> list[str]:
    """`text` in pieces of `size` characters."""
    return [text[at : at + size] for at in range(0, len(text), size)]


class ProviderServer(ABC):
    """A test server on a loopback port, which runs for the duration of a `with` block.

    `requests` contains the body of each request, and `headers` the headers of each request, with lower-case names.
    If `thinks` is set, each reply begins with thoughts, and a call may only come back with those before it.
    `script` adds responses to the script. After the end of the script, `player` makes a response from a request's body.
    """

    end = b""
    endless = b":"
    """The beginning of data that no event ends, such as a comment."""
    content_type = "text/event-stream"
    request_id_header = "x-request-id"
    request_id = "req_{number}"
    """The id of each request, with the request's number, from 1."""

    def __init__(self, *steps: Step, player: Player, port: int = 0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.thinks = False
        self.player = player
        self._steps = deque(steps)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._server = _Server(self, port)

    @abstractmethod
    def judge(self, path: str, body: Wire) -> Status | None:
        """The error for an invalid request; `None` if it is valid."""

    @abstractmethod
    def chunks(self, answer: Answer, model: str) -> list[Any]:
        """The chunks or events in which the provider would stream `answer`."""

    @abstractmethod
    def frame(self, chunk: Any) -> bytes:
        """The bytes in which `chunk` is streamed. `chunk` is an object to be encoded as JSON, or raw bytes."""

    @abstractmethod
    def whole(self, answer: Answer, model: str) -> Wire:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def error(self, error: Status) -> Wire:
        """An error as JSON, for a response's body or a chunk of a stream."""

    def unscripted(self, path: str, body: Wire) -> Step:
        """The response after the end of the script."""
        return self.player(body)

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def base_url(self) -> str:
        """The base URL with which the provider's SDK calls this server."""
        return f"http://127.0.0.1:{self.port}/v1"

    def script(self, *steps: Step) -> None:
        """Append responses to the script. Each valid request takes the next response."""
        with self._changed:
            self._steps.extend(steps)

    def wait_for_requests(self, count: int, timeout_s: float = 30.0) -> None:
        """Wait until `count` requests have arrived."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.requests) >= count, timeout_s):
                raise AssertionError(f"{len(self.requests)} of {count} requests arrived within {timeout_s:g} s")

    def serve(self) -> None:
        """Serve until `stop` is called."""
        self._server.serve_forever(poll_interval=0.02)

    def stop(self) -> None:
        """Stop the server. This also ends responses that would never end, such as `Silence` and `Drip`."""
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve, name="provider-server", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def connected(self) -> None:
        """Count a connection."""
        with self._changed:
            self.connections += 1

    def take(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Step:
        """Record a request and return its response."""
        with self._changed:
            self.requests.append(body)
            self.headers.append(headers)
            self._changed.notify_all()
            if refusal := self.judge(path, body):
                return refusal
            return self._steps.popleft() if self._steps else self.unscripted(path, body)

    def pause(self, seconds: float | None) -> bool:
        """Wait for `seconds` or until the server stops. Returns whether the server still runs."""
        return not self._stopping.wait(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, owner: ProviderServer, port: int) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: aborted connections are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 64 * 1024

    def setup(self) -> None:
        super().setup()
        self.server.owner.connected()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the parent's name)
        """Log nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._play(self.server.owner.take(self.path.partition("?")[0], body, headers), body)

    def _play(self, step: Step, body: Wire) -> None:
        owner = self.server.owner
        match step:
            case Answer():
                self._answer(step, body)
            case Chunks(chunks, done, hang, heartbeat):
                frames = [owner.frame(each) for each in chunks]
                self._stream(frames, end=owner.end if done else b"", hang=hang, heartbeat=heartbeat)
            case Broken():
                self._break(step, body)
            case Status():
                self._send_json(step.status, owner.error(step), step.headers)
            case Raw():
                self._send_raw(step)
            case Silence(after_headers):
                self._keep_silent(after_headers=after_headers)
            case Drip(interval_s):
                self._drip(interval_s)
            case _:
                assert_never(step)

    def _answer(self, answer: Answer, body: Wire) -> None:
        owner = self.server.owner
        if answer.latency_s:
            owner.pause(answer.latency_s)
        if not body.get("stream"):
            self._send_json(200, owner.whole(answer, body["model"]))
            return
        frames = [owner.frame(each) for each in owner.chunks(answer, body["model"])]
        self._stream(frames, end=owner.end, interval_s=answer.interval_s)

    def _stream(
        self,
        frames: Sequence[bytes],
        *,
        end: bytes,
        interval_s: float = 0.0,
        hang: bool = False,
        heartbeat: bytes = b"",
    ) -> None:
        self._begin_stream()
        for each in frames:
            self._send_chunk(each)
            if interval_s:
                self.wfile.flush()
                self.server.owner.pause(interval_s)
        if end:
            self._send_chunk(end)
        if hang:
            self.wfile.flush()
            self._hang(heartbeat)
        self._send_chunk(b"")

    def _break(self, broken: Broken, body: Wire) -> None:
        owner = self.server.owner
        self._begin_stream()
        for each in owner.chunks(broken.answer, body["model"])[: broken.after]:
            self._send_chunk(owner.frame(each))
        self.wfile.flush()
        match broken.then:
            case "close":
                self.close_connection = True
            case "hang":
                self._hang()
            case Status() as error:
                self._send_chunk(owner.frame(owner.error(error)))
                self._send_chunk(b"")
            case rest:
                if rest:  # an empty chunk ends the response; a client would read a second one as the next response
                    self._send_chunk(rest)
                self._send_chunk(b"")

    def _send_raw(self, raw: Raw) -> None:
        promised = len(raw.body) if raw.promised is None else raw.promised
        self._head(raw.status, raw.content_type, {"Content-Length": str(promised), **raw.headers})
        self.wfile.write(raw.body)
        self.close_connection = raw.promised is not None

    def _keep_silent(self, *, after_headers: bool) -> None:
        if after_headers:
            self._begin_stream()
            self.wfile.flush()
        self._hang()

    def _hang(self, heartbeat: bytes = b"") -> None:
        while self.server.owner.pause(_HEARTBEAT_S if heartbeat else None):
            self._send_chunk(heartbeat)
            self.wfile.flush()
        self.close_connection = True

    def _drip(self, interval_s: float) -> None:
        self._begin_stream()
        self._send_chunk(self.server.owner.endless)
        while self.server.owner.pause(interval_s):
            self._send_chunk(b".")
            self.wfile.flush()
        self.close_connection = True

    def _begin_stream(self) -> None:
        self._head(200, self.server.owner.content_type, {"Transfer-Encoding": "chunked"})

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send_json(self, status: int, body: Wire, headers: Wire | None = None) -> None:
        raw = json.dumps(body).encode()
        self._head(status, "application/json", {"Content-Length": str(len(raw)), **(headers or {})})
        self.wfile.write(raw)

    def _head(self, status: int, content_type: str, headers: Wire) -> None:
        owner = self.server.owner
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header(owner.request_id_header, owner.request_id.format(number=len(owner.requests)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
