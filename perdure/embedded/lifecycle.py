"""Start, find and stop one embedded server: the same few steps for PostgreSQL and for Redis.

Three locks in the server's directory carry it all, and the kernel gives each of them back:

    start.lock    held while a server is being started or stopped, so that two never race
    server.lock   inherited by the server and all its children: held = some of it lives
    users.lock    shared by every process that started or joined it; the last one out stops it

So the servers outlive a starter that was killed, the next start joins them, and its own stop
then stops them; of two `perdure up` at once, the first to leave stops nothing.
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

_TICK_S = 0.01  # between two looks at a server that has no way to call back
_LOG_KEPT_BYTES = 4 * 2**20
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server's process is started."""

    argv: Sequence[str]
    environment: Mapping[str, str]


class Server(Protocol):
    """What is particular to one kind of server."""

    @property
    def title(self) -> str:
        """What a person calls it."""
        ...

    @property
    def directory(self) -> Path:
        """Where everything of it lives; absolute, free of symbolic links."""
        ...

    @property
    def last_resort(self) -> signal.Signals:
        """The signal that ends it when SIGINT, a clean shutdown for either, does not."""
        ...

    def prepare(self) -> Launch:
        """Make or check its files. Called only while no process of it lives.

        Raises:
            EmbeddedServerError: what is there cannot be used.
            OSError: the directory cannot be used.
        """
        ...

    def answers(self) -> bool:
        """Whether it takes connections now, found out by connecting."""
        ...

    def complete(self) -> None:
        """What a server that answers still lacks before it is handed out; safe to repeat."""
        ...

    def pid(self) -> int | None:
        """The process to signal, proven to be this very server; None if none is."""
        ...

    def url(self) -> str:
        """Where it is reached."""
        ...

    def way_out(self, log: str) -> str:
        """What to do about a failed start that left `log`; a sentence."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that answers, kept up by somebody else."""

    url: str
    pid: int


class Running:
    """A server that this process uses and keeps up, until `stop`.

    Attributes:
        url: Where it is reached.
        pid: Its process at the time of `start`; a keeper may have started it again since.
        owned: Whether this process started it, rather than joined one that was running.
    """

    def __init__(self, server: Server, users: FileLock, endpoint: Endpoint, *, owned: bool) -> None:
        self._server = server
        self._users = users
        self.url = endpoint.url
        self.pid = endpoint.pid
        self.owned = owned

    def stop(self, *, timeout_s: float = 60) -> bool:
        """Stop the server cleanly, unless another process started or joined it too.

        Returns:
            Whether the server is stopped now.

        Raises:
            EmbeddedServerError: it did not end in `timeout_s` seconds, nor when forced to.
        """
        directory = self._server.directory
        with self._users, explained(self._server.title, directory), _starting(directory):
            if not self._users.try_exclusive():
                return False
            _stop(self._server, timeout_s)
        return True

    def wait(self) -> None:
        """Return once no process of the server lives any more."""
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
        timeout_s: Seconds until it must answer. Generous: after a crash, PostgreSQL replays its log first.

    Raises:
        EmbeddedServerError: it cannot be started; the message says why and what to do.
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
        # Whenever it ends, however this process left it: a child that nobody waits for stays as a zombie.
        threading.Thread(target=child.wait, name=f"reap-{server.title}", daemon=True).start()
    return Running(server, users, Endpoint(server.url(), pid), owned=child is not None)


def find(server: Server) -> Endpoint | None:
    """The running server of the directory, or None. Starts, makes and changes nothing.

    Raises:
        EmbeddedServerError: this account may not look.
    """
    with explained(server.title, server.directory):
        if not _lives(server.directory) or not server.answers():
            return None
        pid = server.pid()
    return None if pid is None else Endpoint(server.url(), pid)


def proven(pid: int, program: str, directory: Path) -> bool:
    """Whether process `pid` runs `program` on exactly `directory`, by the command line that `start` gave it."""
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
    """Return the process that was launched, None if a running server was joined. It answers."""
    deadline = time.monotonic() + timeout_s
    log = server.directory / "server.log"
    log_start = _make_room(log)
    child: subprocess.Popen[bytes] | None = None
    try:
        # Its own lock first: in a copied directory, what is written down leads to the original's server.
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
    """Start the server, or return None while something of an earlier one still lives."""
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
                start_new_session=True,  # a Ctrl-C is for the application, which must drain first
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
    """Wait until no process of the server lives; whether that came true in `timeout_s` seconds."""
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
    """The last lines that were written to `log` since it was `start` bytes long."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])


def _make_room(log: Path) -> int:
    """Set a long log aside (one is kept; a server that is running goes on writing to it); return the length."""
    size = log.stat().st_size if log.exists() else 0
    if size <= _LOG_KEPT_BYTES:
        return size
    log.replace(log.with_suffix(".log.1"))
    return 0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, mode=0o600)
