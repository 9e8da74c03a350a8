"""Runs `perdure.testing`'s suite for snapshot stores on every store."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from perdure.database.engine import Database
from perdure.settings import Settings
from perdure.snapshots.resolve import resolve
from perdure.snapshots.store import SnapshotStore
from perdure.testing.suites.snapshots import SnapshotSuite
from tests.snapshots.storages import FileStorage, MemorySnapshots, PostgresStorage, RedisStorage, SqliteStorage


class TestFile(SnapshotSuite):
    @pytest.fixture
    def harness(self, file_storage: FileStorage) -> FileStorage:
        return file_storage


class TestSqlite(SnapshotSuite):
    @pytest.fixture
    def harness(self, sqlite_storage: SqliteStorage) -> SqliteStorage:
        return sqlite_storage


class TestRedis(SnapshotSuite):
    @pytest.fixture
    def harness(self, redis_storage: RedisStorage) -> RedisStorage:
        return redis_storage


class TestPostgres(SnapshotSuite):
    @pytest.fixture
    def harness(self, postgres_storage: PostgresStorage) -> PostgresStorage:
        return postgres_storage


class ThirdPartyStorage:
    """A `StoreHarness` over a store that is found by its entry point."""

    def __init__(self, database: Database) -> None:
        self.url = f"acme://{uuid4()}"
        self._database = database

    def open(self) -> SnapshotStore:
        return resolve(self.url, Settings(_env_file=None), self._database, "redis://nowhere")

    def session(self) -> UUID:
        return uuid4()

    def damage(self, agent_id: UUID) -> None:
        snapshots = MemorySnapshots.places[self.url]["snapshots"]
        version, data = snapshots[agent_id]
        snapshots[agent_id] = (version, data[:100])

    def set_aside(self, agent_id: UUID) -> bytes | None:
        found = MemorySnapshots.places[self.url]["set aside"].get(agent_id)
        return found[1] if found else None


class TestThirdParty(SnapshotSuite):
    @pytest.fixture
    def harness(self, installed: None, database: Database) -> ThirdPartyStorage:
        return ThirdPartyStorage(database)
