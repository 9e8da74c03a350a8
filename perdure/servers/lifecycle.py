"""Starts, finds and stops an embedded server, PostgreSQL or Redis.

Processes coordinate through three locks in the server's directory. The kernel releases a lock when its holder dies:

    start.lock    held exclusively while a process starts or stops the server: only one process does so at a time
    server.lock   inherited by the server and all its children: held as long as one of these processes is alive
    users.lock    held shared by each process that started or joined the server: the last `stop` ends the server

If the process that started a server is killed, the server continues to run. The next process that calls `start` joins
the server, and stops it with `stop`. If two `perdure up` use a server, the one that stops first leaves it running.
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

from perdure.servers import wheels
from perdure.servers.errors import EmbeddedServerError, disk_full, explained
from perdure.servers.process import sockets
from perdure.servers.process.locks import FileLock

_TICK_S = 0.01  # between two checks of a server's state
_LOG_KEPT_BYTES = 4 * 2**20
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Launch:
    """The command line and the environment of a server's process."""

    argv: Sequence[str]
    environment: Mapping[str, str]


class Server(Protocol):
    """A PostgreSQL or Redis server in one directory: the interface that `start`, `find` and `Running.stop` need."""

    @property
    def title(self) -> str:
        """The server's name in messages."""
        ...

    @property
    def directory(self) -> Path:
        """The directory of all the server's files: an absolute path without symbolic links."""
        ...

    @property
    def kill_signal(self) -> signal.Signals:
        """The signal to send if the server still runs some time after SIGINT, which requests a clean shutdown."""
        ...

    def prepare(self) -> Launch:
        """Create or check the server's files; returns how to launch the server.

        `start` calls this only while no process of the server is alive.

        Raises:
            EmbeddedServerError: the existing files cannot be used.
            OSError: the directory cannot be used.
        """
        ...

    def answers(self) -> bool:
        """Try to connect; returns whether the server accepts connections."""
        ...

    def complete(self) -> None:
        """Do the part of the setup that needs a running server, such as creating a database. Idempotent."""
        ...

    def pid(self) -> int | None:
        """The id of the server's main process, verified by its command line; `None` if it is not found."""
        ...

    def url(self) -> str: ...

    def remedy(self, log: str) -> str:
        """One or two sentences of advice after a failed start. `log` is the end of the server's log."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address and process id of a server that accepts connections."""

    url: str
    pid: int


class Running:
    """A server that this process has started or joined, and uses until it calls `stop`.

    Attributes:
        url: The server's address.
        pid: The server's process id at the time of `start`. Another process may have restarted the server since then.
        owned: Whether this process started the server; False if it joined a running server.
    """

    def __init__(self, server: Server, users: FileLock, endpoint: Endpoint, *, owned: bool) -> None:
        self._server = server
        self._users = users
        self.url = endpoint.url
        self.pid = endpoint.pid
        self.owned = owned

    def stop(self, *, timeout_s: float = 60) -> bool:
        """Stop the server cleanly, unless another process still uses it.

        Returns:
            Whether the server is stopped now.

        Raises:
            EmbeddedServerError: the server still runs after `timeout_s` seconds and after the kill signal.
        """
        directory = self._server.directory
        with self._users, explained(self._server.title, directory), _starting(directory):
            if not self._users.try_exclusive():
                return False
            _stop(self._server, timeout_s)
        return True

    def wait(self) -> None:
        with FileLock(self._server.directory / "server.lock") as lock:
            lock.shared()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()


def start(server: Server, *, timeout_s: float = 300) -> Running:
    """Join the running server of `server.directory`, or start it.

    Args:
        server: The server.
        timeout_s: Seconds within which the server must accept connections. After a crash, PostgreSQL first replays its
            write-ahead log.

    Raises:
        EmbeddedServerError: the server cannot be started; the message gives the reason and a remedy.
    """
    wheels.require_psutil()
    with explained(server.title, server.directory):
        server.directory.mkdir(parents=True, exist_ok=True)
        with _starting(server.directory):
            child = _join_or_launch(server, timeout_s)
            pid = server.pid()
            if pid is None:
                raise EmbeddedServerError(
                    f"the embedded {server.title} of {server.directory} answers, but its process cannot be "
                    "identified: is PERDURE_DATA_DIR shared with another container? Run only one installation there."
                )
            users = FileLock(server.directory / "users.lock")
            users.shared()
    if child is not None:
        # Reap the child when it ends: otherwise it stays as a zombie.
        threading.Thread(target=child.wait, name=f"reap-{server.title}", daemon=True).start()
    return Running(server, users, Endpoint(server.url(), pid), owned=child is not None)


