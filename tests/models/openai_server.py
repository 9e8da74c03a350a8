"""A server of the tests' own that speaks Chat Completions, and judges as the provider does.

It answers what the test scripted, streamed or whole, well or badly: split into any pieces,
late, one byte at a time, never, with an error, cut off in the middle, as HTML. It keeps
every request, and refuses with 400 a transcript that the real provider would refuse, so a
test that gets its reply has shown its transcript to be valid.

Without a script it plays a turn of two steps: it calls the first tool, then answers with the
result. By itself: `python -m tests.models.openai_server --port 8000 --latency-ms 500`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, assert_never

Wire = Mapping[str, Any]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAX_ID = 40


def validate_transcript(messages: object) -> list[str]:
    """What the provider would refuse in `messages` (wire form); empty if it is valid."""
    if not isinstance(messages, list) or not messages:
        return ["messages: expected an array that is not empty"]
    return list(_problems(messages))


def _problems(messages: Sequence[Any]) -> Iterator[str]:
    seen: set[str] = set()
    open_ids: list[str] = []
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message, dict):
            yield f"{where}: expected an object"
        elif message.get("role") == "tool":
            yield from _result_problems(where, message, open_ids)
        else:
            if open_ids:
                yield f"{where}: tool calls without a result before it: {', '.join(open_ids)}"
                open_ids.clear()
            yield from _spoken_problems(where, message, seen, open_ids)
    if open_ids:
        yield f"tool calls without a result at the end: {', '.join(open_ids)}"


def _spoken_problems(where: str, message: Wire, seen: set[str], open_ids: list[str]) -> Iterator[str]:
    role = message.get("role")
    if role == "assistant" and "tool_calls" in message:
        yield from _asking_problems(where, message, seen, open_ids)
    elif role not in ("system", "developer", "user", "assistant"):
        yield f"{where}.role: {role!r} is not a role"
    elif not isinstance(message.get("content"), str):
        yield f"{where}.content: expected a string"


def _result_problems(where: str, message: Wire, open_ids: list[str]) -> Iterator[str]:
    call_id = message.get("tool_call_id")
    if call_id in open_ids:
        open_ids.remove(call_id)
    else:
        yield f"{where}.tool_call_id: {call_id!r} answers no call of the message before, or answers it twice"
    if not isinstance(message.get("content"), str):
        yield f"{where}.content: expected a string"


def _asking_problems(where: str, message: Wire, seen: set[str], open_ids: list[str]) -> Iterator[str]:
    if not isinstance(message.get("content"), str | None):
        yield f"{where}.content: expected a string or null"
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not calls:
        yield f"{where}.tool_calls: expected an array that is not empty"
        return
    for number, call in enumerate(calls):
        yield from _call_problems(f"{where}.tool_calls[{number}]", call, seen, open_ids)


def _call_problems(where: str, call: Any, seen: set[str], open_ids: list[str]) -> Iterator[str]:
    if not isinstance(call, dict) or call.get("type") != "function" or not isinstance(call.get("function"), dict):
        yield f"{where}: expected an object of type function"
        return
    call_id = call.get("id")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= _MAX_ID:
        yield f"{where}.id: expected 1 to {_MAX_ID} characters, got {call_id!r}"
    elif call_id in seen:
        yield f"{where}.id: {call_id!r} occurs twice"
    else:
        seen.add(call_id)
        open_ids.append(call_id)
    if not _NAME.fullmatch(str(call["function"].get("name"))):
        yield f"{where}.function.name: {call['function'].get('name')!r} does not match {_NAME.pattern}"
    if not _is_json_object(call["function"].get("arguments")):
        yield f"{where}.function.arguments: expected a string that holds a JSON object"


def _is_json_object(text: object) -> bool:
    def refuse(name: str) -> float:
        raise ValueError(name)

    try:
        return isinstance(text, str) and isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@dataclass(frozen=True)
class Call:
    """A tool call in an answer."""

    name: str
    arguments: str = "{}"
    id: str = "call_1"


@dataclass(frozen=True)
class Answer:
    """A well-formed reply, streamed in pieces of `piece` characters if the request says so."""

    text: str = ""
    calls: Sequence[Call] = ()
    piece: int = 4
    latency_s: float = 0.0
    finish_reason: str | None = None
    usage: Wire | None = field(default_factory=lambda: {"prompt_tokens": 11, "completion_tokens": 7})


@dataclass(frozen=True)
class Chunks:
    """A stream of exactly these chunks; `done` says whether `[DONE]` follows."""

    chunks: Sequence[Any]
    done: bool = True


@dataclass(frozen=True)
class Status:
    """An error, with the provider's form of body."""

    status: int
    code: str | None = None
    message: str = "An error."
    headers: Wire = field(default_factory=dict)


