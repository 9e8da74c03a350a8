"""Search: the cases nearest to a question, by their vectors.

Vectors are compared within one embedder and size only. Few cases are compared one by one, which is exact; many have
an index for each size of vector, which `build_indexes` makes: one over the shared cases, one over those learnt from
users. So a search for one user meets the shared cases and the user's own, and never walks past the other users'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row

from perdure.casebank import queries, vectors
from perdure.casebank.archive import warn_of_archived
from perdure.database.engine import Database, Statement

INDEX_FROM = 10_000
"""Active cases from which on a scan is slower than one would wait for: some five milliseconds."""

MOST_INDEXED_DIMENSIONS = 2_000


@dataclass(frozen=True, slots=True)
class Found:
    """A case and its cosine with what was asked, from -1 to 1."""

    case_id: str
    query: str
    response_text: str
    category_path: str | None
    usage_count: int
    success_rate: float | None
    status: str
    similarity: float
    user_id: str | None = None
    """The author; `None`: the case is everybody's."""


def search(
    database: Database,
    vector: Sequence[float],
    embedder: str,
    k: int,
    *,
    include_archived: bool = False,
    least: float | None = None,
) -> list[Found]:
    """The `k` nearest cases of all users, nearest first, with a similarity of at least `least`.

    Active cases, and on request archived ones, which are logged. One statement.

    Raises:
        InvalidRequest: the vector is invalid.
    """
    statement = _nearest(len(vector), include_archived=include_archived)
    asked = {"vector": vectors.literal(vector), "embedder": embedder, "k": k, "least": least}
    found = [_found(row) for row in database.run(statement, asked)]
    for each in found:
        if each.status == "archived":
            warn_of_archived(each.case_id)
    return found


def search_for_user(
    database: Database, user_id: str, vector: Sequence[float], embedder: str, k: int, *, least: float | None = None
) -> list[Found]:
    """The `k` nearest active cases that are the user's own or everybody's, nearest first; else as `search`.

    Raises:
        InvalidRequest: the vector is invalid.
    """
    statement = _nearest_for_user(len(vector))
    asked = {"vector": vectors.literal(vector), "embedder": embedder, "k": k, "least": least, "user_id": user_id}
    return [_found(row) for row in database.run(statement, asked)]


def build_indexes(database: Database, index_from: int = INDEX_FROM) -> list[str]:
    """Build the indexes for each size of vector of which there are `index_from` cases or more; returns their names.

    Readers and writers are not blocked. An index whose building was interrupted is built again. Returns at once while
    another process builds.
    """
    wanted = [
        (row.size, part)
        for row in database.run(queries.SIZES, {})
        for part in ("shared", "learnt")
        if getattr(row, part) >= index_from and row.size <= MOST_INDEXED_DIMENSIONS
    ]
    if not wanted:
        return []
    with database.engine.connect() as connection:
        if not connection.exec_driver_sql(queries.TAKE_BUILDING).scalar_one():
            return []
        try:
            for size, part in wanted:
                _build(connection, size, part)
        finally:
            connection.exec_driver_sql(queries.END_BUILDING)
    return [queries.index_name(size, part) for size, part in wanted]


def _build(connection: Connection, size: int, part: str) -> None:
    """Build an index unless it exists. One that another process left half-built is dropped first."""
    if connection.exec_driver_sql(queries.index_is_broken(size, part)).scalar_one():
        connection.exec_driver_sql(queries.drop_index(size, part))
    connection.exec_driver_sql(queries.index(size, part))
    # A worker of the release before may have built its index over all cases again while both ran.
    connection.exec_driver_sql(queries.drop_index_of_all(size))


@lru_cache
def _nearest(size: int, *, include_archived: bool) -> Statement:
    return queries.nearest(size, include_archived=include_archived)


@lru_cache
def _nearest_for_user(size: int) -> Statement:
    return queries.nearest_for_user(size, INDEX_FROM)


def _found(row: Row[Any]) -> Found:
    return Found(
        row.case_id,
        row.query,
        row.response_text,
        row.category_path,
        row.usage_count,
        row.success_rate,
        row.status,
        row.similarity,
        row.user_id,
    )
