"""Executions: which turns had a case in their prompt, and what came of it.

Whoever runs a turn records it when the turn is settled, in the same transaction or after:
recording twice counts once. Feedback comes later, or never; where it came, it decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from perdure.casebank import queries
from perdure.database.engine import Executor
from perdure.untrusted import first_line


def record(
    executor: Executor, case_ids: Sequence[str], turn_id: UUID, *, succeeded: bool, error: str | None = None
) -> int:
    """Count a use of each of these cases by this turn; how many were counted.

    A case that was archived or erased meanwhile, or whose use was counted before, is not.
    """
    if not case_ids:
        return 0
    parameters = {
        "case_ids": sorted(set(case_ids)),
        "turn_id": turn_id,
        "succeeded": succeeded,
        "error": None if error is None else first_line(error),
    }
    return len(executor.run(queries.RECORD, parameters))


def feedback(executor: Executor, turn_id: UUID, score: int) -> list[str]:
    """Let a person's word, -1 or 1, decide what came of the turn; the cases that it counts for."""
    rows = executor.run(queries.FEEDBACK, {"turn_id": turn_id, "score": score})
    return sorted(row.case_id for row in rows)
