"""Event streams are cut at random points, while workers, the gateway and Redis fail."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from pytest_celery import CeleryTestSetup

from tests.cli.conftest import Perdure
from tests.cli.test_terminal import Terminal
from tests.models.server import Answer
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation

SEED = int(os.environ.get("PERDURE_CHAOS_SEED", str(time.time_ns() % 1_000_000)))
PATIENCE_S = 90.0
WORDS = 60
STREAMS = 4
"""Streams that are read concurrently."""


@pytest.fixture
def gateway(perdure: Perdure) -> Iterator[GatewayProcess]:
    """A gateway that the test may kill."""
    made = GatewayProcess(perdure)
    made.start()
    yield made
    made.kill()


def story(number: int) -> str:
    """A long answer without repeated words."""
    return " ".join(f"word-{number}-{each}" for each in range(WORDS))


@dataclass
class Reader:
    """A client that reads one turn's events, and resumes after each cut."""

    url: str
    turn_id: str
    answer: str
    draws: random.Random
    cuts: int
    last: str | None = None
    shown: str = ""
    committed: list[str] = field(default_factory=list)
    done: dict[str, Any] | None = None
    cut: int = 0
    retracted: int = 0

    def read(self) -> None:
        """Read until the turn is done."""
        give_up = time.monotonic() + PATIENCE_S
        while self.done is None:
            assert time.monotonic() < give_up, f"the turn is not done; {self.cut} cuts, last event {self.last}"
            with suppress(httpx2.TransportError):  # the gateway was killed
                self._read_once()

    def _read_once(self) -> None:
        headers = {"last-event-id": self.last} if self.last else {}
        until = self.draws.randint(1, 12) if self.cut < self.cuts else None
        url = f"{self.url}/v1/turns/{self.turn_id}/events"
        with httpx2.stream("GET", url, headers=headers, timeout=20) as response:
            if response.status_code == 503:  # the gateway is shutting down, or has no database
                time.sleep(0.1)
                return
            assert response.status_code == 200, response.read()
            for number, event in enumerate(_events(response.iter_lines()), start=1):
                self._apply(*event)
                if self.done is not None:
                    return
                if until is not None and number >= until:
                    self.cut += 1
                    return

    def _apply(self, identifier: str, kind: str, data: dict[str, Any]) -> None:
        self.last = identifier
        if kind == "delta":
            self.shown += data["text"]
            assert self.answer.startswith(self.shown), f"a gap or a repetition: {self.shown[-80:]!r}"
        elif kind == "rewind":
            self.shown = ""
            self.retracted += 1
        elif kind == "message":
            self.shown = ""
            assert int(identifier.partition("-")[0]) == len(self.committed) + 1, "a message is missing or repeated"
            self.committed.append(data["content"])
        elif kind == "done":
            self.done = data


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
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


def cut_and_kill(installation: Installation, gateway: GatewayProcess, *, turns: int, cuts: int, kills: int) -> int:
    """Stream `turns` turns, cut each up to `cuts` times, and cause `kills` failures; returns the number of all cuts."""
    draws = random.Random(SEED)  # noqa: S311 (repeatable draws)
    readers = []
    for number in range(turns):
        text = f"tell story {number}"
        installation.model_server.answers[text] = Answer(story(number), piece=7, interval_s=0.02)
        sent = httpx2.post(f"{gateway.url}/v1/messages", json={"user_id": f"user {number}", "text": text}).json()
        seed = random.Random(draws.random())  # noqa: S311
        readers.append(Reader(gateway.url, sent["turn_id"], story(number), seed, cuts))
    threads = [threading.Thread(target=reader.read, daemon=True) for reader in readers]
    for thread in threads:
        thread.start()
    for number in range(kills):
        time.sleep(draws.uniform(0.3, 1.0))
        match number % 3:
            case 0:
                worker = draws.choice(installation.workers)
                worker.kill("SIGKILL")
                worker.container.start()
            case 1:
                gateway.kill()
                gateway.start()
            case _:
                installation.redis.flush()
    for thread in threads:
        thread.join(PATIENCE_S)
    for reader in readers:
        assert reader.done is not None, f"seed {SEED}: turn {reader.turn_id} is not done, last event {reader.last}"
        assert reader.done["status"] == "done"
        transcript = httpx2.get(f"{gateway.url}/v1/sessions/{reader.done['session_id']}/messages").json()
        assert reader.committed == [each["content"] for each in transcript], f"seed {SEED}"
        assert reader.committed[-1] == reader.answer
    return sum(reader.cut for reader in readers)


@pytest.mark.long
def test_cut_streams_resume_while_processes_are_killed(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess
) -> None:
    """A resumed stream has all committed messages, and neither repeats nor omits a word of the provisional text."""
    assert cut_and_kill(installation, gateway, turns=STREAMS, cuts=3, kills=3) >= STREAMS
    installation.check()


@pytest.mark.chaos
def test_a_hundred_cuts(celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess) -> None:
    """Twenty streams stay complete although they are cut at least a hundred times in all."""
    assert cut_and_kill(installation, gateway, turns=20, cuts=8, kills=15) >= 100
    installation.check()


def test_the_first_words_arrive_while_the_model_generates(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess
) -> None:
    """More than half of the text is streamed before the reply is committed."""
    text = "tell a story"
    installation.model_server.answers[text] = Answer(story(0), piece=7, interval_s=0.02)
    sent = httpx2.post(f"{gateway.url}/v1/messages", json={"user_id": "ana", "text": text}).json()
    shown = ""
    with httpx2.stream("GET", f"{gateway.url}/v1/turns/{sent['turn_id']}/events", timeout=20) as response:
        for _, kind, data in _events(response.iter_lines()):
            if kind == "delta":
                shown += data["text"]
            if kind == "done":
                break
    assert story(0).startswith(shown)
    assert len(shown) > len(story(0)) / 2


@pytest.mark.long
def test_a_chat_prints_an_answer_as_it_is_written(
    celery_setup: CeleryTestSetup, installation: Installation, perdure: Perdure
) -> None:
    """A terminal shows the first words while the turn runs, and each word once."""
    installation.model_server.answers["tell"] = Answer(story(0), piece=7, interval_s=0.03)
    terminal = Terminal(perdure, installation.environment)
    try:
        terminal.see(">")
        terminal.type("tell\r")
        shown = terminal.see("word-0-9")
        [turn] = installation.query("SELECT status FROM turns")
        assert turn.status == "running"
        shown += terminal.see(f"word-0-{WORDS - 1}")
        assert story(0) in " ".join(shown.split())  # the lines break between words
        terminal.see(">")
        terminal.type("\x04")
        assert terminal.ends() == 0
    finally:
        terminal.close()
