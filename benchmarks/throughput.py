"""Compares perdure's turns per second with bare Celery tasks, and with turns of LangGraph and of DBOS.

A bare task makes as many commits as a turn, but runs no agent (`benchmarks.floor`). perdure and the bare tasks use the
same broker and the same PostgreSQL server. Each of the two has one producer process, one worker process and `_WINDOW`
messages in flight.

The rate of perdure and of the bare tasks is computed from the database's timestamps of finished turns and tasks. The
measurement starts at the end of the warm-up and ends while messages are still in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.engine import URL

from benchmarks import dbos_peer, floor, langgraph_peer, statements
from benchmarks.report import Rate, Section
from benchmarks.setup import Ledger, Setup, connected, ledger, scalar

NAME = "turns"

_WINDOW = 200
_USERS = 500
_TIMEOUT_S = 240.0
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Load:
    """The turns or tasks to send. The rate excludes the first `warm_up` and counts the next `counted`."""

    counted: int
    warm_up: int

    @property
    def total(self) -> int:
        """The number of turns or tasks to send: `warm_up`, `counted`, and `_WINDOW` more at the end."""
        return self.warm_up + self.counted + _WINDOW


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two systems that run on Celery: perdure or the bare tasks.

    Attributes:
        application: the worker's Celery application.
        producer: the arguments of `benchmarks.producer`.
        done: a query that counts the finished turns or tasks.
    """

    application: str
    producer: Sequence[str]
    done: str


def measure(setup: Setup) -> Section:
    """Measure perdure, bare Celery tasks, LangGraph and DBOS."""
    commits = statements.count(setup, setup.scaled(100)).worker_commits
    turns = Load(setup.scaled(1_200), warm_up=2 * _WINDOW)
    tasks = Load(setup.scaled(2_500), warm_up=2 * _WINDOW)
    rounds = [
        (
            perdure_rate(setup, turns),
            floor_rate(setup, tasks, commits),
            langgraph_peer.rate(setup, conversations=setup.scaled(60), threads=1),
            langgraph_peer.rate(setup, conversations=setup.scaled(120), threads=16),
            dbos_peer.rate_of_threads(setup, setup.scaled(500), threads=16),
            dbos_peer.rate_of_queue(setup, setup.scaled(500)),
        )
        for _ in range(1 if setup.quick else _ROUNDS)
    ]
    mine, bare, one, sixteen, dbos, queue = (max(rates, key=_speed) for rates in zip(*rounds, strict=True))
    peer, workflows = max(one, sixteen, key=_speed), max(dbos, queue, key=_speed)
    return Section(
        name=NAME,
        title="Turns per second: perdure, bare Celery tasks, LangGraph, DBOS",
        method=(
            "A turn has 2 model calls without latency and 1 tool call. perdure: one producer process, Redis, one "
            f"worker (celery -A perdure worker, default settings), {_WINDOW} messages in flight over {_USERS} "
            f"sessions, after a warm-up. Floor: a bare Celery task with {commits} single-row commits, and one commit "
            f"by its producer; the same broker, pool and pool size. {langgraph_peer.METHOD} {dbos_peer.METHOD} "
            "Transactions (including reads) and WAL are PostgreSQL's counts. Each figure is the better of "
            f"{len(rounds)} alternating rounds."
        ),
        columns=["", "per second", "perdure is", "transactions each", "WAL KiB each"],
        rows=[
            _row("perdure", mine, mine),
            _row("floor: bare tasks", bare, mine),
            _row("LangGraph, 1 thread", one, mine),
            _row("LangGraph, 16 threads", sixteen, mine),
            _row("DBOS, 16 threads", dbos, mine),
            _row("DBOS, its queue", queue, mine),
        ],
        figures={
            "perdure_per_s": mine.per_s,
            "floor_per_s": bare.per_s,
            "langgraph_per_s": peer.per_s,
            "dbos_per_s": workflows.per_s,
            "of_the_floor": mine.per_s / bare.per_s,
            "times_langgraph": mine.per_s / peer.per_s,
            "times_dbos": mine.per_s / workflows.per_s,
            "transactions_per_turn": mine.transactions,
            "wal_kib_per_turn": mine.wal_kib,
            "langgraph_transactions_per_turn": peer.transactions,
            "langgraph_wal_kib_per_turn": peer.wal_kib,
        },
    )


def perdure_rate(setup: Setup, load: Load) -> Rate:
    """Measure perdure's turns per second, based on the time at which each turn is settled."""
    side = Side("perdure", ["perdure", "--users", str(_USERS)], "SELECT count(settled_at) FROM turns")
    with setup.database("bench_turns") as url:
        counted = _run(setup, url, side, load)
        unanswered = scalar(url, "SELECT count(*) FROM turns WHERE status <> 'done' OR steps <> 2")
        assert unanswered == 0, f"{unanswered} turns are not done after 2 steps"
        seconds = _seconds(url, "SELECT settled_at FROM turns ORDER BY settled_at", load)
    return _rate(load, seconds, counted)


def floor_rate(setup: Setup, load: Load, commits: int) -> Rate:
    """Measure bare tasks per second, based on the time of each task's last commit. A task makes `commits` commits."""
    last = f"FROM floor_rows WHERE step = {commits}"
    side = Side("benchmarks.floor", ["floor", "--commits", str(commits)], f"SELECT count(*) {last}")
    with setup.database("bench_floor", tables=False) as url:
        with connected(url) as connection:
            connection.exec_driver_sql(floor.TABLE)
        counted = _run(setup, url, side, load)
        seconds = _seconds(url, f"SELECT at {last} ORDER BY at", load)
    return _rate(load, seconds, counted)


def _run(setup: Setup, url: URL, side: Side, load: Load) -> Ledger:
    """Run a worker and the producer until all turns or tasks are done; return the run's commits and WAL bytes."""
    before, environment = ledger(url), setup.environment(url)
    arguments = [*side.producer, "--total", str(load.total), "--window", str(_WINDOW)]
    with (
        setup.process("celery", "-A", side.application, "worker", environment=environment),
        setup.process("benchmarks.producer", *arguments, environment=environment) as producer,
    ):
        setup.finish(producer, _TIMEOUT_S, lambda: f"{side.producer[0]}: {scalar(url, side.done)} of {load.total}")
    return ledger(url) - before


def _seconds(url: URL, moments: str, load: Load) -> float:
    """Seconds from the end of the warm-up to the end of the last counted turn or task.

    `moments` is a query that returns the end time of each turn or task, in ascending order.
    """
    sql = f"SELECT extract(epoch FROM ({moments} OFFSET :last LIMIT 1) - ({moments} OFFSET :first LIMIT 1))"  # noqa: S608 (ours)
    return float(scalar(url, sql, first=load.warm_up - 1, last=load.warm_up + load.counted - 1))


def _rate(load: Load, seconds: float, counted: Ledger) -> Rate:
    return Rate(load.counted / seconds, counted.commits / load.total, counted.wal_bytes / 1024 / load.total)


def _speed(rate: Rate) -> float:
    return rate.per_s


def _row(who: str, rate: Rate, mine: Rate) -> list[str]:
    return [
        who,
        f"{rate.per_s:.0f}",
        f"{mine.per_s / rate.per_s:.2f} x",
        f"{rate.transactions:.1f}",
        f"{rate.wal_kib:.1f}",
    ]
