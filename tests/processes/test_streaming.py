"""Event streams are cut at random points, while workers, the gateway and Redis fail."""

from __future__ import annotations

import os
import random
import threading
import time

import httpx2
import pytest
from pytest_celery import CeleryTestSetup

from tests.cli.conftest import Perdure
from tests.cli.test_terminal import Terminal
from tests.models.server import Answer
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.streams import PATIENCE_S, WORDS, Reader, events, story

SEED = int(os.environ.get("CHAOS_SEED") or time.time_ns() % 1_000_000)
STREAMS = 4
"""Streams that are read concurrently."""


def cut_and_kill(installation: Installation, gateway: GatewayProcess, *, turns: int, cuts: int, kills: int) -> int:
    """Stream `turns` turns, cut each up to `cuts` times, and cause `kills` failures; returns the number of all cuts."""
    draws = random.Random(SEED)  # noqa: S311 (repeatable draws)
    readers = []
    for number in range(turns):
        text = f"tell story {number}"
        installation.model_server.answers[text] = Answer(story(number), piece=7, interval_s=0.02)
        sent = httpx2.post(f"{gateway.url}/v1/messages", json={"user_id": f"user {number}", "text": text}).json()
        seed = random.Random(draws.random())  # noqa: S311
        readers.append(Reader(gateway.url, sent["turn_id"], seed, cuts, story(number)))
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
        for _, kind, data in events(response.iter_lines()):
            if kind == "delta":
                shown += data["text"]
            if kind == "done":
                break
    assert story(0).startswith(shown)
    assert len(shown) > len(story(0)) / 2


@pytest.mark.exhaustive
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
