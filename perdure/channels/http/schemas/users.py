"""The response bodies of `/v1/users`."""

from __future__ import annotations

from typing import Any

from perdure.channels.http.schemas.answer import SESSION_ID, Answer, Instant, examples


class Export(Answer):
    """All data of a user: rows by table, and the recent events of the user's Redis stream."""

    model_config = examples(
        {
            "user_id": "ann",
            "exported_at": "2026-05-02T09:35:00+00:00",
            "tables": {"sessions": [{"session_id": SESSION_ID, "agent": "assistant"}], "turns": []},
            "stream": [],
        }
    )

    user_id: str
    exported_at: Instant
    tables: dict[str, list[dict[str, Any]]]
    stream: list[dict[str, str]]


class Erased(Answer):
    """The number of erased rows, by table.

    `everywhere`: whether the user's Redis data and snapshots are erased, too. If they are not, a worker erases them
    later.
    """

    model_config = examples({"user_id": "ann", "rows": {"sessions": 1, "turns": 1, "messages": 2}, "everywhere": True})

    user_id: str
    rows: dict[str, int]
    everywhere: bool
