"""A store that is full, read-only, locked or unavailable raises an error that names the store, cause and remedy.

After the cause is removed, the store works again.
"""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_py

from perdure.servers import redis
from perdure.servers.lifecycle import Running
from perdure.snapshots.file import FileSnapshots
from perdure.snapshots.redis import RedisSnapshots
from perdure.snapshots.sqlite import SqliteSnapshots
from perdure.snapshots.store import SnapshotStore, SnapshotUnavailable, Stored, Version
from perdure.testing.suites.snapshots import snapshot_of

BIG = {"v": "x" * 60_000}
WITHIN_S = 10.0
"""The time limit of an operation. A store waits at most two seconds; the rest allows for a loaded machine."""

STORES_ON_DISK: dict[str, Callable[[Path], SnapshotStore]] = {
    "file": FileSnapshots,
    "sqlite": lambda disk: SqliteSnapshots(disk / "snapshots.db"),
}


def unavailable(operation: Callable[[], Any]) -> str:
    """The message of the `SnapshotUnavailable` that `operation` must raise within `WITHIN_S`."""
    began = time.monotonic()
    with pytest.raises(SnapshotUnavailable) as caught:
        operation()
    assert time.monotonic() - began < WITHIN_S
    return caught.value.message


def fill(filler: Path) -> None:
    """Write until the disk is full."""
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


@pytest.mark.parametrize("kind", STORES_ON_DISK)
def test_a_full_disk_costs_no_snapshot_and_is_reported(kind: str, small_disk: Path) -> None:
    """If a save fails on a full disk, the old snapshot stays intact. After room is made, the save succeeds."""
    store = STORES_ON_DISK[kind](small_disk)
    agent_id = uuid4()
    store.save(snapshot_of(agent_id, 1), 1)
    filler = small_disk / "filler"
    fill(filler)
    for _ in range(3):
        message = unavailable(lambda: store.save(snapshot_of(agent_id, 2, BIG), 1))
        assert store.name in message
        assert "Make room on its disk." in message
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)
    filler.unlink()
    store.save(snapshot_of(agent_id, 2, BIG), 1)
    assert store.load(agent_id) == Stored(snapshot_of(agent_id, 2, BIG), 1)
    store.close()


@pytest.mark.parametrize("kind", STORES_ON_DISK)
def test_a_read_only_disk_is_reported(kind: str, small_disk: Path) -> None:
    """If Linux has remounted a failing disk read-only, saving and deleting raise an error."""
    store = STORES_ON_DISK[kind](small_disk)
    agent_id = uuid4()
    store.save(snapshot_of(agent_id, 1), 1)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    try:
        message = unavailable(lambda: store.save(snapshot_of(agent_id, 2), 1))
        assert "perdure's account" in message
        unavailable(lambda: store.delete(agent_id))
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    store.save(snapshot_of(agent_id, 2), 1)
    assert store.load(agent_id) == Stored(snapshot_of(agent_id, 2), 1)
    store.close()


@pytest.mark.parametrize("kind", STORES_ON_DISK)
def test_a_disk_that_is_not_mounted_is_not_mistaken_for_an_empty_one(kind: str, tmp_path: Path) -> None:
    """If the store's directory is missing, operations fail and do not create the directory.

    Otherwise, while the disk is not mounted, every session would begin empty, and new snapshots would be on another
    disk.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    store = STORES_ON_DISK[kind](disk)
    agent_id = uuid4()
    store.save(snapshot_of(agent_id, 1), 1)
    store.close()
    disk.rename(tmp_path / "elsewhere")
    for operation in (
        lambda: store.load(agent_id),
        lambda: store.save(snapshot_of(agent_id, 2), 1),
        lambda: store.delete(agent_id),
    ):
        unavailable(operation)
    assert not disk.exists()
    (tmp_path / "elsewhere").rename(disk)
    assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)
    store.close()


@pytest.mark.long
def test_a_save_to_a_locked_sqlite_file_fails_in_time(tmp_path: Path) -> None:
    """While another process holds the file's lock, a save fails in time, and a load still works."""
    store = SqliteSnapshots(tmp_path / "snapshots.db")
    agent_id = uuid4()
    store.save(snapshot_of(agent_id, 1), 1)
    holder = sqlite3.connect(tmp_path / "snapshots.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    message = unavailable(lambda: store.save(snapshot_of(agent_id, 2), 1))
    assert "Another process holds it" in message
    assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)
    holder.execute("ROLLBACK")
    holder.close()
    store.save(snapshot_of(agent_id, 2), 1)
    store.close()


@pytest.mark.parametrize("kind", STORES_ON_DISK)
def test_a_deleted_snapshot_leaves_no_bytes_in_its_files(kind: str, tmp_path: Path) -> None:
    """Deleted variables must not remain in free pages, the write-ahead log or snapshots that were set aside."""
    store, agent_id, other = STORES_ON_DISK[kind](tmp_path), uuid4(), uuid4()
    for tick in (1, 2):
        store.save(snapshot_of(agent_id, tick), 1)
        store.set_aside(agent_id, Version(1, 1), "spoilt")
        store.save(snapshot_of(other, tick), 1)

    def files(text: str) -> list[Path]:
        return [path for path in tmp_path.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]

    assert files(str(agent_id))
    store.delete(agent_id)
    assert files(str(agent_id)) == []
    assert files(str(other))
    assert store.load(other) == Stored(snapshot_of(other, 2), 1)
    store.close()


