"""`/metrics` serves readings to administrators only, and `/readyz` fails where no message would be answered."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event
from starlette.testclient import TestClient

from perdure.channels.http.api.health import Lookup
from perdure.channels.http.app import create_app
from perdure.clock import MovedClock
from perdure.errors import Unavailable
from perdure.observe import presence
from perdure.observe.presence import WORKER, Presence
from perdure.observe.readings import Source
from perdure.observe.servers import RedisServer, redis_servers
from perdure.redis import connect
from perdure.runtime import Runtime
from perdure.settings import Settings
from tests.channels.conftest import ADMIN_KEY, BASE_URL, SERVICE_KEY


def _with_keys(runtime: Runtime) -> Runtime:
    keys = {"api_keys": SERVICE_KEY, "admin_keys": f"{ADMIN_KEY},acme={ADMIN_KEY}-of-acme"}
    return replace(runtime, settings=Settings(_env_file=None, **keys))  # type: ignore[arg-type]


def test_metrics_need_an_admin_key(runtime: Runtime) -> None:
    """Prometheus scrapes with an admin key. Other keys, those of a tenant and no key are refused."""
    with TestClient(create_app(_with_keys(runtime), lambda: True), base_url=BASE_URL) as client:
        keys = (ADMIN_KEY, f"{ADMIN_KEY}-of-acme", SERVICE_KEY)
        answers = [client.get("/metrics", headers={"Authorization": f"Bearer {key}"}) for key in keys]
        answers.append(client.get("/metrics"))

    assert [answer.status_code for answer in answers] == [200, 403, 403, 401]
    assert answers[0].headers["content-type"].startswith("text/plain; version=")
    assert {family.name for family in text_string_to_metric_families(answers[0].text)} > {"perdure_sessions_due"}


def test_readyz_fails_without_a_worker_after_some_time(runtime: Runtime, clock: MovedClock) -> None:
    """A new gateway is ready without workers. Later it needs one that was seen lately."""
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as client:
        statuses = [client.get("/readyz").status_code]
        clock.advance(timedelta(seconds=61))
        statuses.append(client.get("/readyz").status_code)
        detail = client.get("/readyz").json()["detail"]
        Presence(runtime.database, clock, WORKER, "w@h", lambda: ["turns"]).report()
        statuses.append(client.get("/readyz").status_code)
        clock.advance(timedelta(seconds=61))
        statuses.append(client.get("/readyz").status_code)

    assert statuses == [200, 503, 200, 503]
    assert detail.startswith("No worker that runs turns was seen for 6")


def test_concurrent_callers_get_the_reading_for_which_they_waited() -> None:
    """The first of two waiting callers begins another reading before the second has taken the result of the first."""
    numbers = count()

    async def main() -> tuple[list[int], list[int]]:
        lookup = Lookup(lambda: next(numbers))

        async def twice() -> list[int]:
            return [await lookup.result(), await lookup.result()]

        first, second = await asyncio.gather(twice(), twice())
        return first, second

    assert asyncio.run(main()) == ([0, 1], [0, 1])


def test_readyz_allows_a_worker_to_restart(runtime: Runtime, clock: MovedClock) -> None:
    """A worker that shuts down is given as long to return as one that was killed, however old the gateway is."""
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as client:
        clock.advance(timedelta(seconds=1_000))
        worker = Presence(runtime.database, clock, WORKER, "w@h", lambda: ["turns"])
        worker.start()
        worker.stop()
        statuses = [client.get("/readyz").status_code]
        clock.advance(timedelta(seconds=61))
        statuses.append(client.get("/readyz").status_code)

    assert statuses == [200, 503]


def test_readyz_ignores_workers_if_the_setting_is_0(runtime: Runtime, clock: MovedClock) -> None:
    """An installation whose gateway must be ready first, for any time, sets 0."""
    settings = runtime.settings.model_copy(update={"ready": type(runtime.settings.ready)(no_worker_s=0)})
    with TestClient(create_app(replace(runtime, settings=settings), lambda: True), base_url=BASE_URL) as client:
        clock.advance(timedelta(seconds=10_000))
        assert client.get("/readyz").status_code == 200


def test_readyz_says_that_the_database_refuses_writes(runtime: Runtime) -> None:
    """A standby answers each query, and accepts no message. A failover makes the gateway ready again."""

    def demote(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = on")
        connection.commit()

    engine = runtime.database.engine
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as client:
        statuses = [client.get("/readyz").status_code]
        event.listen(engine, "connect", demote)
        engine.dispose()
        answer = client.get("/readyz")
        event.remove(engine, "connect", demote)
        statuses += [answer.status_code, client.get("/readyz").status_code]

    assert statuses == [200, 503, 200]
    assert answer.json()["detail"] == "The database accepts no writes at present."


def test_readyz_counts_the_silence_of_workers_from_the_end_of_an_outage(
    runtime: Runtime, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the database is unavailable no worker can report, so each has some time to report again afterwards."""

    def unavailable(_: object) -> None:
        raise Unavailable("The database cannot be reached; please try again.")

    Presence(runtime.database, clock, WORKER, "w@h", lambda: ["turns"]).report()
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as client:
        with monkeypatch.context() as outage:
            outage.setattr(presence, "read_processes", unavailable)
            clock.advance(timedelta(seconds=600))
            client.get("/readyz")
        statuses = []
        for passed_s in (1, 61):
            clock.advance(timedelta(seconds=passed_s))
            statuses.append(client.get("/readyz").status_code)

    assert statuses == [200, 503]


def test_readyz_says_that_redis_is_full(runtime: Runtime, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Redis refuses writes because its memory is full, no turn is woken, and the gateway is not ready."""
    (server,) = redis_servers(redis_url, redis_url, "perdure:")
    source = Source(runtime.database, runtime.clock, servers=[server])

    def full(*_: Any, **__: Any) -> None:
        from redis import OutOfMemoryError  # noqa: PLC0415 (only here)

        raise OutOfMemoryError("OOM command not allowed when used memory > 'maxmemory'.")

    with TestClient(create_app(runtime, lambda: True, source=source), base_url=BASE_URL) as client:
        ready = client.get("/readyz").status_code
        monkeypatch.setattr(server._client, "set", full)
        answer = client.get("/readyz")
    source.close()

    assert (ready, answer.status_code) == (200, 503)
    assert "Redis is full" in answer.json()["detail"]


def test_the_state_of_redis_is_read(redis_url: str) -> None:
    """Memory, limit and policy of a server that works; and of one that cannot be reached, only that."""
    (server,) = redis_servers(redis_url, "amqp://localhost", "perdure:")
    state = server.read()
    nowhere = RedisServer("broker", "redis://127.0.0.1:1", "perdure:", is_broker=True)
    lost = nowhere.read()
    with connect(redis_url) as client:
        assert client.exists("perdure:probe")
    server.close()
    nowhere.close()

    assert (state.name, state.fault, state.policy) == ("redis", None, "noeviction")
    assert state.memory_bytes
    assert (lost.fault, lost.memory_bytes) == ("The broker cannot be reached.", None)
