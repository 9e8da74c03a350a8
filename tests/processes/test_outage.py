"""Tests of a model that fails and recovers, with real workers, the real SDK and a shared circuit breaker."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure.turns.lease.wait_for_model import MOST_A_ROUND
from perdure.turns.reading import DELAYED
from tests.cli.conftest import Perdure
from tests.processes.faults import wait_until
from tests.processes.gateway import serving
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

BREAKER = "llm:openai:test"
TRIES = 3
COOLDOWN_S = 5
PATIENCE_S = 90.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture
def gateway(perdure: Perdure) -> Iterator[str]:
    """The URL of a gateway of this installation."""
    with serving(perdure) as url:
        yield url


@pytest.mark.exhaustive
def test_an_open_breaker_uses_the_fallback_until_one_probe_succeeds(
    installation: Installation, perdure: Perdure, gateway: str
) -> None:
    """While the breaker is open, the fallback model replies. One successful probe closes the breaker."""
    model_server = installation.model_server
    _configure(installation, FALLBACK_MODELS="offline", BREAKER__FAILURE_THRESHOLD="2")
    installation.worker().ready()
    model_server.down = True

    for number in (1, 2):
        assert _answered_by(installation, f"hello {number}") == ("offline", True)
        assert len(model_server.server.requests) == TRIES * number, "each call is retried, and counts as one failure"
    assert _answered_by(installation, "hello 3") == ("offline", True)
    assert len(model_server.server.requests) == TRIES * 2, "an open breaker lets no call through"
    opened = _breaker(perdure, gateway)
    assert (opened["state"], opened["failure_count"], opened["success_count"]) == ("open", 2, 0)

    model_server.down = False
    over_ms = opened["opened_at"] + COOLDOWN_S * 1_000
    wait_until(lambda: time.time() * 1_000 > over_ms, "the cooldown is over", PATIENCE_S)
    gate = model_server.gate("is it back?")
    probe = installation.accept("is it back?", user="probe")
    gate.wait()
    assert _breaker(perdure, gateway)["state"] == "half_open"
    for number in (4, 5):
        assert _answered_by(installation, f"hello {number}") == ("offline", True)
    gate.opened.set()
    (turn,) = installation.settled(probe.turn_id)
    assert len(model_server.server.requests) == TRIES * 2 + 1, "one probe, and no other call"
    assert turn["reply"]["text"] == answer_to("is it back?")
    closed = _breaker(perdure, gateway)
    assert (closed["state"], closed["failure_count"], closed["success_count"]) == ("closed", 0, 1)
    assert _answered_by(installation, "hello 6") == ("test", None)
    installation.check()


@pytest.mark.exhaustive
def test_parked_turns_are_answered_when_the_model_is_back(
    installation: Installation, perdure: Perdure, tmp_path: Path
) -> None:
    """After the model recovers, each sweep wakes a few sessions with parked turns. Parking uses up no attempt."""
    model_server = installation.model_server
    _configure(installation, TURN__ON_UNAVAILABLE="park", BREAKER__FAILURE_THRESHOLD="1", RETRY__MAX_ATTEMPTS="1")
    worker = installation.worker()
    worker.ready()
    model_server.down = True
    queued = [installation.accept(f"and {number}", user="talker") for number in range(4)]
    alone = [installation.accept(f"hello {number}", user=f"user {number}") for number in range(MOST_A_ROUND + 3)]
    parked = [queued[0], *alone]
    out, err = tmp_path / "out", tmp_path / "err"
    waiting = perdure.start("send", "hello?", "--user", "waiter", "--wait", str(PATIENCE_S), stdout=out, stderr=err)

    wait_until(lambda: err.exists() and DELAYED in err.read_text(), "the waiting command shows the delay", PATIENCE_S)
    wait_until(lambda: _parks(installation) > 2 * len(parked), "all turns were parked repeatedly", PATIENCE_S)
    states = {row.status for row in installation.query("SELECT status FROM turns")}
    assert states <= {"parked", "running", "accepted"}
    so_far = len(worker.logs())
    model_server.down = False
    turns = installation.settled(*(each.turn_id for each in (*queued, *alone)), within_s=PATIENCE_S)

    assert {(turn["status"], turn["attempts"]) for turn in turns} == {("done", 1)}
    assert [turn["reply"]["text"] for turn in turns[:4]] == [answer_to(f"and {number}") for number in range(4)]
    woken = [int(found) for found in re.findall(r"swept: woke (\d+) sessions", worker.logs()[so_far:])]
    assert woken, "the sweeper woke them"
    assert max(woken) <= MOST_A_ROUND, "a round wakes a limited number"
    waiting.join(PATIENCE_S)
    assert (waiting.exitcode, out.read_text()) == (0, f"{answer_to('hello?')}\n")
    assert err.read_text().count(DELAYED) == 1
    installation.check()


def _configure(installation: Installation, **settings: str) -> None:
    settings = {"RETRY__BASE_S": "0.01", "BREAKER__COOLDOWN_S": str(COOLDOWN_S), **settings}
    installation.environment.update({f"PERDURE_{name}": value for name, value in settings.items()})


def _answered_by(installation: Installation, text: str) -> tuple[str, bool | None]:
    """Send a message as a new user; returns the model that replied, and whether it was a fallback."""
    sent = installation.accept(text, user=text)
    (turn,) = installation.settled(sent.turn_id)
    assert turn["status"] == "done"
    reply = installation.transcript(sent.session_id)[-1]
    return reply.model, reply.fallback


def _breaker(perdure: Perdure, gateway: str) -> dict[str, Any]:
    """The state of the model's breaker; asserts that `perdure breakers list` and the gateway agree."""
    listed = perdure("breakers", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    found: dict[str, Any] = json.loads(listed.stdout)
    assert httpx2.get(f"{gateway}/v1/breakers").json() == found
    return next(each for each in found["breakers"] if each["name"] == BREAKER)


def _parks(installation: Installation) -> int:
    return sum((note.moment, note.name) == ("after", "turns.park_for") for note in installation.faults.notes())
