"""While a turn is parked because no model is available, each channel reports the delay to a waiting client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest
from starlette.testclient import TestClient

from perdure.channels.cli import Speaker, TerminalConversation
from perdure.channels.http.app import create_app
from perdure.channels.http.schemas.turns import Turn
from perdure.clock import MovedClock
from perdure.errors import CircuitBreakerOpen
from perdure.runtime import Runtime
from perdure.settings import OnUnavailable, TurnSettings
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.reading import DELAYED
from perdure.turns.run.loop import Runner
from tests.channels.conftest import BASE_URL
from tests.conftest import RecordingWaker
from tests.processes.faults import wait_until
from tests.turns.harness import PATIENCE_S
from tests.turns.scripted import Scripted

COOLDOWN_S = 60


@pytest.fixture
def model() -> Scripted:
    """A model that is unavailable for its first two requests and then answers."""
    return Scripted(CircuitBreakerOpen(retry_after_s=COOLDOWN_S), CircuitBreakerOpen(retry_after_s=COOLDOWN_S))


@pytest.fixture
def waiting(runtime: Runtime, model: Scripted) -> Runtime:
    """A runtime that parks turns while their model is unavailable."""
    settings = runtime.settings.model_copy(update={"turn": TurnSettings(on_unavailable=OnUnavailable.PARK)})
    return replace(runtime, settings=settings, models=lambda _name: model)


def test_a_waiting_http_client_gets_the_delay(waiting: Runtime, clock: MovedClock) -> None:
    """If the wait for a parked turn times out, the response has the status `parked` and the reason for the delay.

    The `reply_to` URL receives only the final reply.
    """
    turn_id = accept(
        waiting, parse_incoming({"user_id": "ann", "text": "hello", "reply_to": {"url": "https://a.example/r"}})
    ).turn_id
    with TestClient(create_app(waiting, lambda: True), base_url=BASE_URL) as client:
        session_id = UUID(client.get(f"/v1/turns/{turn_id}").json()["session_id"])
        Runner(waiting, "test").run(session_id)
        turn = client.get(f"/v1/turns/{turn_id}", params={"wait": 0.05}).json()
        assert Turn.model_validate(turn).status == "parked"
        assert (turn["delayed"]["code"], turn["delayed"]["message"]) == ("CIRCUIT_BREAKER_OPEN", DELAYED)
        assert (turn["reply"], turn["error"]) == (None, None)
        _try_again(waiting, clock, session_id)
        assert not _has_delivery(waiting), "reply_to gets nothing before the reply"
        _try_again(waiting, clock, session_id)
        turn = client.get(f"/v1/turns/{turn_id}", params={"wait": PATIENCE_S}).json()
    assert (turn["status"], turn["delayed"], turn["reply"]["text"]) == ("done", None, "ok")
    assert _has_delivery(waiting)


def test_a_terminal_shows_the_delay_once(
    waiting: Runtime, model: Scripted, clock: MovedClock, waker: RecordingWaker
) -> None:
    """The terminal shows the delay once, not at each attempt."""
    notes: list[str] = []
    conversation = TerminalConversation(waiting, Speaker("local"), None, notes.append)
    conversation.say("hello")
    [session_id] = waker.sessions
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(conversation.listen, lambda _message: None)
        Runner(waiting, "test").run(session_id)
        wait_until(lambda: notes, "the delay is shown", PATIENCE_S)
        _try_again(waiting, clock, session_id)
        _try_again(waiting, clock, session_id)
        turn = listening.result(PATIENCE_S)
    conversation.close()
    assert turn["reply"]["text"] == "ok"
    assert len(model.requests) == 3
    assert notes == [DELAYED]


def _try_again(runtime: Runtime, clock: MovedClock, session_id: UUID) -> None:
    clock.advance(timedelta(seconds=COOLDOWN_S + 1))
    Runner(runtime, "test").run(session_id)


def _has_delivery(runtime: Runtime) -> bool:
    with runtime.database.engine.connect() as connection:
        return bool(connection.exec_driver_sql("SELECT FROM deliveries").all())
