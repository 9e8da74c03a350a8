"""A save that is killed leaves a complete snapshot, and a save that is paused does not overwrite a newer snapshot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

import pytest

from perdure.snapshots.store import Stored
from perdure.testing.suites.snapshots import snapshot_of
from tests.repository.source import ROOT
from tests.snapshots.killing import BIG, storage_of

KINDS = ["file", "sqlite", "redis", "postgres"]
_DEADLINE_S = 100


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    """The address of the store of the test's `kind`."""
    storage = request.getfixturevalue(f"{request.getfixturevalue('kind')}_storage")
    return str(getattr(storage, "url", None) or getattr(storage, "path", None) or storage.directory)


@contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `killing.py` in a process group, which is killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.snapshots.killing", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # the group has already ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def at_every_point(how: str, kind: str, address: str) -> dict[str, Any]:
    """Run `killing.py points`; returns its report."""
    session = storage_of(kind, address).session()
    with program("points", how, kind, address, str(session)) as process:
        out, err = process.communicate(timeout=_DEADLINE_S)
        assert process.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_is_killed_leaves_the_old_snapshot_or_the_new(kind: str, address: str) -> None:
    """A killed save leaves no partial snapshot and no lock, so the next store can load and save."""
    report = at_every_point("kill", kind, address)
    assert report["found"].keys() == {"one", "two"}, report
    assert sum(report["found"].values()) == report["events"] >= 8


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_save_neither_delays_nor_overwrites_a_newer_one(kind: str, address: str) -> None:
    """A save is paused at each of its points. Only SQLite may delay a newer save, because it locks the whole file."""
    report = at_every_point("stop", kind, address)
    assert report["found"].keys() <= {"passed", "delayed"} if kind == "sqlite" else report["found"].keys() == {"passed"}
    assert sum(report["found"].values()) == report["events"] >= 8


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_completed_save_survives_a_kill(kind: str, address: str) -> None:
    """The reply becomes visible after `save` returns. Therefore the snapshot must survive a kill of the process."""
    storage = storage_of(kind, address)
    for reached in (1, 7, 20):
        session: UUID = storage.session()
        with program("stream", kind, address, str(session)) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) == reached:
                    break
            os.kill(process.pid, signal.SIGKILL)
            acknowledged = [reached, *(int(line) for line in process.stdout.read().split())][-1]
        store = storage.open()
        found = store.load(session)
        store.close()
        assert found is not None
        assert acknowledged <= found.snapshot.tick_index <= acknowledged + 1
        tick = found.snapshot.tick_index
        assert found == Stored(snapshot_of(session, tick, {"v": BIG, "tick": tick}), 1)
