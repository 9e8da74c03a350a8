"""Executions: an execution records that a turn had a case in its prompt, and whether the turn succeeded.

The statement that settles a turn also inserts the turn's executions (`queries.WITH_USES`). It locks no case, so turns
of different users do not wait for each other. The task `casebank.count` and reflection call `count`, which adds the
executions to the cases' use counts. A user's feedback overrides the success that an execution records.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from perdure.casebank import queries
from perdure.database.engine import Database, Executor

_PAGE = 100


def count(database: Database, should_continue: Callable[[], bool] = lambda: True) -> int:
    """Add uncounted executions to the use counts of their cases; returns the number of executions added.

    Commits after each page of cases. Each execution is counted once, even if calls overlap. Skips cases that another
    transaction has locked. Calls `should_continue` before each page, and stops if it returns False. The next call
    counts the remaining executions.
    """
    counted, after = 0, ""
    while should_continue():
        page = database.run(queries.COUNT_USES, {"after": after, "most": _PAGE})[0]
        if page.last is None:
            database.run(queries.FORGET_USES, {})
            break
        counted, after = counted + page.uses, page.last
    return counted


def feedback(executor: Executor, turn_id: UUID, score: int) -> list[str]:
    """Record a user's `score`, -1 or 1, on the turn's executions; returns the ids of the cases."""
    rows = executor.run(queries.FEEDBACK, {"turn_id": turn_id, "score": score})
    return sorted(row.case_id for row in rows)
