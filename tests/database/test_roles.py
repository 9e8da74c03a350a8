"""A role that may only read and write the rows of perdure's tables runs turns, sweeps and upkeep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database, Statement
from perdure.memory.decay import decay
from perdure.memory.embedding import embed_missing
from perdure.memory.hot_memories import refresh_hot
from perdure.resilience.duties import Duties
from perdure.retention import retain
from perdure.runtime import Runtime
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.reading import read_turn
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import sweep
from perdure.workers.upkeep import UPKEEP, take_round

DUE = Statement("tests.due", "UPDATE sweeps SET due_at = due_at - interval '1 day'")


@pytest.fixture
def poor(runtime: Runtime, granted: Database) -> Runtime:
    """A process whose role has grants only."""
    return replace(runtime, database=granted, snapshots=PostgresSnapshots(granted))


def _warnings(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [each.getMessage() for each in caplog.records if each.levelname in {"WARNING", "ERROR"}]


@pytest.mark.long
def test_grants_suffice_for_turns_and_sweeps(poor: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """Turns, each duty of the sweep, embedding, retention, decay and erasures need grants only."""
    sent = accept(poor, Incoming(user=UserKey("ana"), text="hello"))
    Runner(poor, "tests").run(sent.session_id)
    assert read_turn(poor.database, sent.turn_id)["status"] == "done"
    poor.eraser.erase(UserKey("bob"))
    assert sweep(poor) is not None
    assert embed_missing(poor.database, poor.embedder).error is None
    assert decay(poor.database).changed == 0
    assert refresh_hot(poor.database) == 0
    assert set(retain(poor.database).values()) == {0}
    assert _warnings(caplog) == []


@pytest.mark.exhaustive
def test_upkeep_says_what_the_role_may_not_do(
    poor: Runtime, database: Database, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the build of an index and `ANALYZE` need the tables' owner. Each is one line, and the other duties run."""
    accept(poor, Incoming(user=UserKey("ana"), text="hello"))
    poor.eraser.erase(UserKey("bob"))
    with database.engine.connect() as connection:
        name = poor.embedder.name
        connection.exec_driver_sql(
            "INSERT INTO embedders (name, dimensions, created_at) VALUES (%s, 384, now())", (name,)
        )
    few = poor.settings.model_copy(update={"memory": poor.settings.memory.model_copy(update={"index_rows": 0})})
    poor = replace(poor, settings=few)
    duties = Duties(clock, 5)
    for _ in range(3):
        for upkeep in UPKEEP:
            duties.run(upkeep, lambda upkeep=upkeep: take_round(poor, upkeep))  # type: ignore[misc]
        poor.database.run(DUE, {})
    clock.advance(timedelta(seconds=1))
    first, second = sorted(_warnings(caplog))
    assert first.startswith("the duty 'memory indexes' failed, and pauses for 5 s: ")
    assert "must be owner of table message_vectors" in first
    assert second.startswith("the role may not analyze")
