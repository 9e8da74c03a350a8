"""Twelve faults of a running installation. Each shows within a minute, wherever an operator looks.

`perdure status` names the part at fault, an alert's expression is true in a Prometheus that scrapes the gateway and the
workers, and `perdure doctor` names the setting, if the fault is one. docs/operating.md has the table.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import create_engine

from perdure.redis import connect
from tests.cli.conftest import Perdure
from tests.models.openai_server import Answer, Status
from tests.processes import prometheus
from tests.processes.faults import wait_until
from tests.processes.gateway import serving
from tests.processes.installation import Installation
from tests.processes.nodes import Worker
from tests.processes.receiver import Receiver

WITHIN_S = 60.0

_ROOM_BYTES = 4_000_000
"""How much the database may grow until its disk is nearly full."""

_GB = 1_000_000_000

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@dataclass
class Stack:
    """An installation with a gateway, a worker of one thread and a Prometheus."""

    installation: Installation
    perdure: Perdure
    worker: Worker
    prometheus: prometheus.Prometheus
    planted_at: float = field(default=0.0)

    def plant(self, part: str, alert: str) -> None:
        """Begin a fault, of which nothing is seen yet."""
        assert alert not in self.prometheus.active()
        assert part not in {each["part"] for each in self.faults()}
        self.planted_at = time.monotonic()

    def shows(self, part: str, severity: str, alert: str) -> str:
        """Wait until the fault shows, for a minute since `plant`; returns what `perdure status` says about the part."""
        wait_until(lambda: alert in self.prometheus.active(), f"{alert} is active", self._rest_s())

        def messages() -> str:
            found = (each for each in self.faults() if (each["part"], each["severity"]) == (part, severity))
            return " ".join(each["message"] for each in found)

        text = wait_until(messages, f"perdure status shows {part}", self._rest_s())
        assert (self.perdure("status").returncode == 1) == (severity == "down")
        return text

    def faults(self) -> list[dict[str, Any]]:
        """The faults of `perdure status`."""
        found: list[dict[str, Any]] = json.loads(self.perdure("status", "--json").stdout)["faults"]
        return found

    def findings(self) -> str:
        """The settings that `perdure doctor` calls dangerous."""
        ran = self.perdure("doctor", "--json")
        assert ran.returncode == 1, ran.stdout
        return " · ".join(each["setting"] for each in json.loads(ran.stdout)["findings"])

    def _rest_s(self) -> float:
        return max(self.planted_at + WITHIN_S - time.monotonic(), 0)


@pytest.fixture
def stack(installation: Installation, perdure: Perdure) -> Iterator[Stack]:
    """A stack without a fault."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (size,) = installation.query("SELECT pg_database_size(current_database()) AS bytes")
    installation.environment |= {
        "PERDURE_METRICS__WORKER_PORT": str(port),
        "PERDURE_METRICS__EVERY_S": "1",
        "PERDURE_AGENTS": "tests.processes.plain_agents",
        "PERDURE_DATABASE_CAPACITY_GB": str((size.bytes + _ROOM_BYTES) / 0.9 / _GB),
    }
    worker = installation.worker("--concurrency", "1")
    worker.container.ready()
    with serving(perdure) as url:
        targets = [url.removeprefix("http://"), f"127.0.0.1:{port}"]
        with prometheus.running(installation.directory / "prometheus", targets) as found:
            stack = Stack(installation, perdure, worker, found)
            wait_until(lambda: stack.faults() == [], "nothing is at fault", 40)
            yield stack


def test_provider_down(stack: Stack) -> None:
    """The model's breaker opens."""
    stack.plant("breakers", "PerdureBreakerOpen")
    stack.installation.model_server.down = True
    for number in range(6):
        stack.installation.accept("hello", user=f"user {number}")
    assert "llm:openai:test" in stack.shows("breakers", "warning", "PerdureBreakerOpen")


@pytest.mark.exhaustive
def test_redis_full(stack: Stack) -> None:
    """Redis refuses writes, so no turn is woken."""
    stack.plant("redis", "PerdureRedisRefusesWrites")
    with connect(stack.installation.redis.url) as redis:
        redis.config_set("maxmemory", "1mb")
        try:
            assert "full" in stack.shows("redis", "down", "PerdureRedisRefusesWrites")
            assert "of maxmemory are used" in stack.findings()
        finally:
            redis.config_set("maxmemory", "0")


@pytest.mark.exhaustive
def test_redis_evicting(stack: Stack) -> None:
    """Redis discards keys. Turns are still answered, since their rows are in PostgreSQL."""
    stack.plant("redis", "PerdureRedisEvicts")
    with connect(stack.installation.redis.url) as redis:
        redis.config_set("maxmemory-policy", "allkeys-lru")
        redis.config_set("maxmemory", str(redis.info("memory")["used_memory"] + 200_000))
        for number in range(400):
            redis.set(f"another application's {number}", "x" * 2_000)
        text = stack.shows("redis", "warning", "PerdureRedisEvicts")
    assert "allkeys-lru" in text
    assert "has evicted" in text
    assert "maxmemory-policy is allkeys-lru" in stack.findings()
    (turn,) = stack.installation.settled(stack.installation.accept("hello").turn_id, within_s=WITHIN_S)
    assert turn["status"] == "done"


