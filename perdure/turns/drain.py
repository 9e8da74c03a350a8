"""The intake, one row in PostgreSQL: it decides whether workers may begin turns.

`perdure drain` closes and opens the intake. While the intake is closed, no worker claims a turn, even after a restart:
the statement that claims a turn reads the row. Messages are still accepted, and wait. Every worker also reads the row
regularly. A worker that finds the intake closed takes no more work, and finishes or parks its turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from perdure.database.engine import Executor, Statement
from perdure.database.keyed import keyed

_PAGE = 500
"""How many sessions one statement reads or changes."""

_FIRST_ID = "00000000-0000-0000-0000-000000000000"

DRAINING = "EXISTS (SELECT FROM intake WHERE closed_at IS NOT NULL)"
"""SQL condition: the intake is closed. The statements that claim or begin a turn check it."""

_READ = Statement("drain.read", f"SELECT {DRAINING} AS closed", writes=False)

_CLOSE = Statement(
    "drain.begin",
    """
    INSERT INTO intake AS i (name, closed_at) VALUES ('fleet', perdure_now())
    ON CONFLICT (name) DO UPDATE SET closed_at = coalesce(i.closed_at, excluded.closed_at)
    """,
)

_OPEN = Statement("drain.open", "UPDATE intake SET closed_at = NULL WHERE closed_at IS NOT NULL")

# Makes the page's sessions with unsettled turns due for a wake-up at once. A session that another statement has locked
# is left to it. `after` of the answer is the page's last session, `NULL` behind the last page.
_HASTEN = Statement(
    "drain.hasten",
    f"""
    WITH page AS (
        SELECT session_id FROM sessions WHERE {keyed("unsettled > 0")} AND session_id > %(after)s::uuid
        ORDER BY session_id LIMIT %(most)s
    ), unlocked AS (
        SELECT session_id FROM sessions
        WHERE session_id = ANY (ARRAY(SELECT session_id FROM page)) AND {keyed("unsettled > 0")} AND lease_until IS NULL
        FOR NO KEY UPDATE SKIP LOCKED
    ), hastened AS (
        UPDATE sessions AS s SET woken_at = NULL, wakes = 0
        FROM unlocked WHERE s.session_id = unlocked.session_id
    )
    SELECT CASE WHEN count(*) = %(most)s THEN max(session_id::text) END AS after FROM page
    """,  # noqa: S608 (constants)
)

_RUNNING = Statement(
    "drain.running",
    """
    SELECT t.turn_id FROM turns AS t JOIN sessions AS s USING (session_id)
    WHERE t.settled_at IS NULL AND t.status = 'running' AND s.lease_until > perdure_now()
    """,
    writes=False,
)

_UNFINISHED = Statement(
    "drain.unfinished",
    """
    SELECT (SELECT count(*) FROM turns AS t JOIN sessions AS s USING (session_id)
            WHERE t.settled_at IS NULL AND t.status = 'running' AND s.lease_until > perdure_now()) AS running,
           (SELECT count(*) FROM turns WHERE settled_at IS NULL) AS unsettled,
           (SELECT count(*) FROM sessions
            WHERE end_requested_at IS NOT NULL AND ended_at IS NULL AND unsettled = 0) AS ending,
           (SELECT count(*) FROM sessions
            WHERE end_requested_at IS NOT NULL AND ended_at IS NULL AND unsettled > 0) AS held_back
    """,
    writes=False,
)

_LIVE = Statement(
    "drain.live",
    f"""
    SELECT session_id FROM sessions WHERE {keyed("ended_at IS NULL")} AND session_id > %(after)s::uuid
    ORDER BY session_id LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

_SETTLED = Statement(
    "drain.settled",
    "SELECT count(*) AS settled FROM turns WHERE turn_id = ANY (%(turn_ids)s::uuid[]) AND settled_at IS NOT NULL",
    writes=False,
)


class DrainPhase(StrEnum):
    """A worker's phase: it runs turns (`OPEN`), finishes or parks them (`DRAINING`), or has none left (`QUIET`)."""

    OPEN = "open"
    DRAINING = "draining"
    QUIET = "quiet"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The unfinished work of all workers.

    Attributes:
        running: Turns under a lease.
        waiting: Unsettled turns that are not under a lease.
        ending: Sessions with a requested end and no turns to run.
        held_back: Sessions with a requested end and turns that must run before the end.
    """

    running: int
    waiting: int
    ending: int
    held_back: int


def is_active(executor: Executor) -> bool:
    """Whether the intake is closed."""
    return bool(executor.run(_READ, {})[0].closed)


def begin(executor: Executor) -> None:
    """Close the intake. Idempotent."""
    executor.run(_CLOSE, {})


def end(executor: Executor) -> None:
    """Open the intake, then make the sessions that waited only for it due at once, a page at a time. Idempotent."""
    executor.run(_OPEN, {})
    after: str | None = _FIRST_ID
    while after is not None:
        after = executor.run(_HASTEN, {"after": after, "most": _PAGE})[0].after


def running(executor: Executor) -> list[UUID]:
    """The turns under a live lease."""
    return [row.turn_id for row in executor.run(_RUNNING, {})]


def settled(executor: Executor, turn_ids: Sequence[UUID]) -> int:
    return int(executor.run(_SETTLED, {"turn_ids": list(turn_ids)})[0].settled)


def unfinished(executor: Executor) -> Unfinished:
    """Count the unfinished work."""
    row = executor.run(_UNFINISHED, {})[0]
    return Unfinished(row.running, row.unsettled - row.running, row.ending, row.held_back)


def live_sessions(executor: Executor) -> Iterator[list[UUID]]:
    """The sessions that have not ended, a page at a time."""
    after: UUID | str = _FIRST_ID
    while page := executor.run(_LIVE, {"after": after, "most": _PAGE}):
        yield [row.session_id for row in page]
        after = page[-1].session_id