@dataclass(frozen=True)
class Raw:
    """Status 200 and these bytes; `promised` bytes are announced, so a larger number is a broken connection."""

    body: bytes
    content_type: str = "text/event-stream"
    promised: int | None = None


@dataclass(frozen=True)
class Silence:
    """Nothing: no status line even, or, `after_headers`, no byte of the body. Lasts until the server stops."""

    after_headers: bool = False


@dataclass(frozen=True)
class Drip:
    """One byte of a comment after another, `interval_s` apart, that never come to an event."""

    interval_s: float = 0.02


Step = Answer | Chunks | Status | Raw | Silence | Drip
Player = Callable[[Wire], Step]


def two_steps(latency_s: float = 0.0, words: int = 20) -> Player:
    """A player that calls the first tool and, once it has the result, answers with it in so many words."""

    def play(body: Wire) -> Step:
        last = body["messages"][-1]
        tools = body.get("tools") or []
        if last["role"] == "tool" or not tools:
            filler = " ".join(f"word{number}" for number in range(max(0, words - 1)))
            return Answer(f"{last['content']} {filler}".strip(), latency_s=latency_s)
        return Answer(calls=[_call_of(tools[0]["function"])], latency_s=latency_s)

    return play


def _call_of(tool: Wire) -> Call:
    examples = {"string": "12*7+5", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    schema = tool.get("parameters", {})
    required = {name: schema["properties"][name] for name in schema.get("required", [])}
    return Call(tool["name"], json.dumps({name: examples.get(part.get("type")) for name, part in required.items()}))


def chunks_of(answer: Answer, model: str = "test-model") -> list[dict[str, Any]]:
    """The chunks in which the provider would stream `answer`."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in _pieces(answer.text, answer.piece)]
    for index, call in enumerate(answer.calls):
        opening = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        deltas.append({"tool_calls": [opening]})
        for piece in _pieces(call.arguments, answer.piece):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    chunks = [chunk([{"index": 0, "delta": delta, "finish_reason": None}], model) for delta in deltas]
    chunks.append(chunk([{"index": 0, "delta": {}, "finish_reason": _finish_reason(answer)}], model))
    if answer.usage is not None:
        chunks.append({**chunk([], model), "usage": dict(answer.usage)})
    return chunks


def chunk(choices: Sequence[Wire], model: str = "test-model") -> dict[str, Any]:
    """One chunk of a stream."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": model,
        "choices": list(choices),
    }


def _pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def _finish_reason(answer: Answer) -> str:
    return answer.finish_reason or ("tool_calls" if answer.calls else "stop")


def _completion(answer: Answer, model: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(answer)}
    return {**chunk([choice], model), "object": "chat.completion", "usage": answer.usage}


