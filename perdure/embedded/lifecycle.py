"""Starts, finds and stops an embedded server, PostgreSQL or Redis.

Three locks in the server's directory decide everything, and the kernel releases each of them:

    start.lock    held while a server is started or stopped, so that the two never race
    server.lock   inherited by the server and its children: held while one of them lives
    users.lock    shared by every process that started or joined the server; the last one stops it

So a server outlives a starter that was killed; the next start joins it, and its stop then stops the server. Of two
concurrent `perdure up`, the first to exit does not stop the server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import psutil

from perdure.embedded.errors import EmbeddedServerError, disk_full, explained
from perdure.embedded.process.locks import FileLock

_TICK_S = 0.01  # seconds between two looks at a server that has no way to call back
_LOG_KEPT_BYTES = 4 * 2**20
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server's process is started."""

    argv: Sequence[str]
    environment: Mapping[str, str]


class Server(Protocol):
    """The differences between PostgreSQL and Redis."""

    @property
    def title(self) -> str:
        """The name for messages."""
        ...

    @property
    def directory(self) -> Path:
        """The directory of all its files; absolute, without symbolic links."""
        ...

    @property
    def last_resort(self) -> signal.Signals:
        """The signal that ends it if SIGINT, a clean shutdown for both servers, does not."""
        ...

    def prepare(self) -> Launch:
        """Make or check its files. Called only while no process of it lives.

        Raises:
            EmbeddedServerError: the files cannot be used.
            OSError: the directory cannot be used.
        """
        ...

    def answers(self) -> bool:
        """Whether it accepts a connection now."""
        ...

    def complete(self) -> None:
        """Complete a server that accepts connections, before it is used; safe to repeat."""
        ...

    def pid(self) -> int | None:
        """The id of the process to signal, proven to be this server; `None` if there is none."""
        ...

    def url(self) -> str:
        """Its URL."""
        ...

    def way_out(self, log: str) -> str:
        """A sentence on how to resolve a failed start that wrote `log`."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running server that another process keeps running."""

    url: str
    pid: int


class Running:
    """A server that this process keeps running until `stop`.

    Attributes:
        url: Its URL.
        pid: Its process at the time of `start`; a supervisor may have restarted it since.
        owned: Whether this process started it, instead of joining a running one.
    """

    def __init__(self, server: Server, users: FileLock, endpoint: Endpoint, *, owned: bool) -> None:
        self._server = server
        self._users = users
        self.url = endpoint.url
        self.pid = endpoint.pid
        self.owned = owned

    def stop(self, *, timeout_s: float = 60) -> bool:
        """Stop the server cleanly, unless another process uses it, too.

        Returns:
            Whether the server is stopped now.

        Raises:
            EmbeddedServerError: it did not end in `timeout_s` seconds, nor when killed.
        """
        directory = self._server.directory
        with self._users, explained(self._server.title, directory), _starting(directory):
            if not self._users.try_exclusive():
                return False
            _stop(self._server, timeout_s)
        return True

    def wait(self) -> None:
        """Return when no process of the server lives."""
        with FileLock(self._server.directory / "server.lock") as lock:
            lock.shared()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()


def start(server: Server, *, timeout_s: float = 300) -> Running:
    """Join the server of the directory, or start it.

    Args:
        server: The server.
        timeout_s: Seconds until it must accept connections. After a crash, PostgreSQL replays its log first.

    Raises:
        EmbeddedServerError: it cannot be started; the message gives the reason and a way out.
    """
    with explained(server.title, server.directory):
        server.directory.mkdir(parents=True, exist_ok=True)
        with _starting(server.directory):
            child = _join_or_launch(server, timeout_s)
            pid = server.pid()
            if pid is None:
                raise EmbeddedServerError(
                    f"the embedded {server.title} of {server.directory} answers, but which process it is cannot be "
                    "proven: is PERDURE_DATA_DIR shared with another container? Start one installation there only."
                )
            users = FileLock(server.directory / "users.lock")
            users.shared()
    if child is not None:
        # Reaped whenever it ends: otherwise it would stay as a zombie.
        threading.Thread(target=child.wait, name=f"reap-{server.title}", daemon=True).start()
    return Running(server, users, Endpoint(server.url(), pid), owned=child is not None)


