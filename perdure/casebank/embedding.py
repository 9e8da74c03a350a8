"""Computes the missing vectors of cases, and replaces those that the installation's former embedder made.

`embed_cases` keeps imported vectors of an embedder that was not the installation's, because the search for duplicates
still uses them. With `reembed`, it replaces them, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Row

from perdure.casebank import queries, vectors
from perdure.database.engine import Executor
from perdure.errors import InvalidRequest, PerdureError, loggable
from perdure.models.embedders.protocol import Embedder
from perdure.models.protocol import ModelCall

log = logging.getLogger(__name__)

_PAGE = 100


def embed_cases(executor: Executor, embedder: Embedder, *, reembed: bool = False) -> Iterator[int]:
    """Compute the missing vectors of active cases. After each page, yields the number of cases processed so far.

    A vector of another embedder counts as missing, unless it was imported. With `reembed`, imported ones count, too. If
    the embedder rejects a case's question, logs a warning and leaves the case unchanged.

    Raises:
        PerdureError: the embedder or the database cannot be reached; vectors stored so far are kept.
    """
    processed, after = 0, ""
    parameters = {"embedder": embedder.name, "reembed": reembed, "most": _PAGE}
    while rows := executor.run(queries.WITHOUT_VECTOR, {**parameters, "after": after}):
        _embed_page(executor, embedder, rows)
        processed, after = processed + len(rows), rows[-1].case_id
        yield processed


def embed_case(executor: Executor, embedder: Embedder, case_id: str, query: str, call: ModelCall | None = None) -> None:
    """Compute and store the vector of one case's question.

    Raises:
        CallAborted: `call` was aborted.
        PerdureError: the embedder or the database cannot be reached, or the embedder rejects the question.
    """
    _store(executor, embedder.name, case_id, query, embedder.embed([query], call)[0])


def embed_now(executor: Executor, embedder: Embedder, case_id: str, query: str, call: ModelCall | None = None) -> None:
    """Like `embed_case`, but logs a warning if this fails: the next reflection embeds the case."""
    try:
        embed_case(executor, embedder, case_id, query, call)
    except PerdureError as error:
        log.warning("case %s is embedded later: %s", case_id, loggable(error))


def _embed_page(executor: Executor, embedder: Embedder, rows: Sequence[Row[Any]]) -> None:
    try:
        made = embedder.embed([row.query for row in rows])
    except InvalidRequest:
        _embed_singly(executor, embedder, rows)
        return
    for row, vector in zip(rows, made, strict=True):
        _store(executor, embedder.name, row.case_id, row.query, vector)


def _embed_singly(executor: Executor, embedder: Embedder, rows: Sequence[Row[Any]]) -> None:
    for row in rows:
        try:
            embed_case(executor, embedder, row.case_id, row.query)
        except InvalidRequest as error:
            log.warning("case %s stays without a vector: %s", row.case_id, loggable(error))


def _store(executor: Executor, embedder: str, case_id: str, query: str, vector: Sequence[float]) -> None:
    """Store a vector, unless the case was archived, erased or changed while the vector was computed."""
    given = {"case_id": case_id, "query": query, "query_vector": vectors.literal(vector), "embedder": embedder}
    executor.run(queries.GIVE_VECTOR, given)
