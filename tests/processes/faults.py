"""Fault injection, shared by a test and its workers: faults at exact places, and a journal that survives a crash.

A place is a point in a tool, or the moment before or after a commit of the engine (see `Database.observe`). A test
arms a fault for the n-th pass of a place, counted over all processes. The process that makes the n-th pass claims the
fault by renaming a file, and sends itself the fault's signal. Each pass and each effect of a tool is a line in a file.
The process appends the whole line outside of any transaction, so that a SIGKILL loses no line.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SCENE = "PERDURE_TEST_FAULTS"
"""The environment variable that contains the path of the directory of `Faults`."""

SILENCE_S = "PERDURE_TEST_SILENCE_S"
"""The environment variable with the watchdog's minimum time limit, in seconds.

If two lease durations are longer than the minimum, the time limit is two lease durations.
"""

_LOOK_S = 0.01
_SLOWEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """The `nth` pass of a place, counted over all processes.

    `moment` is `before` or `after` if `name` is a commit, and `within` if `name` is a point in a tool or a model call.
    """

    moment: str
    name: str
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.moment}-{self.name}-{self.nth}"


@dataclass(frozen=True, slots=True)
class Note:
    """A process's pass of a place. `at` is a time of the monotonic clock, which all processes share."""

    at: float
    pid: int
    moment: str
    name: str


@dataclass(frozen=True, slots=True)
class Effect:
    """A side effect of a tool, recorded outside of the engine."""

    tool: str
    effect_id: str
    note: str
    pid: int
    after_s: float = 0.0
    """Seconds from the tool's start to its effect. The value is near 0 unless the process was paused in between."""


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault that fired in the process `pid`."""

    at: float
    pid: int


class Faults:
    """A directory with the armed fault, the journal of passed places and the tools' effects."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._armed = directory / "armed"
        self._fired = directory / "fired"
        self._journal = directory / "journal"
        self._effects = directory / "effects"
        self._released = directory / "released"

    # --- the test's side -----------------------------------------------------------------

    def arm(self, place: Place, number: signal.Signals = signal.SIGKILL) -> None:
        """Arm a fault: the process that makes the `nth` pass of `place` sends itself the signal `number`."""
        self._fired.unlink(missing_ok=True)
        fault = {**asdict(place), "signal": int(number), "id": time.monotonic_ns()}
        _write(self._armed, fault)

    def disarm(self) -> None:
        """Remove a fault that has not fired."""
        self._armed.unlink(missing_ok=True)

    def fired(self) -> Fired | None:
        """The armed fault if it has fired; otherwise `None`."""
        try:
            return Fired(**json.loads(self._fired.read_text()))
        except FileNotFoundError:
            return None

    def notes(self, since: int = 0) -> list[Note]:
        """The entries of the journal, without the first `since` entries."""
        return [_note(line) for line in _lines(self._journal)[since:]]

    def effects(self, note: str | None = None) -> list[Effect]:
        """The tools' effects, in order; with `note`, only those recorded with this note."""
        effects = [Effect(**json.loads(line)) for line in _lines(self._effects)]
        return [effect for effect in effects if note is None or effect.note == note]

    def release(self) -> None:
        """Let slow tools return."""
        self._released.touch()

    # --- a worker's side -----------------------------------------------------------------

    def wait_released(self) -> None:
        """Wait until the test lets slow tools return."""
        wait_until(self._released.exists, "slow tools may end", _SLOWEST_S)

    def act(self, effect: Effect) -> None:
        """Record a tool's side effect."""
        _append(self._effects, json.dumps(asdict(effect)))

    def pass_by(self, moment: str, name: str) -> None:
        """Record a pass of a place. If a fault is armed for this pass, send this thread the fault's signal."""
        _append(self._journal, f"{time.monotonic()} {os.getpid()} {moment} {name}")
        try:
            fault = json.loads(self._armed.read_text())
        except FileNotFoundError:
            return
        if (fault["moment"], fault["name"]) == (moment, name) and self._count(fault) == fault["nth"]:
            self._fire(fault)

    def _count(self, fault: dict[str, Any]) -> int:
        """Count this pass; returns how often all processes have passed the place since the fault was armed."""
        descriptor = os.open(self.directory / f"passes-{fault['id']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, b".")
            return os.lseek(descriptor, 0, os.SEEK_CUR)  # after this pass's byte, even if other processes append
        finally:
            os.close(descriptor)

    def _fire(self, fault: dict[str, Any]) -> None:
        try:
            self._armed.rename(self._armed.with_suffix(".taken"))
        except FileNotFoundError:
            return  # another process claimed the fault
        _write(self._fired, asdict(Fired(time.monotonic(), os.getpid())))
        # The signal is sent to this thread: a signal to the process may stop this thread one commit too late.
        signal.pthread_kill(threading.get_ident(), fault["signal"])


def done(tool: str, note: str) -> str:
    """The result of a tool whose effect took place."""
    return f"{tool} did {note!r}"


def wait_until(condition: Callable[[], T | None], what: str, within_s: float = 20.0) -> T:
    """Poll `condition` and return its first true value; fails the test after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within_s:g} s")
        time.sleep(_LOOK_S)
    return value


def _write(path: Path, value: dict[str, Any]) -> None:
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(value))
    whole.rename(path)


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def _lines(path: Path) -> list[str]:
    # A last line without a line break is skipped, because a process may still be writing the line.
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def _note(line: str) -> Note:
    at, pid, moment, name = line.split()
    return Note(float(at), int(pid), moment, name)
