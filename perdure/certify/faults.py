"""Fault injection, shared by a process and the workers that it watches: faults at exact places, and a journal.

A place is a point in a tool, or the moment before or after a commit of the engine (see `Database.observe`). `arm` sets
a fault for the n-th pass of a place, counted over all processes. The process that makes the n-th pass claims the fault
by renaming a file, and sends itself the fault's signal. Each pass is a line in a file.
The process appends the whole line outside of any transaction, so that a SIGKILL loses no line.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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
class Fired:
    """A fault that fired in the process `pid`."""

    at: float
    pid: int


class Faults:
    """A directory with the armed fault and the journal of passed places."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._armed = directory / "armed"
        self._fired = directory / "fired"
        self._journal = directory / "journal"

    # --- the side of the process that watches ---------------------------------------------

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
        return [_note(line) for line in lines(self._journal)[since:]]

    # --- a worker's side -----------------------------------------------------------------

    def pass_by(self, moment: str, name: str) -> None:
        """Record a pass of a place. If a fault is armed for this pass, send this thread the fault's signal."""
        append(self._journal, f"{time.monotonic()} {os.getpid()} {moment} {name}")
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


def _write(path: Path, value: dict[str, Any]) -> None:
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(value))
    whole.rename(path)


def append(path: Path, line: str) -> None:
    """Append a line in one write, so that lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def lines(path: Path) -> list[str]:
    """The complete lines of a file; none if there is no file."""
    # A last line without a line break is skipped, because a process may still be writing the line.
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def _note(line: str) -> Note:
    at, pid, moment, name = line.split()
    return Note(float(at), int(pid), moment, name)