def find(server: Server) -> Endpoint | None:
    """The running server of `server.directory`, or `None`. Has no side effects.

    Raises:
        EmbeddedServerError: this account may not read the directory.
    """
    with explained(server.title, server.directory):
        if not _is_alive(server.directory) or not server.answers():
            return None
        pid = server.pid()
    return None if pid is None else Endpoint(server.url(), pid)


def is_of(server: Server, url: str) -> bool:
    """Whether `url` is the server's address. The server need not run."""
    try:
        return sockets.recorded(server.directory) is not None and server.url() == url
    except OSError:  # an account that may not read the directory cannot connect to its server either
        return False


def is_process_of(pid: int, program: str, directory: Path) -> bool:
    """Whether the command line of process `pid` names `program` and, as an argument, `directory`.

    Raises:
        EmbeddedServerError: psutil is not installed.
    """
    wheels.require_psutil()
    import psutil  # noqa: PLC0415 (of the extra `embedded`, which a worker with other servers lacks)

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


def _is_alive(directory: Path) -> bool:
    try:
        lock = FileLock(directory / "server.lock", create=False)
    except FileNotFoundError:
        return False
    with lock:
        return not lock.try_shared()


def _join_or_launch(server: Server, timeout_s: float) -> subprocess.Popen[bytes] | None:
    """Start the server unless it runs, and wait until it accepts connections; returns the started process, if any."""
    deadline = time.monotonic() + timeout_s
    log = server.directory / "server.log"
    log_start = _rotate(log)
    child: subprocess.Popen[bytes] | None = None
    try:
        # The lock is checked first: a copied directory still has the address of the original directory's server.
        while not (_is_alive(server.directory) and server.answers()):
            if child is None:
                child = _launch(server, log)
            _require_running(server, child, deadline, log, log_start)
            time.sleep(_TICK_S)
        server.complete()
    except BaseException:
        if child is not None:
            _end(child, server.kill_signal)
        raise
    return child


def _require_running(
    server: Server, child: subprocess.Popen[bytes] | None, deadline: float, log: Path, log_start: int
) -> None:
    if child is not None and child.poll() is not None:
        raise _failure(server, f"ended with status {child.returncode}", _tail(log, log_start))
    if time.monotonic() > deadline:
        raise _failure(server, "did not answer in time", _tail(log, log_start))


def _launch(server: Server, log: Path) -> subprocess.Popen[bytes] | None:
    """Start the server; returns its process. If a process of an earlier run is still alive, returns `None` instead."""
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
                start_new_session=True,  # Ctrl-C must not reach the server before the application has drained
                pass_fds=(alive.descriptor,),
            )


def _stop(server: Server, timeout_s: float) -> None:
    for number, patience_s in ((signal.SIGINT, timeout_s), (server.kill_signal, 15.0)):
        if not _is_alive(server.directory):
            return
        pid = server.pid()
        if pid is not None:
            os.kill(pid, number)
        if _wait_until_ended(server, patience_s):
            return
    raise EmbeddedServerError(
        f"the embedded {server.title} of {server.directory} did not stop; see {server.directory / 'server.log'}."
    )


def _wait_until_ended(server: Server, timeout_s: float) -> bool:
    """Wait until no process of the server is alive, at most `timeout_s` seconds; returns whether all have ended."""
    deadline = time.monotonic() + timeout_s
    while _is_alive(server.directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK_S)
    return True


def _end(child: subprocess.Popen[bytes], kill_signal: signal.Signals) -> None:
    child.send_signal(signal.SIGINT)
    try:
        child.wait(timeout=30)
    except subprocess.TimeoutExpired:
        child.send_signal(kill_signal)
        child.wait()


def _failure(server: Server, what: str, log: str) -> EmbeddedServerError:
    if "No space left on device" in log:
        return EmbeddedServerError(disk_full(server.title, server.directory))
    return EmbeddedServerError(
        f"the embedded {server.title} {what}. Its data is in {server.directory} (PERDURE_DATA_DIR). "
        f"{server.remedy(log)}\n--- end of {server.directory / 'server.log'} ---\n{log}"
    )


def _tail(log: Path, start: int) -> str:
    """The last `_TAIL_LINES` lines of `log` after its first `start` bytes."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])


def _rotate(log: Path) -> int:
    """Rotate `log` if it is long, and keep one old file; returns the current length of `log` in bytes.

    After a rotation, a running server continues to write to the old file.
    """
    size = log.stat().st_size if log.exists() else 0
    if size <= _LOG_KEPT_BYTES:
        return size
    log.replace(log.with_suffix(".log.1"))
    return 0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, mode=0o600)
