"""What a turn costs while one worker drains a backlog: CPU time, wake-ups, Redis commands and transactions.

Three backlogs: messages that are accepted before the worker starts, the same after Redis has lost its data, and
messages that arrive while the worker runs (`benchmarks.producer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import redis
from sqlalchemy.engine import URL

from benchmarks.agents import QUESTION
from benchmarks.report import Section
from benchmarks.setup import Ledger, Setup, ledger, scalar, until
from perdure.access.tenants import UserKey
from perdure.assembly import Addresses, assemble
from perdure.servers.redis import client_url
from perdure.settings import Settings
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.workers.publish.wake import CeleryWaker

NAME = "backlog"

_TURNS = 1_500
_WINDOW = 200
_USERS = 500
_DONE_S = 240.0
_SETTLED = "SELECT count(*) FROM turns WHERE settled_at IS NOT NULL"
_RATE = """
    SELECT count(*) * 0.8 / extract(epoch FROM percentile_disc(0.9) WITHIN GROUP (ORDER BY settled_at)
                                             - percentile_disc(0.1) WITHIN GROUP (ORDER BY settled_at)) FROM turns
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Turns per second, and the averages per turn.

    `cpu_ms` is the worker's CPU time after its start. `wake_ups` are the messages that were published to Celery's
    queues, by any process. `commands` are those that Redis ran, and `transactions` those of PostgreSQL.
    """

    per_s: float
    cpu_ms: float
    wake_ups: float
    commands: float
    transactions: float


def measure(setup: Setup) -> Section:
    """Measure the three backlogs."""
    turns = setup.scaled(_TURNS)
    found = {
        "accepted before": waiting(setup, turns, wiped=False),
        "accepted before, Redis wiped": waiting(setup, turns, wiped=True),
        "arriving": arriving(setup, turns),
    }
    return Section(
        name=NAME,
        title="A turn's cost while one worker drains a backlog",
        method=(
            f"{turns} turns of 2 model calls without latency and 1 tool call, one worker with default settings. The "
            "first two rows: one session for each turn. The last row: one producer process keeps "
            f"{_WINDOW} messages in flight over {_USERS} sessions. The rate excludes the first and the last tenth. CPU "
            "time is the worker process's, without its start. Wake-ups are Redis's LPUSH commands. The counts of Redis "
            "and PostgreSQL include the producer's."
        ),
        columns=["backlog", "turns per second", "CPU ms", "wake-ups", "Redis commands", "transactions"],
        rows=[
            [
                kind,
                f"{cost.per_s:.0f}",
                f"{cost.cpu_ms:.2f}",
                f"{cost.wake_ups:.2f}",
                f"{cost.commands:.1f}",
                f"{cost.transactions:.1f}",
            ]
            for kind, cost in found.items()
        ],
        figures={
            f"{kind.replace(', ', '_').replace(' ', '_')}_{name}": getattr(cost, name)
            for kind, cost in found.items()
            for name in ("per_s", "cpu_ms", "wake_ups", "commands", "transactions")
        },
    )


def waiting(setup: Setup, turns: int, *, wiped: bool) -> Cost:
    """Measure `turns` turns that wait when the worker starts. `wiped`: Redis has lost their wake-ups."""
    with setup.database("bench_backlog") as url, _redis(setup) as client:
        client.config_resetstat()
        _accept(setup, url, turns)
        if wiped:
            client.flushall()
            client.config_resetstat()
        before, environment = ledger(url), setup.environment(url)
        with setup.process("celery", "-A", "perdure", "worker", environment=environment) as worker:
            cpu_s = _started(worker, lambda: bool(scalar(url, _SETTLED) > 0))
            until(lambda: bool(scalar(url, _SETTLED) >= turns), _DONE_S, lambda: setup.progress(_progress(url, turns)))
            cpu_s = _cpu_s(worker) - cpu_s
            return _cost(client, turns, cpu_s, (url, before), worker)


def arriving(setup: Setup, turns: int) -> Cost:
    """Measure `turns` turns, of which at most `_WINDOW` are unfinished at a time."""
    with setup.database("bench_backlog") as url, _redis(setup) as client:
        client.config_resetstat()
        before, environment = ledger(url), setup.environment(url)
        arguments = ["perdure", "--users", str(_USERS), "--total", str(turns), "--window", str(_WINDOW)]
        with (
            setup.process("celery", "-A", "perdure", "worker", environment=environment) as worker,
            setup.process("benchmarks.producer", *arguments, environment=environment) as producer,
        ):
            cpu_s = _started(worker, lambda: bool(scalar(url, _SETTLED) > 0))
            setup.finish(producer, _DONE_S, lambda: _progress(url, turns))
            cpu_s = _cpu_s(worker) - cpu_s
            return _cost(client, turns, cpu_s, (url, before), worker)


def _cost(client: Any, turns: int, cpu_s: float, began: tuple[URL, Ledger], worker: psutil.Popen) -> Cost:
    """The averages. Ends the worker, since PostgreSQL may count a connection's transactions only when it closes."""
    url, before = began
    stats, commands = client.info("commandstats"), client.info("stats")["total_commands_processed"]
    per_s = float(scalar(url, _RATE))
    worker.terminate()
    worker.wait(60)
    time.sleep(0.5)
    return Cost(
        per_s=per_s,
        cpu_ms=cpu_s * 1000 / turns,
        wake_ups=stats.get("cmdstat_lpush", {"calls": 0})["calls"] / turns,
        commands=commands / turns,
        transactions=(ledger(url) - before).commits / turns,
    )


def _accept(setup: Setup, url: URL, turns: int) -> None:
    settings, broker = Settings(_env_file=None, agents="benchmarks.agents"), setup.servers.redis.url
    waker = CeleryWaker(settings, Addresses(str(url), broker, broker))
    runtime = assemble(settings, url.render_as_string(hide_password=False), waker)
    for number in range(turns):
        accept(runtime, Incoming(user=UserKey(f"user-{number}"), text=QUESTION))
    waker.close()
    runtime.database.close()


def _started(worker: psutil.Popen, has_begun: Callable[[], bool]) -> float:
    """Wait until the worker has begun; returns the CPU seconds that its start took."""
    until(has_begun, _DONE_S)
    return _cpu_s(worker)


def _cpu_s(worker: psutil.Popen) -> float:
    times = worker.cpu_times()
    return float(times.user + times.system)


def _progress(url: URL, turns: int) -> str:
    return f"backlog: {scalar(url, _SETTLED)} of {turns}"


def _redis(setup: Setup) -> Any:
    return redis.Redis.from_url(client_url(setup.servers.redis.url))
