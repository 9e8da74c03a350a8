"""Users: the answers of `/v1/users`."""

from __future__ import annotations

from typing import Any

from perdure.channels.http.schemas.answer import Answer, Instant


class Export(Answer):
    """All data of a user: rows by table, and the recent events of the user's stream."""

    user_id: str
    exported_at: Instant
    tables: dict[str, list[dict[str, Any]]]
    stream: list[dict[str, str]]


class Erased(Answer):
    """The count of erased rows, by table.

    `everywhere`: Redis and the snapshots are erased; otherwise a worker erases them later.
    """

    user_id: str
    rows: dict[str, int]
    everywhere: bool
