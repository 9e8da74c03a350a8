"""A program that kills or stops a process while the process saves a snapshot, once at each point of the save.

    killing points kill|stop KIND ADDRESS SESSION
    killing stream KIND ADDRESS SESSION

`points` first counts the points of a save. A point is just before or just after a call that can reach a file, a socket
or a database. For each point, a child process saves version 2 over version 1, and receives SIGKILL or SIGSTOP at the
point. After SIGKILL, a new store in the parent must load version 1 or version 2, and then save version 3. After
SIGSTOP, the parent saves version 3, resumes the child, and must then load version 3. `points` prints the counts of the
results as JSON.

`stream` saves one tick after another until the program is killed, and prints each tick after its save.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from uuid import UUID

from perdure.snapshots.store import SnapshotStore, SnapshotUnavailable, StaleSnapshot, Stored
from perdure.testing.suites.snapshots import snapshot_of
from tests.snapshots.storages import FileStorage, PostgresStorage, RedisStorage, SqliteStorage

_OUTSIDE = ("posix", "io", "_io", "sqlite3", "socket", "_socket", "psycopg2")
"""Modules with functions or methods that can change something outside of the process."""

_DELAY_S = 4
BIG = "x" * 20_000


def storage_of(kind: str, address: str) -> Any:
    """A `StoreHarness` for a store of this kind at `address`."""
    match kind:
        case "file":
            return FileStorage(Path(address))
        case "sqlite":
            return SqliteStorage(Path(address))
        case "redis":
            return RedisStorage(address)
        case _:
            return PostgresStorage(address, lease_s=3)


class Countdown:
    """A profiler that counts the events of a save. At event `at`, it sends its own process the signal `number`."""

    def __init__(self, at: int | None, number: int) -> None:
        self.events = 0
        self._at = at
        self._number = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count each call, return and error of a C function that can reach a file, a socket or a database."""
        if event not in {"c_call", "c_return", "c_exception"} or not _reaches_outside(argument):
            return
        self.events += 1
        if self.events == self._at:
            os.kill(os.getpid(), self._number)


def _reaches_outside(function: Any) -> bool:
    """Whether `function` is a function of a module in `_OUTSIDE`, or a method of a type from such a module."""
    owner = getattr(function, "__self__", None)
    module = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__module__
    return module.partition(".")[0] in _OUTSIDE


def save(storage: Any, session: UUID, countdown: Countdown) -> None:
    """Open and connect a store, and then save version 2 with `countdown` as the profiler."""
    store: SnapshotStore = storage.open()
    store.load(session)
    sys.setprofile(countdown)
    try:
        store.save(snapshot_of(session, 2, {"v": BIG}), 2)
    finally:
        sys.setprofile(None)
    store.close()


def in_a_child(kind: str, address: str, session: UUID, countdown: Countdown) -> int:
    """Fork a child that calls `save`; returns the child's process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            save(storage_of(kind, address), session, countdown)
            status = 0
        except (StaleSnapshot, SnapshotUnavailable):
            status = 2  # this child was stopped, and the parent has saved a newer version
        finally:
            os._exit(status)
    return child


def begin(store: SnapshotStore, session: UUID) -> None:
    """Delete the session's snapshot and save version 1."""
    store.delete(session)
    store.save(snapshot_of(session, 1, {"v": "one"}), 1)


def killed_at(point: int, kind: str, address: str, session: UUID) -> str:
    """Kill a save at `point`; returns the version that a new store then loads: `one` or `two`."""
    child = in_a_child(kind, address, session, Countdown(point, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        return "not killed"
    store = storage_of(kind, address).open()
    found = store.load(session)
    store.save(snapshot_of(session, 3, {"v": "three"}), 3)
    after = store.load(session)
    kept = storage_of(kind, address).set_aside(session)
    begin(store, session)
    store.close()
    assert after == Stored(snapshot_of(session, 3, {"v": "three"}), 3), after
    assert kept is None, kept
    return _which(found, session)


def stopped_at(point: int, kind: str, address: str, session: UUID) -> str:
    """Stop a save at `point`, save a newer version, and resume the stopped save.

    Returns `delayed` if the newer save waited or was refused at first, and otherwise `passed`. Returns `not stopped` if
    the child was not stopped.
    """
    child = in_a_child(kind, address, session, Countdown(point, signal.SIGSTOP))
    _, status = os.waitpid(child, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        return "not stopped"
    store = storage_of(kind, address).open()
    newer = snapshot_of(session, 3, {"v": "three"})
    began = time.monotonic()
    try:
        store.save(newer, 3)
        delayed = time.monotonic() - began > _DELAY_S
    except SnapshotUnavailable:
        delayed = True
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)
    if delayed:
        store.save(newer, 3)
    found = store.load(session)
    begin(store, session)
    store.close()
    assert found == Stored(newer, 3), found
    return "delayed" if delayed else "passed"


def _which(found: Stored | None, session: UUID) -> str:
    if found == Stored(snapshot_of(session, 1, {"v": "one"}), 1):
        return "one"
    if found == Stored(snapshot_of(session, 2, {"v": BIG}), 2):
        return "two"
    return f"neither: {found}"


def points(how: str, kind: str, address: str, session: UUID) -> None:
    """Kill or stop a save at each of its points. Print the number of points and the counts of the results."""
    store = storage_of(kind, address).open()
    begin(store, session)
    counting = Countdown(None, 0)
    save(storage_of(kind, address), session, counting)
    begin(store, session)
    store.close()
    at = killed_at if how == "kill" else stopped_at
    found = Counter(at(point, kind, address, session) for point in range(1, counting.events + 1))
    print(json.dumps({"events": counting.events, "found": found}))  # noqa: T201


def stream(kind: str, address: str, session: UUID) -> None:
    """Save one tick after another, and print each tick after its save."""
    store = storage_of(kind, address).open()
    for tick in itertools.count(1):
        store.save(snapshot_of(session, tick, {"v": BIG, "tick": tick}), 1)
        print(tick, flush=True)  # noqa: T201


def main() -> None:
    """Run the program with the arguments in `sys.argv`."""
    match sys.argv[1:]:
        case ["points", how, kind, address, session]:
            points(how, kind, address, UUID(session))
        case ["stream", kind, address, session]:
            stream(kind, address, UUID(session))
        case _:
            sys.exit(__doc__)
