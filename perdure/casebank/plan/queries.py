"""The statements that read the candidates of a plan, and what is compared of them."""

from __future__ import annotations

from typing import Any, Protocol

from perdure.casebank.queries import FRESH, RESTORED_AT, USAGE
from perdure.database.engine import Statement


class CaseRow(Protocol):
    """The columns that `compute.facts_of` reads, from `CANDIDATES` or `runs.queries.LOCKED_CASES`."""

    case_id: str
    usage_count: int
    success_rate: float | None
    last_accessed_at: Any
    created_at: Any
    restored_at: Any


CANDIDATES = Statement(
    "casebank.candidates",
    f"""
    SELECT c.case_id, c.user_id, c.bank, c.shared_at, c.embedder, @vector.vector_dims(c.query_vector) AS dimensions,
           {USAGE}, c.success_rate, c.created_at, {RESTORED_AT}
    FROM cases AS c {FRESH}
    WHERE c.status = 'active' AND c.case_id > %(after)s
    ORDER BY c.case_id LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

CONTENTS = Statement(
    "casebank.contents",
    """
    SELECT case_id, query, embedder, @vector.vector_send(query_vector) AS vector
    FROM cases WHERE status = 'active' AND case_id = ANY (%(case_ids)s::text[])
    """,
    writes=False,
)