class OpenAIServer:
    """The server, on a free port of loopback, within a `with` block.

    `requests` holds the bodies that came, `headers` their headers by lower-case names. `script` says what comes
    next; when the script is at its end, `player` is asked.
    """

    def __init__(self, *steps: Step, player: Player | None = None, port: int = 0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self._player = player or two_steps()
        self._steps = deque(steps)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._server = _Server(self, port)

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def base_url(self) -> str:
        """As `OPENAI_BASE_URL` wants it."""
        return f"http://127.0.0.1:{self.port}/v1"

    def script(self, *steps: Step) -> None:
        """Answer the next requests with `steps`, one each."""
        with self._changed:
            self._steps.extend(steps)

    def wait_for_requests(self, count: int, timeout_s: float = 10.0) -> None:
        """Return once `count` requests have come."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.requests) >= count, timeout_s):
                raise AssertionError(f"{len(self.requests)} of {count} requests came within {timeout_s:g} s")

    def serve(self) -> None:
        """Serve until `stop` is called."""
        self._server.serve_forever(poll_interval=0.02)

    def stop(self) -> None:
        """Stop serving; what is silent or drips ends too."""
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve, name="openai-server", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def connected(self) -> None:
        """Count a connection."""
        with self._changed:
            self.connections += 1

    def take(self, body: dict[str, Any], headers: dict[str, str]) -> Step:
        """Keep a request and say what to answer."""
        with self._changed:
            self.requests.append(body)
            self.headers.append(headers)
            self._changed.notify_all()
            if problems := validate_transcript(body.get("messages")):
                return Status(400, code="invalid_transcript", message="; ".join(problems))
            return self._steps.popleft() if self._steps else self._player(body)

    def pause(self, seconds: float | None) -> bool:
        """Wait so long, or until the server stops; return whether it goes on."""
        return not self._stopping.wait(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, owner: OpenAIServer, port: int) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that hang up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 64 * 1024

    def setup(self) -> None:
        super().setup()
        self.server.owner.connected()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the parent's name)
        """Say nothing on stderr."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send_error(Status(404, message=f"no route {self.path}"))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._play(self.server.owner.take(body, headers), body)

    def _play(self, step: Step, body: Wire) -> None:
        match step:
            case Answer():
                self._answer(step, body)
            case Chunks(chunks, done):
                self._stream(chunks, done=done)
            case Status():
                self._send_error(step)
            case Raw(raw, content_type, promised):
                self._head(200, content_type, {"Content-Length": str(len(raw) if promised is None else promised)})
                self.wfile.write(raw)
                self.close_connection = promised is not None
            case Silence(after_headers):
                if after_headers:
                    self._head(200, "text/event-stream", {"Transfer-Encoding": "chunked"})
                    self.wfile.flush()
                self.server.owner.pause(None)
                self.close_connection = True
            case Drip(interval_s):
                self._drip(interval_s)
            case _:
                assert_never(step)

    def _answer(self, answer: Answer, body: Wire) -> None:
        if answer.latency_s:
            self.server.owner.pause(answer.latency_s)
        if body.get("stream"):
            self._stream(chunks_of(answer, body["model"]), done=True)
        else:
            self._send_json(200, _completion(answer, body["model"]))

    def _stream(self, chunks: Sequence[Any], *, done: bool) -> None:
        self._head(200, "text/event-stream", {"Transfer-Encoding": "chunked"})
        for each in chunks:
            self._send_chunk(f"data: {json.dumps(each)}\n\n".encode())
        if done:
            self._send_chunk(b"data: [DONE]\n\n")
        self._send_chunk(b"")

    def _drip(self, interval_s: float) -> None:
        self._head(200, "text/event-stream", {"Transfer-Encoding": "chunked"})
        self._send_chunk(b":")
        while self.server.owner.pause(interval_s):
            self._send_chunk(b".")
            self.wfile.flush()
        self.close_connection = True

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send_error(self, error: Status) -> None:
        body = {"error": {"message": error.message, "type": "invalid_request_error", "param": None, "code": error.code}}
        self._send_json(error.status, body, error.headers)

    def _send_json(self, status: int, body: Wire, headers: Wire | None = None) -> None:
        raw = json.dumps(body).encode()
        self._head(status, "application/json", {"Content-Length": str(len(raw)), **(headers or {})})
        self.wfile.write(raw)

    def _head(self, status: int, content_type: str, headers: Wire) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("x-request-id", f"req_{len(self.server.owner.requests)}")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def main() -> None:
    """Serve two-step turns until interrupted."""
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server that plays turns of two steps.")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="before each reply")
    parser.add_argument("--words", type=int, default=20, help="length of each answer")
    options = parser.parse_args()
    server = OpenAIServer(player=two_steps(options.latency_ms / 1000, options.words), port=options.port)
    print(server.base_url, flush=True)  # noqa: T201 (the address is what the program prints)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()


if __name__ == "__main__":
    main()
