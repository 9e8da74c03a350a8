"""Executions: which turns had a case in their prompt, and how those turns ended.

The statement that settles a turn inserts its executions (`queries.WITH_USES`) and locks no case, so turns of different
users do not wait for each other. `count` adds the executions to the cases' use counts later. The task `casebank.count`
and reflection call `count`. A user's feedback overrides how the turn ended.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from perdure.casebank import queries
from perdure.database.engine import Database, Executor

_PAGE = 100


def count(database: Database, should_continue: Callable[[], bool] = lambda: True) -> int:
    """Add uncounted uses to their cases, one page of cases per commit; returns the number of uses added.

    Each use is counted once, even if calls overlap. Skips cases that another transaction has locked. Calls
    `should_continue` before each page, and stops if it returns False. The next call counts the remaining uses.

    Raises:
        Unavailable: the database cannot be reached.
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
    """Record a user's `score`, -1 or 1, on the turn's executions; returns the ids of their cases."""
    rows = executor.run(queries.FEEDBACK, {"turn_id": turn_id, "score": score})
    return sorted(row.case_id for row in rows)
