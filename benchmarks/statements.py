"""The number of SQL statements and commits that one turn needs, by statement name.

The benchmark runs in one process. `CountingDatabase` counts named statements in `Database.run` and commits in the
callback `Database.observe`. As a check, the driver's cursors count all statements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg2.extensions
from sqlalchemy import Row, event
from sqlalchemy.engine import URL

from benchmarks.agents import QUESTION, InProcessModel, assistant
from benchmarks.report import Section
from benchmarks.setup import Setup, ledger
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.clock import SystemClock
from perdure.database.engine import Database, Moment, Statement
from perdure.models.protocol import Model
from perdure.runtime import Runtime, Waker
from perdure.settings import Settings
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.lease.claim import Ran
from perdure.turns.run.loop import Runner

NAME = "statements"

_ACCEPTING = "turns.enqueue"


class SilentWaker:
    """A `Waker` that publishes no wake-ups, because the benchmark runs the session itself."""

    def session(self, _session_id: UUID, _priority: int) -> bool:
        """Publish nothing."""
        return True

    def drain(self, _session_id: UUID, _priority: int) -> bool:
        """Publish nothing."""
        return True

    def has_enough(self) -> bool:
        """Publish nothing."""
        return True

    def ending(self, _session_id: UUID) -> bool:
        """Publish nothing."""
        return True

    def delivery(self, _delivery_id: UUID) -> bool:
        """Publish nothing."""
        return True

    def consolidation(self, _session_id: UUID | None) -> bool:
        """Publish nothing."""
        return True

    def casebank(self) -> bool:
        """Publish nothing."""
        return True


class CountingDatabase(Database):
    """A database that counts its statements and commits, by name. `driven` counts what reaches the driver."""

    def __init__(self, url: URL) -> None:
        super().__init__(url, observe=self._observe)
        self.sent: Counter[str] = Counter()
        self.committed: Counter[str] = Counter()
        self.driven = 0
        event.listen(self.engine, "connect", self._count)

    def forget(self) -> None:
        """Reset the counts."""
        self.sent.clear()
        self.committed.clear()
        self.driven = 0

    def run(self, statement: Statement, parameters: Mapping[str, Any], *, urgent: bool = False) -> Sequence[Row[Any]]:
        """Count the statement and run it."""
        self.sent[statement.name] += 1
        return super().run(statement, parameters, urgent=urgent)

    def _observe(self, moment: Moment, name: str) -> None:
        self.committed[name] += moment == "after"

    def _count(self, connection: Any, *_: object) -> None:
        database = self

        class Counting(psycopg2.extensions.cursor):
            def execute(self, query: Any, parameters: Any = None) -> None:
                database.driven += 1
                super().execute(query, parameters)

        connection.cursor_factory = Counting


class Bench:
    """Accepts messages and runs their turns in this process. perdure's own agents call `model`."""

    def __init__(self, url: URL, agents: Agents, waker: Waker) -> None:
        self.database = CountingDatabase(url)
        self.model: Model = InProcessModel()
        self._runtime = Runtime(
            settings=Settings(_env_file=None),
            clock=SystemClock(),
            database=self.database,
            agents=agents,
            models=lambda _name: self.model,
            wake=waker,
            snapshots=PostgresSnapshots(self.database),
        )
        self._runner = Runner(self._runtime, "benchmark")

    def accept(self, user_id: str, agent: str = assistant.name, text: str = QUESTION) -> Accepted:
        """Accept a message."""
        return accept(self._runtime, Incoming(user=UserKey(user_id), text=text, agent=agent))

    def turn(self, user_id: str = "ana", agent: str = assistant.name, text: str = QUESTION) -> None:
        """Accept a message and run its turn."""
        assert self._runner.run(self.accept(user_id, agent, text).session_id) == Ran(1)


@contextmanager
def bench(url: URL, agents: Agents | None = None, waker: Waker | None = None) -> Iterator[Bench]:
    """Yield a `Bench`, by default of the benchmarks' agent, and close its database after the block."""
    made = Bench(url, agents or Agents([assistant]), waker or SilentWaker())
    yield made
    made.database.close()


@dataclass(frozen=True, slots=True)
class Counts:
    """Average counts per turn.

    `sent` is the number of statements for each statement name. `committed` is the number of commits for each name of a
    statement or transaction. `driven` is the number of all statements that reach the driver. `transactions` is the
    number of transactions that PostgreSQL counted.
    """

    sent: dict[str, float]
    committed: dict[str, float]
    driven: float
    transactions: float

    @property
    def worker_commits(self) -> int:
        """The number of commits per turn in the worker: all commits except the one that accepts the message."""
        return round(sum(self.committed.values()) - self.committed[_ACCEPTING])


def count(setup: Setup, turns: int) -> Counts:
    """Run `turns` turns in an existing session, and return the average counts per turn."""
    setup.progress("counting statements")
    with setup.database("bench_statements") as url:
        before = ledger(url)
        with bench(url) as made:
            made.turn()
            made.database.forget()
            for _ in range(turns):
                made.turn()
        transactions = (ledger(url) - before).commits
    return Counts(
        sent={name: times / turns for name, times in made.database.sent.items()},
        committed={name: times / turns for name, times in made.database.committed.items()},
        driven=made.database.driven / turns,
        transactions=transactions / (turns + 1),
    )


def measure(setup: Setup) -> Section:
    """Measure the statements and commits of one turn."""
    counts = count(setup, setup.scaled(200))
    sent, committed = sum(counts.sent.values()), sum(counts.committed.values())
    return Section(
        name=NAME,
        title="Statements and commits of one turn, by name",
        method=(
            "Turns of 2 model calls and 1 tool call in an existing session, in one process. Statements by name as they "
            "are passed to Database.run, commits as Database.observe reports them. Checks: the statements that reach "
            "the driver, and PostgreSQL's count of transactions, which includes reads, connecting and preparing."
        ),
        columns=["statement", "sent per turn", "commits per turn"],
        rows=[
            *([name, f"{times:.2f}", f"{counts.committed.get(name, 0):.2f}"] for name, times in counts.sent.items()),
            ["all", f"{sent:.2f}", f"{committed:.2f}"],
            ["check: the driver's statements", f"{counts.driven:.2f}", ""],
            ["check: PostgreSQL's transactions", f"{counts.transactions:.2f}", ""],
        ],
        figures={
            "statements_per_turn": sent,
            "commits_per_turn": committed,
            "driver_statements_per_turn": counts.driven,
            "transactions_per_turn": counts.transactions,
        },
    )
