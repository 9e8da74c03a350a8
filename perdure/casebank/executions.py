"""Executions: which turns had a case in their prompt, and how those turns ended.

The statement that settles a turn appends them (`queries.WITH_USES`) and locks no case, so no user's turn waits for
another user's. `count` adds them to the cases afterwards: in the task `casebank.count`, and before reflection.
Feedback comes later or never; where it is given, it overrides how the turn ended.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from perdure.casebank import queries
from perdure.database.engine import Database, Executor

_PAGE = 100


def count(database: Database, go_on: Callable[[], bool] = lambda: True) -> int:
    """Add the uses that are not counted yet to their cases, a page of cases a commit; returns how many were added.

    Each use is counted once, however often and concurrently this runs. Between pages `go_on` is asked; the rest is
    left to the next call, as are cases that another transaction has locked.

    Raises:
        Unavailable: the database cannot be reached.
    """
    counted, after = 0, ""
    while go_on():
        page = database.run(queries.COUNT_USES, {"after": after, "most": _PAGE})[0]
        if page.last is None:
            database.run(queries.FORGET_USES, {})
            break
        counted, after = counted + page.uses, page.last
    return counted


def feedback(executor: Executor, turn_id: UUID, score: int) -> list[str]:
    """Let a person's word, -1 or 1, decide what came of the turn; the cases that it counts for."""
    rows = executor.run(queries.FEEDBACK, {"turn_id": turn_id, "score": score})
    return sorted(row.case_id for row in rows)
