"""A model server on loopback: the first request of a turn gets a tool call, the next one an answer, word by word.

It speaks Chat Completions, which the workers of `perdure demo` request like those of any provider. `SlowModel.seen` has
what happens to it, with the id of the process that asks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from queue import Queue
from typing import Any

from perdure.servers.loopback import Loopback

CALL = {"name": "order", "arguments": '{"article": "ink", "pieces": 2}'}
ANSWER = (
    "Two bottles of ink are ordered. They cost 25 euros together, and leave the warehouse tomorrow morning. "
    "You get a message as soon as they are on their way."
)
_HEAD = {"id": "chatcmpl-demo", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "slow"}


@dataclass(frozen=True, slots=True)
class Requested:
    """A worker has asked for the next step of a turn. `step` counts from 1."""

    pid: int
    step: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """The server has sent a word of the answer."""

    pid: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The server has sent the whole answer."""

    pid: int


Seen = Requested | Wrote | Finished


class SlowModel:
    """The server: its `url`, and what it has `seen`.

    `word_s` are the seconds between two words. `asker` finds the process that has the connection from a port; it is
    called before the answer, after which the connection may be closed.
    """

    def __init__(self, word_s: float, asker: Callable[[int], int]) -> None:
        self.word_s = word_s
        self.asker = asker
        self.seen: Queue[Seen] = Queue()
        self.closing = threading.Event()
        self._server = Loopback(partial(_Handler, self))
        self.url = f"{self._server.url}/v1"

    def serving(self) -> AbstractContextManager[None]:
        """Serve requests during the block."""
        return self._server.serving(self.closing.set)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, model: SlowModel, *connection: Any) -> None:
        self._model = model
        super().__init__(*connection)

    def do_POST(self) -> None:
        """Answer a request."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()  # HTTP/1.0: the end of the connection ends the response
        try:
            if request.get("tools"):
                self._step(self._model.asker(self.client_address[1]), request["messages"][-1]["role"])
            else:  # a summary
                self._send({"content": "An order of ink."}, "stop")
        except ConnectionError:
            return  # the worker was killed

    def _step(self, pid: int, last: str) -> None:
        seen = self._model.seen
        if last != "tool":
            seen.put(Requested(pid, 1))
            self._send({"tool_calls": [{"index": 0, "id": "call-1", "type": "function", "function": CALL}]})
            self._send({}, "tool_calls")
            return
        seen.put(Requested(pid, 2))
        for word in ANSWER.split(" "):
            if self._model.closing.wait(self._model.word_s):
                return
            self._send({"content": f"{word} "})
            seen.put(Wrote(pid, word))
        self._send({}, "stop")
        seen.put(Finished(pid))

    def _send(self, delta: dict[str, Any], reason: str | None = None) -> None:
        chunk = {**_HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        end = "" if reason is None else "data: [DONE]\n\n"
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n{end}".encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Log nothing: the command reports what matters."""
