"""A turn that waits for approval survives restarts of all processes, and holds no lease while it waits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.cli.conftest import Perdure
from tests.processes.faults import done, wait_until
from tests.processes.gateway import serving
from tests.processes.installation import ADAPTED, MODULES, NATIVE, Installation
from tests.processes.model_server import answer_to
from tests.processes.nodes import PostgresServer

PATIENCE_S = 60.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A separate PostgreSQL server, because this test stops the server."""
    made = PostgresServer(tmp_path_factory.mktemp("database") / "postgres")
    yield made
    made.stop()


@pytest.fixture
def database_url(server: PostgresServer) -> str:
    """The URL of the installation's database."""
    return server.url


@pytest.mark.exhaustive
@pytest.mark.parametrize("agent", [NATIVE, ADAPTED])
def test_an_approval_waits_across_a_restart_of_everything(
    installation: Installation, perdure: Perdure, server: PostgresServer, agent: str
) -> None:
    """After a restart of all processes, a call approved with edited arguments runs once, with the edited arguments."""
    text, edited = "guarded: much", "guarded: less"
    installation.environment["PERDURE_AGENTS"] = MODULES[agent]
    worker = installation.worker("--concurrency", "1")
    worker.ready()
    with serving(perdure) as gateway:
        sent = httpx2.post(f"{gateway}/v1/messages", json={"user_id": "ana", "text": text, "agent": agent}).json()
        turn_url = f"/v1/turns/{sent['turn_id']}"
        wait_until(
            lambda: _turn(gateway + turn_url)["status"] == "waiting_approval", "the turn waits for approval", PATIENCE_S
        )
        before = _turn(gateway + turn_url)
        other = installation.accept("pure: meanwhile", user="bea")
        installation.settled(other.turn_id, within_s=PATIENCE_S)  # settled by the worker's only thread
        assert _is_held(installation, sent["session_id"]) is False
        worker.kill("SIGTERM")
    installation.redis.kill("SIGTERM")
    installation.database.engine.dispose()
    server.end(signal.SIGINT)

    server.start()
    installation.redis.start()
    worker.container.start()
    worker.container.ready()
    with serving(perdure) as gateway:
        after = _turn(gateway + turn_url)
        assert after == before, "nothing has changed, including its expiry"
        [call] = after["pending_approvals"]
        assert (call["tool"], call["arguments"]) == ("guarded", {"note": text})
        assert installation.faults.effects() == installation.faults.effects("pure: meanwhile"), "the call has not begun"
        decision = {"call_id": call["call_id"], "decision": "approve", "arguments": {"note": edited}}
        assert httpx2.post(f"{gateway}{turn_url}/approval", json=decision).status_code == 202
        turn = _turn(gateway + turn_url, wait=PATIENCE_S)
        again = httpx2.post(f"{gateway}{turn_url}/approval", json=decision)

    assert (turn["status"], turn["attempts"], turn["pending_approvals"]) == ("done", 1, [])
    assert (again.status_code, again.json()["code"]) == (409, "CONFLICT")
    [effect] = [each for each in installation.faults.effects() if each.tool == "guarded"]
    assert effect.note == edited
    told = f'The arguments of this call were changed to {{"note":"{edited}"}}\n' if agent == NATIVE else ""
    assert turn["reply"]["text"] == answer_to(text, told + done("guarded", edited))
    installation.check()


def _turn(url: str, **query: float) -> dict[str, Any]:
    turn: dict[str, Any] = httpx2.get(url, params=query, timeout=PATIENCE_S * 2).json()
    return turn


def _is_held(installation: Installation, session_id: str) -> bool:
    [row] = installation.query("SELECT lease_owner, lease_until FROM sessions WHERE session_id = %(id)s", id=session_id)
    return (row.lease_owner, row.lease_until) != (None, None)
