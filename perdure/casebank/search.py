"""Search: the cases nearest to a question, by their vectors.

Vectors are compared within one embedder and size only. A small bank is scanned, which is
exact; a large one has an index for each size of vector, which `build_indexes` makes.
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


def search(
    database: Database, vector: Sequence[float], embedder: str, k: int, *, include_archived: bool = False
) -> list[Found]:
    """The `k` nearest cases, nearest first: active ones, and if asked for, archived ones among them.

    One statement. Archived ones are noted in the log.

    Raises:
        InvalidRequest: it is no vector.
    """
    statement = _nearest(len(vector), include_archived=include_archived)
    rows = database.run(statement, {"vector": vectors.literal(vector), "embedder": embedder, "k": k})
    found = [_found(row) for row in rows]
    for each in found:
        if each.status == "archived":
            warn_of_archived(each.case_id)
    return found


def build_indexes(database: Database, index_from: int = INDEX_FROM) -> list[int]:
    """Build the index for each size of vector of which there are many; the sizes that have one then.

    Others read and write meanwhile. An index whose building was broken off is built anew. Nothing is
    done while another process builds.
    """
    sizes = [
        row.size
        for row in database.run(queries.SIZES, {})
        if row.cases >= index_from and row.size <= MOST_INDEXED_DIMENSIONS
    ]
    if not sizes:
        return []
    with database.engine.connect() as connection:
        if not connection.exec_driver_sql(queries.TAKE_BUILDING).scalar_one():
            return []
        try:
            for size in sizes:
                _build(connection, size)
        finally:
            connection.exec_driver_sql(queries.END_BUILDING)
    return sizes


def _build(connection: Connection, size: int) -> None:
    """Build an index, unless it is there. What another process left half-built is dropped first, as it is no use."""
    if connection.exec_driver_sql(queries.index_is_broken(size)).scalar_one():
        connection.exec_driver_sql(queries.drop_index(size))
    connection.exec_driver_sql(queries.index(size))


@lru_cache
def _nearest(size: int, *, include_archived: bool) -> Statement:
    return queries.nearest(size, include_archived=include_archived)


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
    )
