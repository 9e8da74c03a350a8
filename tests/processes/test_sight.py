"""An operator sees what happens: metrics, `/readyz` and `perdure status` of processes that run, fail and die."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from perdure.assembly import Addresses
from perdure.redis import connect
from perdure.workers.celery_application import make_app
from tests.cli.conftest import Perdure
from tests.models.openai_server import Status
from tests.observe.series import named, promtool, with_data
from tests.processes.faults import wait_until
from tests.processes.gateway import serving
from tests.processes.installation import Installation
from tests.processes.receiver import Receiver

SECRET = "my PIN is 4711"

UNPRICED = {"perdure_cost_dollars_total"}
"""The server of these tests has no prices; see tests/observe/test_measures.py."""


@pytest.fixture
def port() -> int:
    """A free port with free ports behind it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def _beat(perdure: Perdure) -> Iterator[Any]:
    process = perdure.start("beat")
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _status(perdure: Perdure) -> tuple[int, dict[str, Any]]:
    """The exit status and the document of `perdure status`."""
    ran = perdure("status", "--json")
    document: dict[str, Any] = json.loads(ran.stdout)
    return ran.returncode, document


def _parts(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(each["part"], each["severity"]) for each in document["faults"]}


def _age(installation: Installation, kind: str) -> None:
    """Let the last reports of the processes be a minute old, as if they had died then."""
    with installation.database.engine.begin() as connection:
        connection.exec_driver_sql(
            f"UPDATE processes SET seen_at = seen_at - interval '1 minute' WHERE kind = '{kind}'"  # noqa: S608 (constants)
        )


@pytest.mark.long
def test_each_fault_shows_in_status_metrics_and_readiness(
    installation: Installation, perdure: Perdure, receiver: Receiver, port: int
) -> None:
    """A full Redis, a dead worker, a dead beat, a backlog and failing deliveries are seen, each where it must be.

    Before that, all series of the dashboard and of the alert rules have data after some traffic.
    """
    installation.environment |= {
        "PERDURE_METRICS__WORKER_PORT": str(port),
        "PERDURE_METRICS__EVERY_S": "0.1",
        "PERDURE_DATABASE_CAPACITY_GB": "1000",
        "PERDURE_READY__NO_WORKER_S": "3",
        "PERDURE_LOG__FORMAT": "json",
    }
    worker = installation.worker()
    worker.container.ready()
    with _beat(perdure) as beat, serving(perdure) as url:
        metrics = _traffic(installation, receiver, url, port)
        assert named() - with_data(*metrics) == UNPRICED
        for text in metrics:
            promtool("check", "metrics", text=text)
        _check_openmetrics(port)
        assert SECRET not in "".join(metrics)
        assert "ana" not in "".join(metrics)
        wait_until(lambda: _status(perdure)[0] == 0, "the status is up")
        status, document = _status(perdure)
        assert (document["status"], _parts(document)) == ("warning", {("deliveries", "warning")})
        assert {each["state"] for each in document["processes"]} == {"alive"}
        assert httpx2.get(f"{url}/readyz").status_code == 200

        _with_a_full_redis(installation, perdure, url)

        worker.container.kill(signal.SIGKILL)
        beat.kill()
        beat.join()
        installation.accept(SECRET, user="bob")
        wait_until(lambda: httpx2.get(f"{url}/readyz").status_code == 503, "the gateway is not ready", 20)
        assert "No worker" in httpx2.get(f"{url}/readyz").json()["detail"]
        _age(installation, "worker")
        _age(installation, "beat")
        status, document = _status(perdure)
        assert status == 1
        assert {("workers", "down"), ("beat", "warning")} <= _parts(document)
        assert sum(each["number"] for each in document["due"].values()) == 1
        assert "perdure_workers_of_turns 0.0" in httpx2.get(f"{url}/metrics").text
    _lines_are_json(worker.logs())


