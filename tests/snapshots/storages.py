"""A `StoreHarness` for each store, and `MemorySnapshots`, a third-party store found by its entry point."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID, uuid4

import redis
from sqlalchemy import text

from perdure.database.engine import Database
from perdure.errors import InvalidRequest
from perdure.servers.redis import client_url
from perdure.settings import Settings
from perdure.snapshots.codec import dump
from perdure.snapshots.file import FileSnapshots
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.snapshots.redis import RedisSnapshots
from perdure.snapshots.snapshot import AgentSnapshot
from perdure.snapshots.sqlite import SqliteSnapshots
from perdure.snapshots.store import (
    SnapshotStore,
    Stored,
    Version,
    parse_stored,
    refuse_stale,
    report_set_aside,
    version_of,
)
from perdure.testing.suites.snapshots import HISTORY


class FileStorage:
    """A `StoreHarness` over a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def open(self) -> SnapshotStore:
        return FileSnapshots(self.directory)

    def session(self) -> UUID:
        return uuid4()

    def damage(self, agent_id: UUID) -> None:
        (path,) = (self.directory / str(agent_id)).glob("*.json")
        path.write_bytes(path.read_bytes()[:-20])

    def set_aside(self, agent_id: UUID) -> bytes | None:
        found = list((self.directory / str(agent_id)).glob("*.set-aside"))
        return found[0].read_bytes() if found else None


class SqliteStorage:
    """A `StoreHarness` over a SQLite file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> SnapshotStore:
        return SqliteSnapshots(self.path)

    def session(self) -> UUID:
        return uuid4()

    def damage(self, agent_id: UUID) -> None:
        self._run("UPDATE snapshots SET snapshot = substr(snapshot, 1, 50) WHERE agent_id = ?", agent_id)

    def set_aside(self, agent_id: UUID) -> bytes | None:
        row = self._run("SELECT CAST(snapshot AS BLOB) FROM set_aside WHERE agent_id = ?", agent_id)
        return row[0] if row else None

    def _run(self, sql: str, agent_id: UUID) -> Any:
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            return connection.execute(sql, (str(agent_id),)).fetchone()
        finally:
            connection.close()


class RedisStorage:
    """A `StoreHarness` over a Redis."""

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self) -> SnapshotStore:
        return RedisSnapshots(self.url)

    def session(self) -> UUID:
        return uuid4()

    def damage(self, agent_id: UUID) -> None:
        with redis.Redis.from_url(client_url(self.url)) as client:
            client.hset(f"perdure:snapshot:{{{agent_id}}}", "snapshot", b'{"schema_version": 1, "agent')

    def set_aside(self, agent_id: UUID) -> bytes | None:
        with redis.Redis.from_url(client_url(self.url)) as client:
            kept: Any = client.hget(f"perdure:snapshot:{{{agent_id}}}:set-aside", "snapshot")
            return kept if isinstance(kept, bytes) else None


class PostgresStorage:
    """A `StoreHarness` over a database with perdure's tables.

    PostgreSQL releases the locks of a stopped process after `lease_s / 3` seconds.
    """

    def __init__(self, url: str, lease_s: float = 30.0) -> None:
        self.url = url
        self.lease_s = lease_s
        self._opened: list[Database] = []

    def open(self) -> SnapshotStore:
        self._opened.append(Database(self.url, lease_s=self.lease_s))
        return PostgresSnapshots(self._opened[-1])

    def close(self) -> None:
        for database in self._opened:
            database.close()
        self._opened.clear()

    def session(self) -> UUID:
        session_id, turn_id = uuid4(), uuid4()
        ids = {"session": session_id, "turn": turn_id}
        self._run("INSERT INTO users VALUES ('ana', now()) ON CONFLICT DO NOTHING", ids)
        self._run(
            "INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at,"
            " channels) VALUES (:session, 'ana', '', false, 'a', 'active', now(), now(), '{cli}')",
            ids,
        )
        self._run(
            "INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, first_seq,"
            " accepted_at) VALUES (:turn, :session, 1, 'ana', 'a', 'cli', 5, 'running', 1, now())",
            ids,
        )
        for seq, message in enumerate(HISTORY, start=1):
            calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
            self._run(
                "INSERT INTO messages (session_id, seq, turn_id, role, content, tool_calls, tool_call_id, channel,"
                " token_count, created_at) VALUES (:session, :seq, :turn, :role, :content, CAST(:calls AS jsonb),"
                " :call, 'cli', 1, now())",
                {
                    **ids,
                    "seq": seq,
                    "role": message.role.value,
                    "content": message.content,
                    "calls": json.dumps(calls) if calls else None,
                    "call": message.tool_call_id,
                },
            )
        return session_id

    def damage(self, agent_id: UUID) -> None:
        self._run("UPDATE snapshots SET variables = '[\"cut\"]' WHERE session_id = :session", {"session": agent_id})

    def set_aside(self, agent_id: UUID) -> bytes | None:
        rows = self._run(
            "SELECT variables::text FROM snapshots WHERE session_id = :session AND set_aside", {"session": agent_id}
        )
        return rows[0][0].encode() if rows else None

    def _run(self, sql: str, parameters: dict[str, Any]) -> Any:
        if not self._opened:
            self.open()
        with self._opened[0].engine.connect() as connection:
            result = connection.execute(text(sql), parameters)
            return result.fetchall() if result.returns_rows else []


class MemorySnapshots:
    """A third-party store that keeps each URL's snapshots in a dictionary."""

    places: ClassVar[dict[str, dict[str, dict[UUID, tuple[Version, bytes]]]]] = {}

    def __init__(self, url: str, settings: Settings) -> None:
        self.name = url
        place = self.places.setdefault(url, {"snapshots": {}, "set aside": {}})
        self._snapshots, self._aside = place["snapshots"], place["set aside"]
        self._lock = threading.Lock()

    def save(self, snapshot: AgentSnapshot, token: int) -> None:
        data, offered = dump(snapshot).encode(), version_of(snapshot, token)
        with self._lock:
            stored = self._snapshots.get(snapshot.agent_id)
            refuse_stale(snapshot.agent_id, offered, stored[0] if stored else None)
            self._snapshots[snapshot.agent_id] = (offered, data)

    def load(self, agent_id: UUID) -> Stored | None:
        while (stored := self._snapshots.get(agent_id)) is not None:
            try:
                return parse_stored(stored[1], agent_id, stored[0])
            except InvalidRequest as error:
                self._keep(agent_id, error.message, partial(is_, stored))
        return None

    def set_aside(self, agent_id: UUID, upto: Version, reason: str) -> None:
        self._keep(agent_id, reason, lambda now: now[0] <= upto)

    def _keep(self, agent_id: UUID, reason: str, wanted: Callable[[tuple[Version, bytes]], bool]) -> None:
        with self._lock:
            stored = self._snapshots.get(agent_id)
            if stored is not None and wanted(stored):
                self._aside[agent_id] = self._snapshots.pop(agent_id)
                report_set_aside(self.name, agent_id, "an entry of a dictionary", reason)

    def delete(self, agent_id: UUID) -> None:
        with self._lock:
            self._snapshots.pop(agent_id, None)
            self._aside.pop(agent_id, None)

    def close(self) -> None:
        """Do nothing: the store holds no resource."""
