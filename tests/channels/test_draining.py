"""During a shutdown or a drain of the fleet, a gateway refuses new messages and completes open requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.runtime import Runtime
from perdure.settings import Settings, ShutdownSettings, TurnSettings
from perdure.turns import drain
from tests.channels.conftest import BASE_URL

Say = Callable[..., dict[str, Any]]
Run = Callable[[str], None]

PATIENCE_S = 30.0
HELLO = {"user_id": "ann", "text": "hello"}


@pytest.fixture
def settings() -> Settings:
    """With these settings, the gateway checks every 0.05 s whether the fleet is drained."""
    turn = TurnSettings(sweep_s=0.05)
    return Settings(_env_file=None, turn=turn, shutdown=ShutdownSettings(drain_s=PATIENCE_S))


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.01)


class WaitingRequest:
    """A request that waits for a turn. The request is sent in a thread."""

    def __init__(self, client: TestClient, accepted: dict[str, Any]) -> None:
        self.answer: dict[str, Any] = {}
        self._client = client
        self._url = f"/v1/turns/{accepted['turn_id']}?wait=60"
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        app: Any = client.app
        _until(lambda: app.state.gateway._waiting_requests > 0, "no request waits")

    def result_of_wait(self) -> dict[str, Any]:
        """Wait for the response and return it."""
        self._thread.join(PATIENCE_S)
        return self.answer

    def _ask(self) -> None:
        self.answer = self._client.get(self._url).json()


@pytest.fixture
def leave(client: TestClient) -> Callable[[], tuple[Future[Any], Callable[[], None]]]:
    """A function that starts the gateway's drain, as the first termination signal does.

    It returns the drain's future and a function that ends the drain early, as the second signal does.
    """
    hastened = asyncio.Event()
    app: Any = client.app

    def start_drain() -> tuple[Future[Any], Callable[[], None]]:
        portal = client.portal
        assert portal is not None
        left = portal.start_task_soon(app.state.gateway.drain, hastened)
        _until(lambda: client.get("/readyz").status_code == 503, "the gateway stays ready")
        return left, lambda: portal.call(hastened.set)

    return start_drain


def test_a_draining_gateway_refuses_messages_and_completes_waits(
    client: TestClient, say: Say, run: Run, leave: Any
) -> None:
    """New messages and `/readyz` get 503, and waiting requests get their reply."""
    accepted = say()
    waiting = WaitingRequest(client, accepted)
    left, _ = leave()

    refused = client.post("/v1/messages", json=HELLO)
    assert (refused.status_code, refused.json()["code"]) == (503, "UNAVAILABLE")
    assert int(refused.headers["Retry-After"]) >= 1
    assert client.get("/healthz").status_code == 200
    assert client.get(f"/v1/turns/{accepted['turn_id']}").json()["status"] == "accepted"

    run(accepted["session_id"])
    assert waiting.result_of_wait()["status"] == "done"
    left.result(PATIENCE_S)


def test_a_hastened_gateway_answers_with_the_current_status(client: TestClient, say: Say, leave: Any) -> None:
    """After a second signal, the gateway answers waiting requests at once with the turn's current status."""
    waiting = WaitingRequest(client, say())
    left, hasten = leave()
    assert not left.done()

    hasten()

    left.result(PATIENCE_S)
    assert waiting.result_of_wait()["status"] == "accepted"


def test_a_drain_of_the_fleet_closes_every_gateway_until_it_is_over(
    client: TestClient, runtime: Runtime, say: Say
) -> None:
    """From `drain.begin` to `drain.end`, all gateways refuse messages, including gateways that start later.

    Accepted messages stay queued.
    """
    accepted = say()
    drain.begin(runtime.database)
    _until(lambda: client.post("/v1/messages", json=HELLO).status_code == 503, "the gateway accepts messages")
    assert client.get("/readyz").status_code == 503
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as another:
        _until(lambda: another.get("/readyz").status_code == 503, "a gateway that starts now accepts messages")

    drain.end(runtime.database)

    _until(lambda: client.get("/readyz").status_code == 200, "the gateway stays closed")
    assert client.get(f"/v1/turns/{accepted['turn_id']}").json()["status"] == "accepted"
    assert client.post("/v1/messages", json=HELLO).status_code == 202


class TestShortDrain:
    """A gateway whose drain lasts at most 0.1 s."""

    @pytest.fixture
    def settings(self) -> Settings:
        """Settings with a drain of 0.1 s."""
        shutdown = ShutdownSettings(drain_s=0.1)
        return Settings(_env_file=None, turn=TurnSettings(sweep_s=0.05), shutdown=shutdown)

    def test_a_wait_ends_with_the_drain(self, client: TestClient, runtime: Runtime, say: Say) -> None:
        """During a drain of the fleet, a request waits at most `drain_s` seconds, because its turn cannot begin."""
        waiting = WaitingRequest(client, say())

        drain.begin(runtime.database)

        assert waiting.result_of_wait()["status"] == "accepted"

    def test_a_socket_outlives_the_drain(self, client: TestClient, runtime: Runtime, say: Say) -> None:
        """During a drain of the fleet, a socket stays open. It refuses messages and answers other frames."""
        turn_id = say()["turn_id"]
        gateway: Any = client.app.state.gateway  # type: ignore[attr-defined]  # the application is FastAPI's
        drain.begin(runtime.database)
        _until(gateway._stop_waiting.is_set, "requests still wait for turns")
        with client.websocket_connect("ws://127.0.0.1:8080/v1/ws", headers={"origin": BASE_URL}) as socket:
            socket.send_json({"type": "auth"})
            assert socket.receive_json()["type"] == "ready"
            socket.send_json({"type": "send", "ref": 1, **HELLO})
            assert socket.receive_json()["code"] == "UNAVAILABLE"
            socket.send_json({"type": "cancel", "ref": 2, "turn_id": turn_id})
            assert socket.receive_json()["type"] == "ok"