@pytest.mark.long
def test_a_worker_whose_queue_was_cancelled_runs_no_turns(installation: Installation, perdure: Perdure) -> None:
    """An operator cancels the queue `turns` in Flower or by `celery control`. Turns wait, and the fault is seen."""
    installation.environment |= {"PERDURE_READY__NO_WORKER_S": "3"}
    worker = installation.worker()
    worker.container.ready()
    urls = Addresses("postgresql://", installation.redis.url, installation.redis.url)
    with serving(perdure) as url, make_app(installation.runtime.settings, urls) as app:
        wait_until(lambda: _status(perdure)[0] == 0, "the worker reports")
        app.control.cancel_consumer("turns", reply=True, timeout=20, limit=1)
        wait_until(lambda: _status(perdure)[0] == 1, "the status is down")
        waiting = installation.accept("hello")
        assert ("workers", "down") in _parts(_status(perdure)[1])
        wait_until(lambda: httpx2.get(f"{url}/readyz").status_code == 503, "the gateway is not ready")
        app.control.add_consumer("turns", reply=True, timeout=20, limit=1)
        installation.settled(waiting.turn_id)
        wait_until(lambda: httpx2.get(f"{url}/readyz").status_code == 200, "the gateway is ready")


def _traffic(installation: Installation, receiver: Receiver, url: str, port: int) -> tuple[str, str]:
    """Run turns that succeed and fail, and deliver replies; returns the metrics of the gateway and of the worker."""
    receiver.statuses.append(410)
    installation.model_server.answers["fail"] = Status(400, message="bad")
    turns = [installation.accept(text, user=text) for text in ("hello", "idempotent x", "fail")]
    turns += [installation.accept(SECRET, reply_to={"url": receiver.url}) for _ in range(2)]
    settled = installation.settled(*[each.turn_id for each in turns])
    assert [each["status"] for each in settled].count("failed") == 1

    def complete() -> tuple[str, str] | None:
        read = httpx2.get(f"{url}/metrics").text, httpx2.get(f"http://127.0.0.1:{port}/metrics").text
        is_delivered = 'outcome="delivered"} 1.0' in read[1] and "perdure_deliveries_failed 1.0" in read[0]
        return read if is_delivered and named() - with_data(*read) <= UNPRICED else None

    try:
        return wait_until(complete, "the metrics have data", 40)
    except AssertionError:
        texts = [httpx2.get(f"{url}/metrics").text, httpx2.get(f"http://127.0.0.1:{port}/metrics").text]
        pytest.fail(f"without data: {named() - with_data(*texts)}")


def _with_a_full_redis(installation: Installation, perdure: Perdure, url: str) -> None:
    with connect(installation.redis.url) as redis:
        redis.config_set("maxmemory-policy", "noeviction")
        redis.config_set("maxmemory", "1mb")
        try:
            answer = httpx2.get(f"{url}/readyz")
            status, document = _status(perdure)
            metrics = httpx2.get(f"{url}/metrics").text
        finally:
            redis.config_set("maxmemory", "0")
    assert answer.status_code == 503
    assert "full" in answer.json()["detail"]
    assert status == 1
    assert ("redis", "down") in _parts(document)
    assert 'perdure_redis_writable{server="redis"} 0.0' in metrics
    wait_until(lambda: httpx2.get(f"{url}/readyz").status_code == 200, "the gateway is ready again")


def _check_openmetrics(port: int) -> None:
    """A worker serves OpenMetrics, with the same series, to a client that asks for it."""
    accepted = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = httpx2.get(f"http://127.0.0.1:{port}/metrics", headers=accepted)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = openmetrics(answer.text)  # type: ignore[no-untyped-call]
    names = {sample.name for family in families for sample in family.samples}
    assert {"perdure_stage_seconds_bucket", "perdure_turns_settled_total", "perdure_turns_running"} <= names


def _lines_are_json(log: str) -> None:
    """Each line of the worker's log is a JSON object without text. A settled turn is one line, with its ids."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    turns = [line for line in lines if "status" in line]
    assert SECRET not in log
    assert {line["status"] for line in turns} == {"done", "failed"}
    assert all({"session_id", "turn_id", "task_id", "agent", "seconds"} <= line.keys() for line in turns)
