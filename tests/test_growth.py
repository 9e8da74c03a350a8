"""A simulated year with retention on: the tables stop to grow, and the database keeps its size.

New users come all the time. Each has a conversation with a key, of two turns with a tool and a callback, which ends
idle, is summarised and consolidated. The product's own retention deletes what is old. No row depends on the number of
other users, so the sizes of the simulation stand for those of any number of users in proportion;
docs/operating/capacity.md has them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure import tool
from perdure.database.tables import metadata
from perdure.models.offline import OfflineModel
from perdure.retention import retain
from perdure.sessions.ending import expire_idle
from perdure.settings import RetentionSettings
from perdure.turns.lease.keeper import Keeper
from perdure.turns.outbox import deliver
from tests.memory.archive import Archive
from tests.sessions.conftest import ender
from tests.turns.conftest import harness
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

__all__ = ["harness"]

KEPT_DAYS = 30
STEP_DAYS = 10
STEPS = 365 // STEP_DAYS
USERS_A_STEP = 4

MOST_GROWTH = 1.05

RETENTION = RetentionSettings(
    inbox_days=KEPT_DAYS, events_days=KEPT_DAYS, effects_days=KEPT_DAYS, deliveries_days=KEPT_DAYS,
    executions_days=KEPT_DAYS, snapshots_days=KEPT_DAYS, audit_days=KEPT_DAYS, vectors_days=KEPT_DAYS,
    transcripts_days=KEPT_DAYS,
)  # fmt: skip

_BYTES = """
    SELECT sum(pg_total_relation_size(oid)) FROM pg_class
    WHERE relkind = 'r' AND relnamespace = 'perdure'::regnamespace
"""


@tool(effect="pure")
def look() -> str:
    """Look."""
    return "seen " * 20


class Carries:
    """Delivers at once."""

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        """Accept the reply."""


def rows(harness: Harness) -> dict[str, int]:
    """The number of rows of each table."""
    counts = " UNION ALL ".join(f"SELECT '{name}' AS name, count(*) AS number FROM {name}" for name in metadata.tables)  # noqa: S608 (our tables)
    return {row.name: row.number for row in harness.sql(counts)}


def live(harness: Harness, step: int) -> None:
    """New users come, talk and leave; days pass; what is due is done; old rows are deleted."""
    for number in range(USERS_A_STEP):
        user = f"user {step}-{number}"
        harness.script(calls(("look", {})), says("ok"), says("bye"))
        for text in ("look, please", "thank you"):
            harness.ask(text, user_id=user, conversation="shop", reply_to={"url": "https://example.com/hook"})
    for row in harness.sql("SELECT delivery_id FROM deliveries WHERE status = 'pending'"):
        deliver(harness.database, {"url": Carries()}, row.delivery_id)
    harness.move(timedelta(days=STEP_DAYS).total_seconds())
    keeper = Keeper(harness.database, harness.clock, harness.settings.turn)
    harness.script(*[says("They looked.")] * USERS_A_STEP)
    expire_idle(harness.database, 1_800)
    for row in harness.sql("SELECT session_id FROM sessions WHERE ended_at IS NULL AND end_requested_at IS NOT NULL"):
        ender(harness, keeper, lambda _: None).end(row.session_id)
    Archive(harness, keeper).consolidator(OfflineModel()).batch()
    retain(harness.database, settings=RETENTION)


def size(harness: Harness) -> int:
    """The bytes of all tables with their indexes, after a VACUUM, which autovacuum does elsewhere."""
    with harness.database.engine.connect() as connection:
        connection.exec_driver_sql("VACUUM (ANALYZE)")
        (bytes_,) = connection.exec_driver_sql(_BYTES).one()
    return int(bytes_)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_year_ends_at_the_size_of_its_half(harness: Harness) -> None:
    """No table grows in the second half of the year but the users'. What is younger than the retention is kept."""
    harness.check = lambda: None  # type: ignore[method-assign]  # it reads transcripts that are gone
    harness.equip(look)
    found: list[dict[str, int]] = []
    sizes: list[int] = []
    for step in range(STEPS):
        live(harness, step)
        found.append(rows(harness))
        sizes.append(size(harness))
    half, end = found[STEPS // 2], found[-1]
    grown = {name: (half[name], end[name]) for name in end if end[name] > half[name]}
    kept = USERS_A_STEP * KEPT_DAYS // STEP_DAYS

    assert grown.keys() == {"users"}, grown
    assert end["sessions"] == kept, "the sessions of the days of retention"
    assert end["turns"] == 2 * kept
    assert sizes[-1] <= MOST_GROWTH * sizes[STEPS // 2], sizes
