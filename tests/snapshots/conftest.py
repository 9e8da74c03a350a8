"""Fixtures: a `StoreHarness` for each snapshot store, a small file system, and simulated third-party packages."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from perdure.snapshots import resolve as resolving
from tests.snapshots.storages import FileStorage, MemorySnapshots, PostgresStorage, RedisStorage, SqliteStorage


@pytest.fixture
def file_storage(tmp_path: Path) -> FileStorage:
    """A harness for the file store, in an empty directory."""
    directory = tmp_path / "snapshots"
    directory.mkdir()
    return FileStorage(directory)


@pytest.fixture
def sqlite_storage(tmp_path: Path) -> SqliteStorage:
    """A harness for the SQLite store, whose file does not exist yet."""
    return SqliteStorage(tmp_path / "snapshots.db")


@pytest.fixture
def redis_storage(redis_url: str) -> RedisStorage:
    """A harness for the Redis store, in an empty Redis."""
    return RedisStorage(redis_url)


@pytest.fixture
def postgres_storage(database_url: str) -> Iterator[PostgresStorage]:
    """A harness for the PostgreSQL store, in the test's database."""
    storage = PostgresStorage(database_url)
    yield storage
    storage.close()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate two installed packages that each register a store. The second package's module is missing."""
    points = EntryPoints(
        [
            EntryPoint("acme", f"{MemorySnapshots.__module__}:{MemorySnapshots.__qualname__}", "perdure.snapshots"),
            EntryPoint("broken", "no_such_module:store", "perdure.snapshots"),
        ]
    )
    monkeypatch.setattr(resolving, "entry_points", lambda group: points.select(group=group))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system, to fill one up and to make it read-only")
    yield mount
    subprocess.run(["umount", mount], check=True)