@pytest.mark.long
def test_a_load_does_not_wait_for_a_save(tmp_path: Path) -> None:
    """While one thread waits for the file's lock in order to save, another thread can load."""
    store = SqliteSnapshots(tmp_path / "snapshots.db")
    agent_id = uuid4()
    store.save(snapshot_of(agent_id, 1), 1)
    holder = sqlite3.connect(tmp_path / "snapshots.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    loaded = 0
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(store.save, snapshot_of(agent_id, 2), 1)
        while not saving.done():
            assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)
            loaded += 1
            wait([saving], timeout=0.02)
        assert isinstance(saving.exception(), SnapshotUnavailable)
    assert loaded > 10
    holder.execute("ROLLBACK")
    holder.close()
    store.close()


def test_a_file_that_is_no_sqlite_file_is_left_to_the_operator(tmp_path: Path) -> None:
    """The file may belong to another program, so it is not changed. The error names the remedy."""
    path = tmp_path / "snapshots.db"
    path.write_bytes(b"these are the accounts of 1998" * 100)
    store = SqliteSnapshots(path)
    message = unavailable(lambda: store.load(uuid4()))
    assert "move the file away" in message
    assert path.read_bytes().startswith(b"these are the accounts of 1998")
    path.unlink()
    assert store.load(uuid4()) is None
    store.close()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Running]:
    """A Redis that a test may stop."""
    running = redis.start(tmp_path / "redis")
    yield running
    if redis.find(tmp_path / "redis") is not None:
        running.stop()


def test_a_stopped_redis_is_reported_and_used_again_after_its_restart(own_redis: Running, tmp_path: Path) -> None:
    """The store reconnects after a restart of its server, so that no worker must be restarted."""
    store = RedisSnapshots(own_redis.url)
    agent_id = uuid4()
    store.save(snapshot_of(agent_id, 1), 1)
    assert own_redis.stop()
    for operation in (lambda: store.save(snapshot_of(agent_id, 2), 1), lambda: store.load(agent_id)):
        message = unavailable(operation)
        assert "redis" in message
        assert "PERDURE_REDIS_URL" in message
    with redis.start(tmp_path / "redis"):
        store.save(snapshot_of(agent_id, 2), 1)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 2), 1)
    store.close()


@pytest.mark.long
def test_a_call_of_an_unresponsive_redis_fails_in_time(own_redis: Running) -> None:
    """A paused server accepts connections and does not respond. A call to the server must fail in time."""
    store = RedisSnapshots(own_redis.url)
    agent_id = uuid4()
    store.save(snapshot_of(agent_id, 1), 1)
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        unavailable(lambda: store.save(snapshot_of(agent_id, 2), 1))
        unavailable(lambda: store.load(agent_id))
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
    store.save(snapshot_of(agent_id, 3), 1)
    assert store.load(agent_id) == Stored(snapshot_of(agent_id, 3), 1)
    store.close()


@pytest.mark.parametrize(
    ("setting", "wrong", "right", "remedy"),
    [
        ("maxmemory", "1", "0", "maxmemory"),
        ("min-replicas-to-write", "1", "0", "Check that server"),
    ],
)
def test_a_redis_that_refuses_writes_is_reported(
    own_redis: Running, setting: str, wrong: str, right: str, remedy: str
) -> None:
    """A Redis that is full or lacks its required replicas refuses writes. Stored snapshots stay readable."""
    store = RedisSnapshots(own_redis.url)
    agent_id = uuid4()
    store.save(snapshot_of(agent_id, 1), 1)
    with redis_py.Redis.from_url(redis.client_url(own_redis.url)) as operator:
        operator.config_set(setting, wrong)
        assert remedy in unavailable(lambda: store.save(snapshot_of(agent_id, 2), 1))
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)
        operator.config_set(setting, right)
    store.save(snapshot_of(agent_id, 2), 1)
    store.close()


def test_a_redis_key_of_another_type_or_without_a_version_is_set_aside(
    own_redis: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """The first load or save sets aside a key that another program wrote. The key does not block the session."""
    store = RedisSnapshots(own_redis.url)
    with redis_py.Redis.from_url(redis.client_url(own_redis.url)) as client:
        for load_first in (True, False):
            for spoilt in ("text", {"token": "many", "tick": "1", "snapshot": "{}"}, {"token": "1"}, {"other": "1"}):
                agent_id = uuid4()
                key = f"perdure:snapshot:{{{agent_id}}}"
                if isinstance(spoilt, str):
                    client.set(key, spoilt)
                else:
                    client.hset(key, mapping=spoilt)
                if load_first:
                    assert store.load(agent_id) is None
                store.save(snapshot_of(agent_id, 1), 1)
                assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)
                assert client.exists(f"{key}:set-aside")
                assert str(agent_id) in caplog.text
    store.close()
