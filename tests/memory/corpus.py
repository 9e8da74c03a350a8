"""Imports and embeds conversations for the tests of recall."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.memory.embedding import embed_sessions
from perdure.memory.import_export import ImportResult, import_messages
from perdure.models.embedders.protocol import Embedder

BEGIN = datetime(2024, 3, 4, 9, tzinfo=UTC)
"""A Monday."""


def line(number: int, content: str, **other: Any) -> str:
    """One line of an import file: message `number`. Messages are one minute apart; user and assistant alternate."""
    given = {
        "user_id": "ana",
        "session": "first",
        "message_id": f"m{number}",
        "role": "user" if number % 2 else "assistant",
        "content": content,
        "occurred_at": (BEGIN + timedelta(minutes=number)).isoformat(),
    }
    return json.dumps({key: value for key, value in (given | other).items() if value is not None}, ensure_ascii=False)


def import_conversation(
    database: Database, clock: MovedClock, contents: Iterable[str], embedder: Embedder | None = None, **other: Any
) -> ImportResult:
    """Import a conversation with a message for each of `contents`. If `embedder` is given, embed the messages."""
    lines = [line(number, content, **other) for number, content in enumerate(contents, start=1)]
    return imported(database, clock, lines, embedder)


def imported(
    database: Database, clock: MovedClock, lines: Iterable[str], embedder: Embedder | None = None
) -> ImportResult:
    """Import the lines of an import file. If `embedder` is given, embed the imported messages."""
    result = ImportResult()
    for result in import_messages(database, clock, "assistant", lines):  # noqa: B007 (the last one counts)
        pass
    if embedder is not None and result.sessions:
        assert embed_sessions(database, embedder, result.sessions).error is None
    return result
