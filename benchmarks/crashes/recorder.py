"""Records what the workers of a system do, outside of them, and kills a worker at an exact moment.

The recorder is the model's server, the place of the tool's effects, and the receiver of replies. A worker that reports
a phase of a unit is blocked until the recorder answers. If a kill is armed for this phase, the worker is dead before.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

from benchmarks.crashes.script import Phase, Unit
from perdure.servers.loopback import Loopback

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Point:
    """The moment of a kill."""

    unit: Unit
    phase: Phase

    def __str__(self) -> str:
        return f"{self.phase} the {self.unit}"


POINTS = tuple(Point(unit, phase) for unit in Unit for phase in Phase)
"""All kills: a schedule is one of them, in a turn of its own."""


@dataclass(frozen=True, slots=True)
class Event:
    """A phase of a unit, at a time of the monotonic clock.

    `key` is the idempotency key of a tool or a reply. `text` is the tool's result, as the second model call has it.
    """

    at: float
    turn: str
    point: Point
    key: str | None = None
    text: str | None = None


class Recorder:
    """The server, its `url` and its record. `signal` must be set: it signals the worker with the given local port."""

    signal: Callable[[int, Signals], None]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._armed: tuple[str, Point] | None = None
        self._requested: str | None = None
        self.killed_at: float | None = None
        self._closed = threading.Event()
        self._server = Loopback(partial(_Handler, self))
        self.url = self._server.url

    def serving(self) -> AbstractContextManager[None]:
        """Serve requests during the block."""
        return self._server.serving(self._closed.set)

    # --- the harness's side ---------------------------------------------------------------

    def arm(self, turn: str, point: Point | None) -> None:
        """Kill the worker that first passes `point` in `turn`; `None`: none."""
        self.killed_at = None
        self._armed = None if point is None else (turn, point)

    def events(self, turn: str) -> list[Event]:
        """The record of a turn, in order."""
        with self._lock:
            return [event for event in self._events if event.turn == turn]

    def request(self, turn: str) -> Callable[[], bool]:
        """Ask for a turn, as the client of a system without a queue does. It asks again until it is answered.

        Returns a function that returns whether the client has its answer.
        """
        self._requested = turn
        return lambda: self._requested != turn

    # --- the workers' side -----------------------------------------------------------------

    def note(self, port: int, event: Event) -> bool:
        """Record an event; returns `False` if its worker was killed."""
        with self._lock:
            self._events.append(event)
            if self._armed != (event.turn, event.point):
                return True
            self._armed = None
        at = time.monotonic()
        self.signal(port, SIGKILL)
        self.killed_at = at
        return False

    def freeze(self, port: int, turn: str, point: Point) -> None:
        """Stop a worker that will be killed at `point`, so that it cannot go on before."""
        if self._armed == (turn, point):
            self.signal(port, SIGSTOP)

    def has_effect(self, key: str) -> bool:
        """Whether the tool was executed with this key."""
        with self._lock:
            return any(event.key == key and event.point == Point(Unit.TOOL, Phase.INSIDE) for event in self._events)

    def next_request(self) -> str | None:
        """The unanswered request, as soon as there is one; `None` at the end of the run."""
        while self._requested is None:
            if self._closed.wait(_LOOK_S):
                return None
        return self._requested

    def answer(self, turn: str) -> None:
        """Record that the client has its answer."""
        if self._requested == turn:
            self._requested = None


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, recorder: Recorder, *given: Any) -> None:
        self._recorder = recorder
        super().__init__(*given)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, kind, *rest = self.path.split("/")
        if kind == "units":
            point = Point(Unit(body["unit"]), Phase(body["phase"]))
            if self._note(body["turn"], point, body.get("key"), body.get("text")):
                self._answer({})
        elif kind == "replies":
            self._receive(rest[0])
        else:
            self._recorder.answer(rest[0])
            self._answer({})

    def do_GET(self) -> None:
        _, kind, *rest = self.path.split("/")
        self._answer(
            {"found": self._recorder.has_effect(rest[0])}
            if kind == "effects"
            else {"turn": self._recorder.next_request()}
        )

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def _receive(self, turn: str) -> None:
        """Receive a reply. It counts from `INSIDE` on; at `AFTER`, the answer is sent, and the worker reads it next."""
        key = self.headers["webhook-id"] or self.headers["Idempotency-Key"]
        for phase in (Phase.BEFORE, Phase.INSIDE):
            if not self._note(turn, Point(Unit.REPLY, phase), key):
                return
        answered = Point(Unit.REPLY, Phase.AFTER)
        self._recorder.freeze(self.client_address[1], turn, answered)
        self._answer({})
        self._note(turn, answered, key)

    def _note(self, turn: str, point: Point, key: str | None, text: str | None = None) -> bool:
        return self._recorder.note(self.client_address[1], Event(time.monotonic(), turn, point, key, text))

    def _answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        with suppress(ConnectionError):  # a worker that ended as it waited for a request
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
