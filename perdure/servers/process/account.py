"""Chooses an unprivileged account for PostgreSQL when root runs perdure.

PostgreSQL refuses to run as root. It runs as the owner of its data instead. For new data, and for data that root owns,
it runs as the account `postgres`, or as `nobody` if `postgres` is missing.

This account may be unable to enter the data's parent directories, for example `/root` (mode 0700). perdure never
changes the permissions of parent directories. Instead it gives the server a capability to enter them:
CAP_DAC_READ_SEARCH, or CAP_DAC_OVERRIDE if a container withholds the former. The module `embedded.postgres` restricts
who may connect to such a server. The module `programs` handles an account that cannot reach PostgreSQL's programs.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from perdure.servers.errors import EmbeddedServerError

_PREFERRED = ("postgres", "nobody")
_CAP_DAC_OVERRIDE = 1
_CAP_DAC_READ_SEARCH = 2


@dataclass(frozen=True, slots=True)
class Account:
    """An account of this machine."""

    name: str
    uid: int
    gid: int


def borrowed(data: Path) -> Account | None:
    """The account to run the server of `data` as; `None` unless this process is root.

    Raises:
        EmbeddedServerError: this process is root, and the machine has no suitable account.
    """
    if os.geteuid() != 0:
        return None
    owner = data.stat() if data.exists() else None
    if owner is not None and owner.st_uid != 0:
        return Account(name_of(owner.st_uid), owner.st_uid, owner.st_gid)
    for name in _PREFERRED:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedServerError(
        "PostgreSQL refuses to run as root and this machine has neither an account 'postgres' nor 'nobody' to run it "
        "as: add one, start perdure as an ordinary user, or set PERDURE_DATABASE_URL."
    )


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def capability_to_reach(paths: Iterable[Path], account: Account) -> int | None:
    """The number of the Linux capability that lets `account` enter `paths` and all of their parent directories.

    `None` if `account` needs no capability.

    Raises:
        EmbeddedServerError: `account` needs a capability that this process does not have.
    """
    blocked = next((found for path in paths if (found := obstacle(path, account)) is not None), None)
    if blocked is None:
        return None
    held = _held_capabilities()
    for capability in (_CAP_DAC_READ_SEARCH, _CAP_DAC_OVERRIDE):
        if held & (1 << capability):
            return capability
    raise EmbeddedServerError(
        f"PostgreSQL refuses to run as root, so it runs as the account {account.name!r}, which may not enter "
        f"{blocked}. Set PERDURE_DATA_DIR to a directory that every account may enter, such as under /srv or /opt; "
        "or start perdure as an ordinary user; or set PERDURE_DATABASE_URL."
    )


def obstacle(path: Path, account: Account) -> Path | None:
    return next((part for part in (*reversed(path.parents), path) if not _searchable(part, account)), None)


def _searchable(directory: Path, account: Account) -> bool:
    entry = directory.stat()
    if entry.st_uid == account.uid:
        return bool(entry.st_mode & stat.S_IXUSR)
    if entry.st_gid == account.gid:
        return bool(entry.st_mode & stat.S_IXGRP)
    return bool(entry.st_mode & stat.S_IXOTH)


def _held_capabilities() -> int:
    """The permitted capabilities of this process, as a bit mask; 0 on systems without capabilities."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapPrm:")), 0)
