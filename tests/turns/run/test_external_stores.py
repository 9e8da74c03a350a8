"""Turns with each of the external snapshot stores, and on a disk that is missing, full or read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from perdure.snapshots.deletion import delete_snapshots
from perdure.snapshots.file import FileSnapshots
from perdure.snapshots.redis import RedisSnapshots
from perdure.snapshots.sqlite import SqliteSnapshots
from perdure.snapshots.store import SnapshotStore, Version
from perdure.turns.lease.claim import Ran
from perdure.turns.reading import unsaved_turns
from tests.snapshots.conftest import small_disk
from tests.snapshots.test_troubles import fill
from tests.turns.counting import (
    AFTER_LEASE_S,
    add,
    ask_to_count,
    committed_snapshot,
    keep,
    woken_sessions,
)
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

__all__ = ["small_disk"]


@pytest.fixture(params=["file", "sqlite", "redis"])
def store(request: pytest.FixtureRequest, harness: Harness, tmp_path: Path) -> Iterator[SnapshotStore]:
    """Each external snapshot store, installed in the harness."""
    if request.param == "redis":
        harness.snapshots = RedisSnapshots(request.getfixturevalue("redis_url"))
    else:
        harness.snapshots = FileSnapshots(tmp_path) if request.param == "file" else SqliteSnapshots(tmp_path / "s.db")
    harness.equip(add)
    yield harness.snapshots
    harness.snapshots.close()


def test_a_session_continues_from_each_store(harness: Harness, store: SnapshotStore) -> None:
    """After turns with and without a crash, the store has the last commit's snapshot. The snapshot can be deleted."""
    session_id = UUID(ask_to_count(harness)["session_id"])
    harness.script(calls(("add", {})), says("counted"))
    harness.send()
    with harness.crashing("before", "turns.settle"):
        harness.run(session_id)
    harness.move(AFTER_LEASE_S)
    assert harness.run(session_id) == Ran(1)
    ask_to_count(harness)
    assert harness.results() == ["1", "2", "3"]
    found = store.load(session_id)
    assert found is not None
    assert found.version == committed_snapshot(harness, session_id).version == Version(4, 9)
    delete_snapshots(harness.database, store, session_id)
    assert store.load(session_id) is None


def test_a_disk_that_is_not_mounted_holds_the_turn_until_it_is(harness: Harness, tmp_path: Path) -> None:
    """While the store's directory is missing, the turn is not settled. `unsaved_turns` shows the remedy."""
    harness.snapshots = FileSnapshots(tmp_path / "disk")
    harness.equip(add)
    sent = harness.send()
    assert harness.run(sent.session_id) == Ran(0)
    (held,) = unsaved_turns(harness.database, sent.session_id)
    assert held["turn_id"] == str(sent.turn_id)
    assert "there is no such directory. Make it, or mount the disk that holds it." in held["error"]
    (tmp_path / "disk").mkdir()
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert unsaved_turns(harness.database, sent.session_id) == []


@pytest.mark.parametrize("trouble", ["full", "read-only"])
@pytest.mark.parametrize("kind", [FileSnapshots, SqliteSnapshots])
def test_a_full_or_read_only_disk_holds_the_turn(
    harness: Harness, small_disk: Path, kind: type[FileSnapshots | SqliteSnapshots], trouble: str
) -> None:
    """The reply is visible only after the store has saved the snapshot. Repeating the save does not call the model."""
    store = harness.snapshots = kind(small_disk if kind is FileSnapshots else small_disk / "s.db")
    harness.equip(keep)
    assert _kept(harness, "little")["status"] == "done"
    if trouble == "full":
        fill(small_disk / "filler")
    else:
        store.close()  # a disk with a file open for writing cannot be made read-only
        _remount(small_disk, "ro")
    harness.script(calls(("keep", {"text": "x" * 60_000})), says("at last"))
    sent = harness.send()
    assert harness.run(sent.session_id) == Ran(0)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["reply"], turn["attempts"]) == ("parked", None, 1)
    (held,) = unsaved_turns(harness.database, sent.session_id)
    assert store.name in held["error"]
    assert ("assistant", "at last") not in harness.lines(sent.session_id)

    if trouble == "full":
        (small_disk / "filler").unlink()
    else:
        _remount(small_disk, "rw")
    harness.move(harness.settings.turn.sweep_s + 1)
    requests_before = len(harness.model.requests)
    assert sent.session_id in woken_sessions(harness)
    assert harness.run(sent.session_id) == Ran(1)
    assert (harness.turn(sent.turn_id)["reply"]["text"], len(harness.model.requests)) == ("at last", requests_before)
    found = store.load(sent.session_id)
    assert found is not None
    assert found.snapshot.memory.working_variables == {"text": "x" * 60_000}
    store.close()


def _kept(harness: Harness, text: str) -> dict[str, Any]:
    harness.script(calls(("keep", {"text": text})), says("kept"))
    return harness.ask()


def _remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)
