"""Functions that create, write and read cases for the CaseBank's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import numpy as np
from sqlalchemy import TextClause, text

from perdure.access.tenants import UserKey
from perdure.casebank.plan.compute import PruneCandidate
from perdure.casebank.plan.cosines import Vector
from perdure.casebank.plan.duplicates import Content
from perdure.casebank.plan.policy import Facts
from perdure.casebank.queries import WITH_USES
from perdure.casebank.runs.notify import NotifyFailed
from perdure.casebank.runs.prune import RunContext
from perdure.clock import MovedClock
from perdure.database.engine import Database, Statement
from perdure.database.tables import metadata
from perdure.settings import CasebankSettings

NORTH, NEARLY, EAST, UP = [1.0, 0, 0, 0], [0.99, 0.01, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]

NOW = datetime(2026, 3, 1, 2, 0, tzinfo=UTC)
LIMITS = CasebankSettings(load_percent=100)
TABLES = ("cases", "case_executions", "case_archive", "case_history", "case_runs", "case_run_items", "sweeps")
_SEQUENCES = "SELECT concat_ws(' ', sequencename, last_value) FROM pg_sequences ORDER BY 1"


def facts(
    case_id: str = "a", *, usage: int = 0, rate: float | None = None, idle_days: float = 30, **more: Any
) -> Facts:
    """Facts of a case that was last accessed `idle_days` before `NOW`."""
    made = Facts(case_id, usage, rate, NOW - timedelta(days=idle_days), NOW - timedelta(days=400))
    return replace(made, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCase(PruneCandidate):
    """A candidate, and what the planner reads of it when it compares it."""

    query: str
    vector: Vector | None

    @property
    def content(self) -> Content:
        """What the planner reads when it compares the case."""
        return Content(self.query, self.embedder, self.vector)


def candidate(
    case: Facts,
    vector: Sequence[float] | None = None,
    query: str = "how to do it",
    embedder: str = "hash:4",
    user_id: UserKey | None = None,
    **more: Any,
) -> KnownCase:
    """A case as the planner reads it."""
    array = None if vector is None else np.asarray(vector, dtype=np.float32)
    dimensions = None if array is None else len(array)
    return KnownCase(
        facts=case, embedder=embedder, dimensions=dimensions, user_id=user_id, query=query, vector=array, **more
    )


def put(
    database: Database,
    case_id: str,
    *,
    query: str = "how to do it",
    vector: Sequence[float] | None = None,
    embedder: str | None = "hash:4",
    usage: int = 0,
    rate: float | None = None,
    idle_days: float | None = 30,
    age_days: float = 400,
    user_id: str | None = None,
    bank: str = "common",
    shared: bool = False,
) -> None:
    """Write one active case. `idle_days` and `age_days` count back from the test's clock."""
    with database.engine.connect() as connection:
        connection.execute(
            text(
                "INSERT INTO cases (case_id, query, response_text, query_vector, embedder, usage_count, success_rate,"
                " last_accessed_at, created_at, user_id, bank, shared_at)"
                " VALUES (:id, :query, 'like this', CAST(:vector AS public.vector), :embedder, :usage, :rate,"
                " perdure_now() - make_interval(secs => :idle),"
                " perdure_now() - make_interval(secs => :age), :user_id, :bank,"
                " CASE WHEN :shared THEN perdure_now() END)"
            ),
            {
                "id": case_id,
                "query": query,
                "vector": None if vector is None else str(list(vector)),
                "embedder": None if vector is None else embedder,
                "usage": usage,
                "rate": rate,
                "idle": None if idle_days is None else idle_days * 86_400,
                "age": age_days * 86_400,
                "user_id": user_id,
                "bank": bank,
                "shared": shared,
            },
        )


_USE = Statement("tests.use", f"WITH fenced AS (SELECT 1), {WITH_USES} SELECT 1 FROM fenced")  # noqa: S608 (constants)


