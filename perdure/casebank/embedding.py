"""Vectors for cases that came without one: those learnt from turns, and imported ones.

A vector that a case came with is kept, whoever made it, until somebody asks for it to be made
anew (`others`): it is what the case's duplicates are told by.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Row

from perdure.casebank import queries, vectors
from perdure.database.engine import Executor
from perdure.errors import InvalidRequest, loggable
from perdure.models.embedders.protocol import Embedder
from perdure.models.protocol import ModelCall

log = logging.getLogger(__name__)

_PAGE = 100


def embed_cases(
    executor: Executor, embedder: Embedder, *, others: bool = False, call: ModelCall | None = None
) -> Iterator[int]:
    """Give active cases without a vector theirs; yields how many have been looked at, page by page.

    With `others`, cases whose vectors another embedder made get new ones, too. A question that the
    embedder refuses stays without one, which is reported.

    Raises:
        CallAborted: `call` was ended.
        PerdureError: the embedder or the database cannot be reached; doing it again goes on.
    """
    looked, after = 0, ""
    asked = {"embedder": embedder.name if others else None, "most": _PAGE}
    while rows := executor.run(queries.WITHOUT_VECTOR, {**asked, "after": after}):
        _give(executor, embedder, rows, call)
        looked, after = looked + len(rows), rows[-1].case_id
        yield looked


def embed_case(executor: Executor, embedder: Embedder, case_id: str, query: str, call: ModelCall | None = None) -> None:
    """Give one case the vector of its question.

    Raises:
        CallAborted: `call` was ended.
        PerdureError: the embedder or the database cannot be reached, or the embedder refuses the question.
    """
    _store(executor, embedder.name, case_id, query, embedder.embed([query], call)[0])


def _give(executor: Executor, embedder: Embedder, rows: Sequence[Row[Any]], call: ModelCall | None) -> None:
    try:
        made = embedder.embed([row.query for row in rows], call)
    except InvalidRequest:
        _give_singly(executor, embedder, rows, call)
        return
    for row, vector in zip(rows, made, strict=True):
        _store(executor, embedder.name, row.case_id, row.query, vector)


def _give_singly(executor: Executor, embedder: Embedder, rows: Sequence[Row[Any]], call: ModelCall | None) -> None:
    for row in rows:
        try:
            embed_case(executor, embedder, row.case_id, row.query, call)
        except InvalidRequest as error:
            log.warning("case %s stays without a vector: %s", row.case_id, loggable(error))


def _store(executor: Executor, embedder: str, case_id: str, query: str, vector: Sequence[float]) -> None:
    """Store a vector, unless the case has been archived or erased meanwhile."""
    given = {"case_id": case_id, "query": query, "query_vector": vectors.literal(vector), "embedder": embedder}
    executor.run(queries.GIVE_VECTOR, given)
