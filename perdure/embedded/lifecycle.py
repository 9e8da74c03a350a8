"""Starts, finds and stops an embedded server, PostgreSQL or Redis.

Three locks in the server's directory coordinate this, and the kernel releases each of them:

    start.lock    held while a server is being started or stopped, so that two never race
    server.lock   inherited by the server and all its children: held = a process of it is alive
    users.lock    shared by every process that started or joined it; the last one to leave stops it

So a server outlives a starter that was killed, the next start joins it, and its own stop then ends it; of two
concurrent `perdure up`, the first to leave stops nothing.
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

_TICK_S = 0.01  # between two checks of a server that cannot call back
_LOG_KEPT_BYTES = 4 * 2**20
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server's process is started."""

    argv: Sequence[str]
    environment: Mapping[str, str]


class Server(Protocol):
    """The specifics of one kind of server."""

    @property
    def title(self) -> str:
        """The server's name in messages."""
        ...

    @property
    def directory(self) -> Path:
        """The directory of all its files; absolute, without symbolic links."""
        ...

    @property
    def kill_signal(self) -> signal.Signals:
        """The signal that ends it if SIGINT, a clean shutdown for both, does not."""
        ...

    def prepare(self) -> Launch:
        """Create or check its files. Called only while no process of it runs.

        Raises:
            EmbeddedServerError: the existing files cannot be used.
            OSError: the directory cannot be used.
        """
        ...

    def answers(self) -> bool:
        """Whether it accepts connections, by connecting."""
        ...

    def complete(self) -> None:
        """Complete the setup of a server that answers; idempotent."""
        ...

    def pid(self) -> int | None:
        """The process to signal, verified to be this server; `None` if there is none."""
        ...

    def url(self) -> str:
        """The server's address."""
        ...

    def remedy(self, log: str) -> str:
        """What to do about a failed start that left `log`: one sentence."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that answers, kept running by another process."""

    url: str
    pid: int


class Running:
    """A server that this process keeps running until `stop`.

    Attributes:
        url: The server's address.
        pid: Its process id at the time of `start`; another keeper may have restarted it since.
        owned: Whether this process started it, rather than joined it.
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
            EmbeddedServerError: the server outlived `timeout_s` seconds and a kill.
        """
        directory = self._server.directory
        with self._users, explained(self._server.title, directory), _starting(directory):
            if not self._users.try_exclusive():
                return False
            _stop(self._server, timeout_s)
        return True

    def wait(self) -> None:
        """Return once no process of the server is alive."""
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
        server: Which one.
        timeout_s: Seconds until it must answer. After a crash, PostgreSQL first replays its log.

    Raises:
        EmbeddedServerError: the server cannot be started; the message gives the reason and a remedy.
    """
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
        # Reap the child when it ends, even if this block raised: otherwise it stays as a zombie.
        threading.Thread(target=child.wait, name=f"reap-{server.title}", daemon=True).start()
    return Running(server, users, Endpoint(server.url(), pid), owned=child is not None)


def find(server: Server) -> Endpoint | None:
    """The running server of the directory, or `None`. Starts, creates and changes nothing.

    Raises:
        EmbeddedServerError: this account may not read the directory.
    """
    with explained(server.title, server.directory):
        if not _is_alive(server.directory) or not server.answers():
            return None
        pid = server.pid()
    return None if pid is None else Endpoint(server.url(), pid)


def is_process_of(pid: int, program: str, directory: Path) -> bool:
    """Whether process `pid` runs `program` on exactly `directory`, by its command line."""
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
    """Returns the started process, or `None` if a running server was joined. The server answers."""
    deadline = time.monotonic() + timeout_s
    log = server.directory / "server.log"
    log_start = _rotate(log)
    child: subprocess.Popen[bytes] | None = None
    try:
        # The lock comes first: in a copied directory, the recorded address is that of the original's server.
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
    """Start the server; `None` while a process of an earlier one is alive."""
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
    """Wait until no process of the server is alive; returns whether that happened within `timeout_s` seconds."""
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
    """The last lines that were written to `log` after its first `start` bytes."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])


def _rotate(log: Path) -> int:
    """Rotate a long log (one old file is kept; a running server continues to write to it); returns the length."""
    size = log.stat().st_size if log.exists() else 0
    if size <= _LOG_KEPT_BYTES:
        return size
    log.replace(log.with_suffix(".log.1"))
    return 0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, mode=0o600)
