"""An application's process calls `perdure.send`. Its commit wakes a real worker, and its crash loses no message."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import httpx2
import pytest

from tests.cli.conftest import Perdure
from tests.processes.gateway import serving
from tests.processes.installation import ROOT, Installation
from tests.processes.model_server import answer_to

APPLICATION = """
import json, os, signal, sys, time
import perdure
from sqlalchemy import create_engine, text

engine = create_engine(os.environ["PERDURE_DATABASE_URL"])
with engine.begin() as connection:
    connection.execute(text("CREATE TABLE IF NOT EXISTS public.orders (item text)"))
with engine.connect() as connection:
    connection.execute(text("INSERT INTO public.orders VALUES ('tea')"))
    sent = perdure.send(connection, user_id="ana", text=sys.argv[1], message_id=sys.argv[1])
    print(json.dumps({"turn_id": str(sent.turn_id)}), flush=True)
    connection.commit()
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps(dict(perdure.result(sent, timeout=30).body)), flush=True)
"""

PATIENT = {"PERDURE_TURN__SWEEP_S": "600", "PERDURE_TURN__LEASE_S": "30", "PERDURE_TURN__HEARTBEAT_S": "10"}
"""Settings of a worker that runs no sweep during a test."""


def run(installation: Installation, text: str, then: str) -> list[dict[str, Any]]:
    """Run `APPLICATION` with the arguments `text` and `then`; returns the JSON lines that it printed."""
    command = [sys.executable, "-c", APPLICATION, text, then]
    done = subprocess.run(
        command, env=installation.environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode == 0) == (then != "die"), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.exhaustive
def test_the_commit_wakes_a_worker(installation: Installation) -> None:
    """The sender's commit wakes a worker, so the turn is answered without a sweep."""
    installation.worker(**PATIENT).container.ready()
    began = time.monotonic()
    _, settled = run(installation, "hello", "wait")
    assert settled["reply"]["text"] == answer_to("hello")
    assert time.monotonic() - began < 20
    assert installation.query("SELECT item FROM public.orders") == [("tea",)]


@pytest.mark.exhaustive
def test_a_kill_between_the_commit_and_the_wake_up(installation: Installation) -> None:
    """If the sender dies before the wake-up, the sweeper routes the message. Sending again gives the same turn."""
    worker = installation.worker()
    worker.container.ready()
    sent = [run(installation, f"hello {number % 3}", "die")[0]["turn_id"] for number in range(6)]
    settled = installation.settled(*sent[:3], within_s=30)
    assert {turn["status"] for turn in settled} == {"done"}
    assert len(installation.query("SELECT 1 FROM turns")) == 3
    assert len(installation.query("SELECT 1 FROM public.orders")) == 6
    installation.check()


@pytest.mark.exhaustive
def test_the_gateway_routes_a_requested_turn(installation: Installation) -> None:
    """Without a worker, the gateway routes a message to a session when a client cancels or reads the message's turn."""
    environment = {**installation.environment, "PERDURE_AGENTS": "perdure.builtin", "PERDURE_MODEL": "offline"}
    turn_id = run(installation, "hello", "die")[0]["turn_id"]
    assert not installation.query("SELECT 1 FROM turns")
    with serving(Perdure(environment, installation.directory)) as url, httpx2.Client(base_url=url) as client:
        assert client.post(f"/v1/turns/{turn_id}/cancel").status_code == 202
        turn = client.get(f"/v1/turns/{turn_id}").json()
        assert (turn["status"], turn["error"]["code"]) == ("cancelled", "TURN_CANCELLED")
        assert turn["session_id"] is not None
