"""`/v1/breakers`: administrators list and reset the circuit breakers that all processes share."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote

import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from perdure.access.tenants import UserKey
from perdure.assembly import assemble
from perdure.channels.http.app import create_app
from perdure.channels.http.schemas.breakers import BreakerList
from perdure.errors import CircuitBreakerOpen, ProviderError
from perdure.resilience.registry import Breakers
from perdure.runtime import Runtime
from perdure.settings import BreakerSettings
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.lease.claim import NotNeeded, Ran
from perdure.turns.reading import read_turn
from perdure.turns.run.loop import Runner
from tests.channels.conftest import ADMIN_KEY, BASE_URL, SERVICE_KEY
from tests.channels.test_bad_input import refused
from tests.conftest import RecordingWaker
from tests.turns.scripted import Scripted, says

NAME = "llm:openai:org/some model:8b"
"""A breaker's name. The model's name in it has a slash, a space and a colon, as some providers' models do."""


def _fail() -> None:
    raise ProviderError("down", transient=True)


@pytest.fixture
def breakers(runtime: Runtime, redis_url: str) -> Breakers:
    """Circuit breakers that are shared through Redis. The breaker `NAME` is open."""
    made = Breakers(BreakerSettings(failure_threshold=1), runtime.clock, redis_url)
    with pytest.raises(ProviderError):
        made.get(NAME).execute(_fail, 5)
    return made


def test_breakers_are_listed_and_reset(runtime: Runtime, redis_url: str, breakers: Breakers) -> None:
    """The gateway lists a breaker that another process opened. A reset closes the breaker for all processes."""
    own = Breakers(BreakerSettings(), runtime.clock, redis_url)
    with TestClient(create_app(replace(runtime, breakers=own), lambda: True), base_url=BASE_URL) as client:
        found = client.get("/v1/breakers")
        BreakerList.model_validate(found.json())
        [shown] = found.json()["breakers"]
        assert (shown["name"], shown["state"], shown["failure_count"]) == (NAME, "open", 1)
        assert shown["last_failure_time"] == shown["opened_at"] > 0
        closed = client.post(f"/v1/breakers/{NAME}/reset")
        assert (closed.status_code, closed.json()["state"]) == (200, "closed")
        escaped = client.post(f"/v1/breakers/{quote(NAME, safe='')}/reset")
        assert (escaped.status_code, escaped.json()["name"]) == (200, NAME)
        refused(client.post("/v1/breakers/nobody/reset"), 404, "NOT_FOUND")
    breakers.get(NAME).execute(lambda: None, 5)
    for each in (own, breakers):
        each.close()


def test_breakers_are_listed_page_by_page(runtime: Runtime) -> None:
    """Each host of a `reply_to` URL has a breaker, so there may be many. Without a limit, all are listed."""
    own = Breakers(BreakerSettings(), runtime.clock)
    for number in range(5):
        own.get(f"webhook:{number}.example").execute(lambda: None, 5)
    with TestClient(create_app(replace(runtime, breakers=own), lambda: True), base_url=BASE_URL) as client:
        shown = [
            [each["name"][8] for each in client.get(f"/v1/breakers{query}").json()["breakers"]]
            for query in ("", "?limit=2", "?limit=2&after=webhook:1.example", "?after=webhook:4.example")
        ]
        refused(client.get("/v1/breakers?limit=0"), 400, "INVALID_REQUEST")
    assert shown == [["0", "1", "2", "3", "4"], ["0", "1"], ["2", "3"], []]
    own.close()


def test_a_reset_unparks_turns(
    runtime: Runtime, redis_url: str, database_url: str, waker: RecordingWaker, breakers: Breakers
) -> None:
    """After a gateway resets a breaker, a worker runs the turns that waited for that breaker."""
    limits = runtime.settings.turn.model_copy(update={"on_unavailable": "park"})
    settings = runtime.settings.model_copy(update={"turn": limits, "redis_url": SecretStr(redis_url)})
    model = Scripted(CircuitBreakerOpen(retry_after_s=600), says("back"))
    parking = replace(runtime, settings=settings, models=lambda _name: model)
    sent = accept(parking, Incoming(user=UserKey("ana"), text="hello"))
    runner = Runner(parking, "test")
    runner.run(sent.session_id)
    assert isinstance(runner.run(sent.session_id), NotNeeded)

    gateway = assemble(settings, database_url, waker)
    assert gateway.breakers is not None
    with TestClient(create_app(gateway, lambda: True), base_url=BASE_URL) as client:
        assert client.post(f"/v1/breakers/{NAME}/reset").status_code == 200
    assert runner.run(sent.session_id) == Ran(1)
    assert read_turn(runtime.database, sent.turn_id)["reply"]["text"] == "back"
    for each in (gateway.breakers, breakers, gateway.database):
        each.close()


def test_breakers_need_an_admin_key(runtime: Runtime) -> None:
    """The routes refuse a service key with 403 and a missing key with 401."""
    keys = {"api_keys": (SecretStr(SERVICE_KEY),), "admin_keys": (SecretStr(ADMIN_KEY),)}
    guarded = replace(runtime, settings=runtime.settings.model_copy(update=keys))
    with TestClient(create_app(guarded, lambda: True), base_url=BASE_URL) as client:
        for path, ask in (("/v1/breakers", client.get), ("/v1/breakers/a/reset", client.post)):
            refused(ask(path), 401, "UNAUTHORIZED")
            refused(ask(path, headers={"Authorization": f"Bearer {SERVICE_KEY}"}), 403, "FORBIDDEN")
        assert client.get("/v1/breakers", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).json() == {"breakers": []}
