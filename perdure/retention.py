"""What is kept for a while and then deleted: traces of work that nothing reads any more.

Replies that were delivered or given up, snapshots that were set aside for the operator to look
at, and uses of cases behind those that a rate is reckoned from. What people said, what became of
their turns, memories and cases are not among them: those go when their user is erased.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perdure.casebank.reflection import EXECUTIONS
from perdure.database.engine import Database, Statement

_BATCH = 1_000

DELIVERIES = Statement(
    "retention.deliveries",
    """
    WITH old AS (
        SELECT delivery_id FROM deliveries
        WHERE status <> 'pending' AND created_at < perdure_now() - make_interval(days => %(days)s)
        LIMIT %(most)s
    )
    DELETE FROM deliveries AS d USING old WHERE d.delivery_id = old.delivery_id RETURNING 1
    """,
)

SET_ASIDE = Statement(
    "retention.set_aside",
    """
    WITH old AS (
        SELECT session_id, tick FROM snapshots
        WHERE set_aside AND saved_at < perdure_now() - make_interval(days => %(days)s)
        LIMIT %(most)s
    )
    DELETE FROM snapshots AS s USING old
    WHERE s.session_id = old.session_id AND s.set_aside AND s.tick = old.tick
    RETURNING 1
    """,
)

# In the order in which reflection counts them, by the same index.
USES = Statement(
    "retention.uses",
    """
    WITH old AS (
        SELECT behind.case_id, behind.turn_id
        FROM cases AS c
        CROSS JOIN LATERAL (
            SELECT case_id, turn_id, executed_at, counted FROM case_executions WHERE case_id = c.case_id
            ORDER BY executed_at DESC, turn_id DESC OFFSET %(executions)s
        ) AS behind
        WHERE behind.counted AND behind.executed_at < perdure_now() - make_interval(days => %(days)s)
        LIMIT %(most)s
    )
    DELETE FROM case_executions AS e USING old
    WHERE e.case_id = old.case_id AND e.turn_id = old.turn_id
    RETURNING 1
    """,
)


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept for so many days."""

    what: str
    days: int
    delete: Statement


KEPT = (
    Kept("deliveries", 30, DELIVERIES),
    Kept("snapshots set aside", 90, SET_ASIDE),
    Kept("uses of cases", 90, USES),
)


def retain(database: Database, go_on: Callable[[], bool] = lambda: True) -> dict[str, int]:
    """Delete what has been kept for long enough, a thousand rows a commit; how many of each kind went.

    Between commits `go_on` is asked; what is left then goes the next time.

    Raises:
        Unavailable: the database cannot be reached.
    """
    gone: dict[str, int] = {}
    for kept in KEPT:
        gone[kept.what] = 0
        while go_on():
            deleted = len(database.run(kept.delete, {"days": kept.days, "most": _BATCH, "executions": EXECUTIONS}))
            gone[kept.what] += deleted
            if deleted < _BATCH:
                break
    return gone
