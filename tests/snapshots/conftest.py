"""Worlds of the stores, a small disk, an installed third party."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from perdure.snapshots import resolve as resolving
from tests.snapshots.worlds import FileWorld, MemorySnapshots, PostgresWorld, RedisWorld, SqliteWorld


@pytest.fixture
def file_world(tmp_path: Path) -> FileWorld:
    """A directory of this test's own."""
    directory = tmp_path / "snapshots"
    directory.mkdir()
    return FileWorld(directory)


@pytest.fixture
def sqlite_world(tmp_path: Path) -> SqliteWorld:
    """A SQLite file that does not exist yet."""
    return SqliteWorld(tmp_path / "snapshots.db")


@pytest.fixture
def redis_world(redis_url: str) -> RedisWorld:
    """The suite's Redis, emptied."""
    return RedisWorld(redis_url)


@pytest.fixture
def postgres_world(database_url: str) -> Iterator[PostgresWorld]:
    """The test's database."""
    world = PostgresWorld(database_url)
    yield world
    world.close()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages with entry points, one of which lacks its module."""
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
