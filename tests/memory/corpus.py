"""Imports and embeds conversations for the tests of recall."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.ids import new_id
from perdure.memory.embedding import embed_sessions, register, vector_literal
from perdure.memory.import_export import ImportResult, import_messages
from perdure.models.embedders.protocol import Embedder
from tests.databases import engine_of

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


def know(database: Database, user_id: str, content: str, embedder: Embedder, **other: Any) -> UUID:
    """Store a memory with its vector."""
    engine = engine_of(database.url, isolation_level="AUTOCOMMIT")
    memory_id = other.pop("memory_id", None) or new_id(MovedClock())
    given = {
        "memory_id": memory_id,
        "user_id": user_id,
        "content": content,
        "kind": "fact",
        "importance": 0.7,
        "value": 0.7,
        "channels": ["cli"],
        "origin": "consolidation",
        "created_at": BEGIN,
        "valid_from": BEGIN,
        **other,
    }
    registered = register(database, embedder.name, embedder.dimensions or 0)
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO users VALUES (%(user_id)s, now()) ON CONFLICT DO NOTHING", {"user_id": user_id}
        )
        columns, values = ", ".join(given), ", ".join(f"%({name})s" for name in given)
        connection.exec_driver_sql(f"INSERT INTO memories ({columns}) VALUES ({values})", given)  # noqa: S608
        connection.exec_driver_sql(
            "INSERT INTO memory_vectors VALUES (%(memory_id)s, %(embedder_id)s, %(user_id)s, %(vector)s)",
            {
                "memory_id": memory_id,
                "embedder_id": registered.embedder_id,
                "user_id": user_id,
                "vector": vector_literal(embedder.embed([content])[0]),
            },
        )
    engine.dispose()
    return memory_id