def use(
    database: Database, case_ids: Sequence[str], turn_id: UUID, *, succeeded: bool = True, error: str | None = None
) -> None:
    """Record that a turn used these cases, with the same SQL as the statement that ends a turn."""
    status = "done" if succeeded else "failed"
    database.run(_USE, {"case_ids": list(case_ids), "turn_id": turn_id, "status": status, "error_code": error})


def everything(database: Database) -> dict[str, list[str]]:
    """All rows of all tables with their `ctid`, `xmin` and `xmax`, and the value of each sequence."""
    with database.engine.connect() as connection:
        found = {table: list(connection.execute(_every_row(table)).scalars()) for table in metadata.tables}
        return {**found, "sequences": list(connection.execute(text(_SEQUENCES)).scalars())}


def _every_row(table: str) -> TextClause:
    return text(f"SELECT concat_ws(' ', t.ctid, t.xmin, t.xmax, t::text) FROM {table} AS t ORDER BY 1")  # noqa: S608 (ours)


def statuses(database: Database) -> dict[str, str]:
    """The status of each case, by id."""
    with database.engine.connect() as connection:
        return {row.case_id: row.status for row in connection.execute(text("SELECT case_id, status FROM cases"))}


def column(database: Database, sql: str, **parameters: Any) -> list[Any]:
    """The values of a query with one column."""
    with database.engine.connect() as connection:
        return list(connection.execute(text(sql), parameters).scalars())


def unit(rng: random.Random, dimensions: int = 4) -> list[float]:
    """A random unit vector."""
    vector = np.array([rng.gauss(0, 1) for _ in range(dimensions)])
    return [float(each) for each in vector / np.linalg.norm(vector)]


class Post:
    """A receiver that stores notices. While `unavailable` is true, it raises `NotifyFailed`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.unavailable = False

    def __call__(self, url: str, body: bytes) -> None:
        """Store a notice."""
        if self.unavailable:
            raise NotifyFailed("the receiver is unavailable")
        self.sent.append((url, body))


def bank(database: Database, clock: MovedClock, post: Post | None = None, **limits: Any) -> RunContext:
    """The context of a pruning run that does not wait: `load_percent` is 100, and `pause` returns at once."""
    settings = CasebankSettings(**{"load_percent": 100, **limits})
    return RunContext(database, clock, settings, post or Post(), pause=lambda _seconds: None)


def fill(database: Database) -> None:
    """Write cases for every pruning rule: a low performer, two duplicates, an inactive case, and protected cases."""
    put(database, "good", vector=NORTH, usage=20, rate=80.0)
    put(database, "twin", vector=NEARLY, usage=10, rate=50.0, idle_days=20)
    put(database, "low", vector=EAST, usage=11, rate=20.0)
    put(database, "low but new", vector=EAST, usage=11, rate=20.0, idle_days=1)
    put(database, "unknown", vector=UP, usage=50)
    put(database, "sleeper", usage=100, idle_days=91)
    put(database, "old friend", usage=101, idle_days=91)
    put(database, "pillar", usage=501, rate=1.0, idle_days=200)


def details(result: dict[str, Any]) -> dict[str, Any]:
    """The details of a plan or an outcome, in a short form.

    Each entry of `spared` becomes a pair of case and rule. Each entry of `merged` becomes a pair of keeper and removed
    case.
    """
    found_details: dict[str, Any] = dict(result["details"])
    found_details["spared"] = [(each["case_id"], each["rule"]) for each in found_details["spared"]]
    found_details["merged"] = [(each["keeper"], each["removed"]) for each in found_details["merged"]]
    return found_details


EXPECTED = {
    "removed": ["low"],
    "merged": [("good", "twin")],
    "archived": ["sleeper"],
    "spared": [
        ("low but new", "recent_access"),
        ("old friend", "exempt_usage"),
        ("pillar", "protected_usage"),
        ("pillar", "protected_usage"),
    ],
}
