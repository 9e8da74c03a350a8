"""Turns per second from acceptance to settling, compared with bare Celery tasks and with LangGraph.

perdure and the bare tasks have one producer process and one worker process each, the same broker and
PostgreSQL server, and as many messages in flight. The rate is taken by the database's clock, from the
end of the warm-up to a time when the producer is still sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.engine import URL

from benchmarks import floor, langgraph_peer, statements
from benchmarks.report import Rate, Section
from benchmarks.setup import Ledger, Setup, connected, ledger, scalar

NAME = "turns"

_WINDOW = 200
_USERS = 500
_TIMEOUT_S = 240.0
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Load:
    """How many turns are counted. The warm-up precedes them; one window of turns follows them."""

    counted: int
    warm_up: int

    @property
    def total(self) -> int:
        """All turns that are sent."""
        return self.warm_up + self.counted + _WINDOW


@dataclass(frozen=True, slots=True)
class Sides:
    """The worker's application, the producer's arguments, and the query that counts finished turns."""

    application: str
    producer: Sequence[str]
    done: str


def measure(setup: Setup) -> Section:
    """The section."""
    commits = statements.count(setup, setup.scaled(100)).worker_commits
    turns = Load(setup.scaled(1_200), warm_up=2 * _WINDOW)
    tasks = Load(setup.scaled(2_500), warm_up=2 * _WINDOW)
    rounds = [
        (
            perdure_rate(setup, turns),
            floor_rate(setup, tasks, commits),
            langgraph_peer.rate(setup, conversations=setup.scaled(60), threads=1),
            langgraph_peer.rate(setup, conversations=setup.scaled(120), threads=16),
        )
        for _ in range(1 if setup.quick else _ROUNDS)
    ]
    mine, bare, one, sixteen = (max(rates, key=_speed) for rates in zip(*rounds, strict=True))
    peer = max(one, sixteen, key=_speed)
    return Section(
        name=NAME,
        title="Turns per second: whole path, bare floor, LangGraph",
        method=(
            "2 model calls without latency and 1 tool call a turn. perdure: a producer process, Redis, one worker "
            f"(celery -A perdure worker, default settings), {_WINDOW} messages in flight over {_USERS} sessions, "
            f"steady state. Floor: a bare Celery task of {commits} one-row commits and one of its producer's; same "
            f"broker, pool and width. {langgraph_peer.METHOD} Transactions (a read is one) and WAL are PostgreSQL's "
            f"own counts. The better of {len(rounds)} rounds each, in alternation."
        ),
        columns=["", "per second", "perdure is", "transactions each", "WAL KiB each"],
        rows=[
            _row("perdure", mine, mine),
            _row("floor: bare tasks", bare, mine),
            _row("LangGraph, 1 thread", one, mine),
            _row("LangGraph, 16 threads", sixteen, mine),
        ],
        figures={
            "perdure_per_s": mine.per_s,
            "floor_per_s": bare.per_s,
            "langgraph_per_s": peer.per_s,
            "of_the_floor": mine.per_s / bare.per_s,
            "times_langgraph": mine.per_s / peer.per_s,
            "transactions_per_turn": mine.transactions,
            "wal_kib_per_turn": mine.wal_kib,
            "langgraph_transactions_per_turn": peer.transactions,
            "langgraph_wal_kib_per_turn": peer.wal_kib,
        },
    )


def perdure_rate(setup: Setup, load: Load) -> Rate:
    """Turns per second of perdure, by their settling times."""
    sides = Sides("perdure", ["perdure", "--users", str(_USERS)], "SELECT count(settled_at) FROM turns")
    with setup.database("bench_turns") as url:
        counted = _run(setup, url, sides, load)
        unanswered = scalar(url, "SELECT count(*) FROM turns WHERE status <> 'done' OR steps <> 2")
        assert unanswered == 0, f"{unanswered} turns did not end as they should"
        seconds = _seconds(url, "SELECT settled_at FROM turns ORDER BY settled_at", load)
    return _rate(load, seconds, counted)


def floor_rate(setup: Setup, load: Load, commits: int) -> Rate:
    """Bare tasks per second, by the time of their last commit."""
    last = f"FROM floor_rows WHERE step = {commits}"
    sides = Sides("benchmarks.floor", ["floor", "--commits", str(commits)], f"SELECT count(*) {last}")
    with setup.database("bench_floor", tables=False) as url:
        with connected(url) as connection:
            connection.exec_driver_sql(floor.TABLE)
        counted = _run(setup, url, sides, load)
        seconds = _seconds(url, f"SELECT at {last} ORDER BY at", load)
    return _rate(load, seconds, counted)


def _run(setup: Setup, url: URL, sides: Sides, load: Load) -> Ledger:
    """Run the producer and a worker until all is done. Returns PostgreSQL's counts for that time."""
    before, environment = ledger(url), setup.environment(url)
    sending = [*sides.producer, "--total", str(load.total), "--window", str(_WINDOW)]
    with (
        setup.process("celery", "-A", sides.application, "worker", environment=environment),
        setup.process("benchmarks.producer", *sending, environment=environment) as sender,
    ):
        setup.finish(sender, _TIMEOUT_S, lambda: f"{sides.producer[0]}: {scalar(url, sides.done)} of {load.total}")
    return ledger(url) - before


def _seconds(url: URL, moments: str, load: Load) -> float:
    """Seconds between the end of the warm-up and the end of the last counted turn."""
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