@pytest.mark.exhaustive
def test_no_worker(stack: Stack) -> None:
    """The only worker is killed."""
    stack.plant("workers", "PerdureNoWorker")
    stack.worker.container.kill(signal.SIGKILL)
    assert "No worker runs turns" in stack.shows("workers", "down", "PerdureNoWorker")


@pytest.mark.exhaustive
def test_hung_worker(stack: Stack) -> None:
    """One of two workers stands still. The other one answers."""
    other = stack.installation.worker()
    other.container.ready()
    stack.plant("workers", "PerdureProcessLost")
    stack.worker.container.signal(signal.SIGSTOP)
    assert stack.worker.container.name in stack.shows("workers", "warning", "PerdureProcessLost")
    (turn,) = stack.installation.settled(stack.installation.accept("hello").turn_id)
    assert turn["status"] == "done"


@pytest.mark.exhaustive
def test_beat_dead(stack: Stack) -> None:
    """Beat is killed. The workers' sweepers fire the slots."""
    beat = stack.perdure.start("beat")
    try:
        wait_until(lambda: stack.installation.query("SELECT FROM processes WHERE kind = 'beat'"), "beat reports", 40)
        assert (stack.installation.directory / "data" / "beat.alive").exists()
        wait_until(lambda: "PerdureBeatGone" not in stack.prometheus.active(), "beat is seen", 40)
        stack.plant("beat", "PerdureBeatGone")
    finally:
        beat.kill()
        beat.join()
    assert "No beat runs" in stack.shows("beat", "warning", "PerdureBeatGone")


@pytest.mark.exhaustive
def test_disk_nearly_full(stack: Stack) -> None:
    """The database grows to over 90 % of what its disk has room for."""
    stack.plant("disk", "PerdureDiskNearlyFull")
    with stack.installation.database.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE grown AS SELECT repeat(md5(n::text), 60) FROM generate_series(1, 6000) n"
        )
    assert "PERDURE_DATABASE_CAPACITY_GB" in stack.shows("disk", "warning", "PerdureDiskNearlyFull")
    assert "PERDURE_DATABASE_CAPACITY_GB" in stack.findings()


@pytest.mark.exhaustive
def test_backlog(stack: Stack) -> None:
    """The only thread of the fleet waits for a model, and another user's turn waits for the thread."""
    stack.installation.model_server.latencies["slow"] = 2 * WITHIN_S
    gate = stack.installation.model_server.gate("slow")
    stack.installation.accept("slow", user="bob")
    gate.wait()
    stack.plant("backlog", "PerdureBacklog")
    stack.installation.accept("hello")
    assert "1 sessions wait for a worker" in stack.shows("backlog", "warning", "PerdureBacklog")


@pytest.mark.exhaustive
def test_deliveries_failing(stack: Stack, receiver: Receiver) -> None:
    """A receiver answers 500."""
    receiver.statuses.extend([500] * 100)
    stack.plant("deliveries", "PerdureDeliveriesFail")
    stack.installation.accept("hello", reply_to={"url": receiver.url})
    assert "tried again" in stack.shows("deliveries", "warning", "PerdureDeliveriesFail")


@pytest.mark.exhaustive
def test_consolidation_failing(stack: Stack) -> None:
    """The model fails at each request to extract memories. Later, it answers text that is no JSON."""
    stack.installation.model_server.extracted = Status(500, message="no memory")
    sent = [stack.installation.accept(f"I live in Lyon {number}.") for number in range(5)]
    stack.installation.settled(*[each.turn_id for each in sent])
    stack.plant("consolidation", "PerdureConsolidationsFail")
    session_id = str(sent[0].session_id)
    assert stack.perdure("sessions", "end", session_id).returncode == 0
    ended = "SELECT FROM sessions WHERE ended_at IS NOT NULL"
    wait_until(lambda: stack.installation.query(ended), "the session has ended")
    assert "a run failed" in stack.shows("consolidation", "warning", "PerdureConsolidationsFail")
    stack.installation.model_server.extracted = Answer("I remember nothing.")
    assert stack.perdure("memory", "consolidate", "--session", session_id).returncode == 1
    wait_until(lambda: "PerdureConsolidationsGivenUp" in stack.prometheus.active(), "the session is abandoned")


@pytest.mark.exhaustive
def test_clock_skew(stack: Stack) -> None:
    """The clock of one worker's machine is a minute ahead."""
    stack.plant("clock", "PerdureClockSkew")
    skewed = stack.installation.worker(PERDURE_AGENTS="tests.processes.skewed_agents")
    skewed.container.ready()
    assert "ahead of PostgreSQL's" in stack.shows("clock", "warning", "PerdureClockSkew")


@pytest.mark.exhaustive
def test_long_transaction(stack: Stack) -> None:
    """A program of the same role leaves a transaction open."""
    stack.plant("database", "PerdureLongTransaction")
    url = stack.installation.environment["PERDURE_DATABASE_URL"]
    engine = create_engine(url, isolation_level="REPEATABLE READ")  # keeps its snapshot while it is idle
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
        assert "A transaction has been open" in stack.shows("database", "warning", "PerdureLongTransaction")
    engine.dispose()