def find(server: Server) -> Endpoint | None:
    """The running server of the directory, or `None`. Starts and changes nothing.

    Raises:
        EmbeddedServerError: this account may not read the directory.
    """
    with explained(server.title, server.directory):
        if not _lives(server.directory) or not server.answers():
            return None
        pid = server.pid()
    return None if pid is None else Endpoint(server.url(), pid)


def proven(pid: int, program: str, directory: Path) -> bool:
    """Whether the process `pid` runs `program` on exactly `directory`, by the command line that `start` gave it."""
    try:
        argv = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return bool(argv) and Path(argv[0]).name == program and str(directory) in argv[1:]


@contextmanager
def _starting(directory: Path) -> Iterator[None]:
    with FileLock(directory / "start.lock") as lock:
        lock.exclusive()
        yield


def _lives(directory: Path) -> bool:
    try:
        lock = FileLock(directory / "server.lock", create=False)
    except FileNotFoundError:
        return False
    with lock:
        return not lock.try_shared()


def _join_or_launch(server: Server, timeout_s: float) -> subprocess.Popen[bytes] | None:
    """Return the launched process, or `None` if a running server was joined. The server accepts connections."""
    deadline = time.monotonic() + timeout_s
    log = server.directory / "server.log"
    log_start = _make_room(log)
    child: subprocess.Popen[bytes] | None = None
    try:
        # The lock decides first: in a copied directory, the recorded files lead to the original's server.
        while not (_lives(server.directory) and server.answers()):
            if child is None:
                child = _launch(server, log)
            _refuse_lost(server, child, deadline, log, log_start)
            time.sleep(_TICK_S)
        server.complete()
    except BaseException:
        if child is not None:
            _end(child, server.last_resort)
        raise
    return child


def _refuse_lost(
    server: Server, child: subprocess.Popen[bytes] | None, deadline: float, log: Path, log_start: int
) -> None:
    if child is not None and child.poll() is not None:
        raise _failure(server, f"ended with status {child.returncode}", _tail(log, log_start))
    if time.monotonic() > deadline:
        raise _failure(server, "did not answer in time", _tail(log, log_start))


def _launch(server: Server, log: Path) -> subprocess.Popen[bytes] | None:
    """Start the server, or return `None` while a process of an earlier one lives."""
    with FileLock(server.directory / "server.lock") as alive:
        if not alive.try_exclusive():
            return None
        launch = server.prepare()
        with open(log, "ab", opener=_private) as output:
            return subprocess.Popen(
                launch.argv,
                env=dict(launch.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                umask=0o077,
                start_new_session=True,  # a Ctrl-C must reach only the application, which drains first
                pass_fds=(alive.descriptor,),
            )


def _stop(server: Server, timeout_s: float) -> None:
    for number, patience_s in ((signal.SIGINT, timeout_s), (server.last_resort, 15.0)):
        if not _lives(server.directory):
            return
        pid = server.pid()
        if pid is not None:
            os.kill(pid, number)
        if _ended(server, patience_s):
            return
    raise EmbeddedServerError(
        f"the embedded {server.title} of {server.directory} did not stop; see {server.directory / 'server.log'}."
    )


def _ended(server: Server, timeout_s: float) -> bool:
    """Wait until no process of the server lives; returns whether that happened in `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while _lives(server.directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK_S)
    return True


def _end(child: subprocess.Popen[bytes], last_resort: signal.Signals) -> None:
    child.send_signal(signal.SIGINT)
    try:
        child.wait(timeout=30)
    except subprocess.TimeoutExpired:
        child.send_signal(last_resort)
        child.wait()


def _failure(server: Server, what: str, log: str) -> EmbeddedServerError:
    if "No space left on device" in log:
        return EmbeddedServerError(disk_full(server.title, server.directory))
    return EmbeddedServerError(
        f"the embedded {server.title} {what}. Its data is in {server.directory} (PERDURE_DATA_DIR). "
        f"{server.way_out(log)}\n--- end of {server.directory / 'server.log'} ---\n{log}"
    )


def _tail(log: Path, start: int) -> str:
    """The last lines written to `log` since it was `start` bytes long."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])


def _make_room(log: Path) -> int:
    """Rotate a long log (one old file is kept, which a running server continues to write); return the log's length."""
    size = log.stat().st_size if log.exists() else 0
    if size <= _LOG_KEPT_BYTES:
        return size
    log.replace(log.with_suffix(".log.1"))
    return 0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, mode=0o600)
