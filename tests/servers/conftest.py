"""Fixtures that run Python programs as processes and create directories for embedded servers."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from perdure.servers import postgres
from perdure.servers.process import account, launch

_ROOT = Path(__file__).resolve().parents[2]
_DEADLINE_S = 30.0


class Program:
    """A running Python program. A thread reads its output line by line."""

    def __init__(self, source: str, *arguments: str | Path, user: account.Account | None = None) -> None:
        argv = [sys.executable, "-c", source, *map(str, arguments)]
        if user is not None:
            python = Path(sys.executable).resolve().parent
            needed = account.capability_to_reach((Path(sys.prefix).resolve(), python, _ROOT), user)
            argv = launch.command(argv, user=(user.uid, user.gid), capability=needed)
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
        )
        self.lines: list[str] = []
        self._queue: SimpleQueue[str | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def until(self, text: str) -> str:
        """The next line that contains `text`. Fails if the output ends or pauses for `_DEADLINE_S` seconds."""
        while True:
            try:
                line = self._queue.get(timeout=_DEADLINE_S)
            except Empty:
                line = None
            if line is None:
                pytest.fail(f"no line with {text!r} in:\n" + "\n".join(self.lines))
            self.lines.append(line)
            if text in line:
                return line

    def send_line(self) -> None:
        """Send a line of input to a program that waits for it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ends(self) -> int:
        """Wait for the process to end; returns its exit status. `lines` then contains all lines of its output."""
        status = self.process.wait(_DEADLINE_S)
        self._reader.join(_DEADLINE_S)
        while (line := self._queue.get(timeout=_DEADLINE_S)) is not None:
            self.lines.append(line)
        self._queue.put(None)
        return status

    def close(self) -> None:
        """Kill the program if it still runs."""
        self.process.kill()
        self.process.wait()
        self._reader.join(_DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    """A function that starts a Python program, which is killed after the test."""
    started: list[Program] = []

    def start(source: str, *arguments: str | Path, user: account.Account | None = None) -> Program:
        started.append(Program(source, *arguments, user=user))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture(scope="session")
def made_cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialised PostgreSQL directory. Tests start servers only in copies of it (see `cluster`)."""
    directory = tmp_path_factory.mktemp("made") / "postgres"
    postgres.start(directory).stop()
    return directory


@pytest.fixture
def cluster(made_cluster: Path, tmp_path: Path) -> Path:
    """An initialised PostgreSQL directory for one test: a copy, because copying is faster than `initdb`."""
    subprocess.run(["cp", "-a", made_cluster, tmp_path / "postgres"], check=True)
    return tmp_path / "postgres"


@pytest.fixture
def nobody() -> account.Account:
    """The unprivileged account `nobody`. Skips the test unless the test runs as root."""
    if os.geteuid() != 0:
        pytest.skip("needs root; for an ordinary user, the other tests cover this")
    entry = pwd.getpwnam("nobody")
    return account.Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A temporary directory that every account may enter, unlike pytest's `tmp_path`."""
    directory = Path(tempfile.mkdtemp(prefix="perdure-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 24 MiB, which is too small for a PostgreSQL cluster."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=755", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield mount
    subprocess.run(["umount", mount], check=True)
