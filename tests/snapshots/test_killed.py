"""A save that is killed leaves a complete snapshot, and a save that is paused does not overwrite a newer snapshot."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from perdure.snapshots.store import Stored
from perdure.testing.suites.snapshots import snapshot_of
from tests import forked
from tests.processes.faults import wait_until
from tests.snapshots.killing import BIG, storage_of

KINDS = ["file", "sqlite", "redis", "postgres"]
_DEADLINE_S = 100


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    """The address of the store of the test's `kind`."""
    storage = request.getfixturevalue(f"{request.getfixturevalue('kind')}_storage")
    return str(getattr(storage, "url", None) or getattr(storage, "path", None) or storage.directory)


class Killing:
    """A running `killing.py`. Its output is in a file."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._out, self._err = (directory / f"{stream} {' '.join(arguments[:2])}" for stream in ("out", "err"))
        for each in (self._out, self._err):
            each.unlink(missing_ok=True)
        argv = ["killing", *arguments]
        self.process = forked.start(
            forked.Program(
                "tests.snapshots.killing:main", argv, dict(os.environ), directory, stdout=self._out, stderr=self._err
            )
        )

    @property
    def pid(self) -> int:
        """The id of the program's process and of its process group."""
        assert self.process.pid is not None
        return self.process.pid

    def lines(self) -> list[str]:
        """The complete lines that the program has printed."""
        return self._out.read_text().rpartition("\n")[0].splitlines() if self._out.exists() else []

    def ends(self) -> list[str]:
        """Wait until the program ends with status 0; returns the lines that it has printed."""
        self.process.join(_DEADLINE_S)
        assert self.process.exitcode == 0, self._err.read_text()
        return self.lines()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Killing]]:
    """A function that runs `killing.py` in a process group, which is killed after the test."""
    started: list[Killing] = []

    def start(*arguments: str) -> Killing:
        started.append(Killing(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()  # in case it has not created its process group yet
        with suppress(ProcessLookupError):  # the group has already ended
            os.killpg(each.pid, signal.SIGKILL)
        each.process.join()
        each.process.close()


@pytest.fixture
def at_every_point(program: Callable[..., Killing]) -> Callable[[str, str, str], dict[str, Any]]:
    """A function that runs `killing.py points`; it returns the program's report."""

    def run(how: str, kind: str, address: str) -> dict[str, Any]:
        session = storage_of(kind, address).session()
        report: dict[str, Any] = json.loads("\n".join(program("points", how, kind, address, str(session)).ends()))
        return report

    return run


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_is_killed_leaves_the_old_snapshot_or_the_new(
    at_every_point: Callable[[str, str, str], dict[str, Any]], kind: str, address: str
) -> None:
    """A killed save leaves no partial snapshot and no lock, so the next store can load and save."""
    report = at_every_point("kill", kind, address)
    assert report["found"].keys() == {"one", "two"}, report
    assert sum(report["found"].values()) == report["events"] >= 8


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_save_neither_delays_nor_overwrites_a_newer_one(
    at_every_point: Callable[[str, str, str], dict[str, Any]], kind: str, address: str
) -> None:
    """A save is paused at each of its points. Only SQLite may delay a newer save, because it locks the whole file."""
    report = at_every_point("stop", kind, address)
    assert report["found"].keys() <= {"passed", "delayed"} if kind == "sqlite" else report["found"].keys() == {"passed"}
    assert sum(report["found"].values()) == report["events"] >= 8


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_completed_save_survives_a_kill(program: Callable[..., Killing], kind: str, address: str) -> None:
    """The reply becomes visible after `save` returns. Therefore the snapshot must survive a kill of the process."""
    storage = storage_of(kind, address)
    for reached in (1, 7, 20):
        session: UUID = storage.session()
        killing = program("stream", kind, address, str(session))
        wait_until(partial(_has_saved, killing, reached), f"tick {reached} is saved", _DEADLINE_S)
        killing.process.kill()
        killing.process.join()
        acknowledged = int(killing.lines()[-1])
        store = storage.open()
        found = store.load(session)
        store.close()
        assert found is not None
        assert acknowledged <= found.snapshot.tick_index <= acknowledged + 1
        tick = found.snapshot.tick_index
        assert found == Stored(snapshot_of(session, tick, {"v": BIG, "tick": tick}), 1)


def _has_saved(killing: Killing, tick: int) -> bool:
    return len(killing.lines()) >= tick
