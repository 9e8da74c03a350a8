"""A client that reads the events of a turn, and resumes after each cut."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

PATIENCE_S = 90.0
WORDS = 60
_UNAVAILABLE = 503
_PAUSE_S = 0.1


def story(number: int) -> str:
    """A long answer without repeated words."""
    return " ".join(f"word-{number}-{each}" for each in range(WORDS))


@dataclass
class Reader:
    """Reads the events of the turn `turn_id`. After each of the first `cuts` connections, resumes with the last id.

    The text of a step must have no gap and no repetition: it must be the beginning of the reply that is committed next,
    and of `answer`, if that is known. Reading fails after `patience_s` seconds.
    """

    url: str
    turn_id: str
    draws: random.Random
    cuts: int
    answer: str | None = None
    patience_s: float = PATIENCE_S
    last: str | None = None
    shown: str = ""
    committed: list[str] = field(default_factory=list)
    done: dict[str, Any] | None = None
    cut: int = 0
    retracted: int = 0
    lost: int = 0
    """How often the gateway ended the connection, or refused it."""

    def read(self) -> None:
        """Read until the turn is done."""
        give_up = time.monotonic() + self.patience_s
        while self.done is None:
            assert time.monotonic() < give_up, (
                f"turn {self.turn_id} is not done; {self.cut} cuts, last event {self.last}"
            )
            try:
                self._read_once()
            except httpx2.TransportError:  # the gateway was killed
                self._pause()

    def apply(self, identifier: str, kind: str, data: dict[str, Any]) -> None:
        """Take an event into account."""
        assert self.done is None, f"{kind} after the end"
        self.last = identifier
        if kind == "delta":
            self.shown += data["text"]
            assert self.answer is None or self.answer.startswith(self.shown), (
                f"a gap or a repetition: {self.shown[-80:]!r}"
            )
        elif kind == "rewind":
            self.shown = ""
            self.retracted += 1
        elif kind == "message":
            if data["role"] == "assistant":  # a first reply is committed with the message that it answers
                assert data["content"].startswith(self.shown), f"a gap or a repetition: {self.shown[-80:]!r}"
                self.shown = ""
            assert int(identifier.partition("-")[0]) == len(self.committed) + 1, "a message is missing or repeated"
            self.committed.append(data["content"])
        elif kind == "done":
            self.done = data

    def _read_once(self) -> None:
        headers = {"last-event-id": self.last} if self.last else {}
        until = self.draws.randint(1, 12) if self.cut < self.cuts else None
        url = f"{self.url}/v1/turns/{self.turn_id}/events"
        with httpx2.stream("GET", url, headers=headers, timeout=20) as response:
            if response.status_code == _UNAVAILABLE:  # the gateway is shutting down, or has no database
                self._pause()
                return
            assert response.status_code == 200, response.read()
            for number, event in enumerate(events(response.iter_lines()), start=1):
                self.apply(*event)
                if self.done is not None:
                    return
                if until is not None and number >= until:
                    self.cut += 1
                    return

    def _pause(self) -> None:
        self.lost += 1
        threading.Event().wait(_PAUSE_S)


def events(lines: Iterator[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Parse a stream; yields `(id, event, data)`, and asserts the documented order of each event's lines."""
    fields: list[str] = []
    for line in lines:
        if line and not line.startswith(":"):
            fields.append(line)
        elif fields:
            (first, identifier), (second, kind), (third, data) = (each.split(": ", 1) for each in fields)
            assert (first, second, third) == ("id", "event", "data")
            yield identifier, kind, json.loads(data)
            fields = []
