"""Reads long results page by page. No transaction, and no more than a page in memory, waits for the reader.

A statement for `pages` has the parameters `most` and `most_bytes`, and selects from `sized(…)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Row

from perdure.database.engine import Executor, Statement

PAGE_ROWS = 500
PAGE_BYTES = 2**18


def sized(rows: str, order: str, size: str) -> str:
    """SQL for the first rows of the query `rows` that together have `%(most_bytes)s` bytes, and at least one row.

    `rows` has at most `%(most)s` rows; `found` is their number. `size` is the expression for a row's bytes.
    """
    return f"""
        SELECT * FROM (
            SELECT *, count(*) OVER () AS found, sum({size}) OVER (ORDER BY {order}) - {size} AS bytes_before
            FROM ({rows}) AS unsized
        ) AS sized WHERE bytes_before < %(most_bytes)s ORDER BY {order}
    """  # noqa: S608 (constants)


def pages(
    executor: Executor,
    statement: Statement,
    parameters: Mapping[str, Any],
    cursor: Callable[[Row[Any]], Mapping[str, Any]],
    limit: int | None = None,
) -> Iterator[Sequence[Row[Any]]]:
    """Yield the pages of a result, `limit` rows at most. `cursor` returns the parameters of the rows after a row."""
    left = limit
    while left is None or left > 0:
        most = PAGE_ROWS if left is None else min(PAGE_ROWS, left)
        rows = executor.run(statement, {**parameters, "most": most, "most_bytes": PAGE_BYTES})
        if rows:
            yield rows
        if not rows or len(rows) == rows[0].found < most:
            return
        parameters = {**parameters, **cursor(rows[-1])}
        left = None if left is None else left - len(rows)
