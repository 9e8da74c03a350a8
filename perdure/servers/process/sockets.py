"""Chooses the directory of a server's unix socket: next to the server's data, or a temporary one with a short path.

A socket's path is limited to about 107 bytes, and some file systems do not support sockets. The path also becomes part
of URLs, and libraries differ in how they parse quoted characters in URLs. `settle` chooses the directory `run`, next to
the data, if a socket can be bound there and the socket's path needs no quoting. Otherwise it chooses a private
directory under the system's temporary directory. The file `socket-directory` records the choice for other processes.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from perdure.servers.errors import EmbeddedServerError
from perdure.servers.process.account import Account
from perdure.text.patterns import compiled

_MADE_FOR = "made-for"
_PLAIN = compiled(r"[A-Za-z0-9/._+-]+")


def settle(home: Path, name: str, account: Account | None) -> Path:
    """Choose, create and record the directory of the socket `name`. Call this only while no server of `home` runs.

    Returns:
        The absolute path of the directory. It has mode 0700, and its owner is `account`, or the caller if `account` is
        `None`.

    Raises:
        EmbeddedServerError: no socket can be bound in `run` or in a temporary directory.
        OSError: a directory cannot be created.
    """
    near = home / "run"
    near.mkdir(mode=0o700, exist_ok=True)
    owner = os.geteuid() if account is None else account.uid
    chosen = near if _can_bind(near, name) else _temporary_directory(home, name, owner)
    if account is not None:
        os.chown(chosen, account.uid, account.gid, follow_symlinks=False)
    _record(home).write_text(f"{chosen}\n", encoding="utf-8")
    return chosen


def recorded(home: Path) -> Path | None:
    try:
        return Path(_record(home).read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        return None


def discard(home: Path) -> None:
    """Remove the temporary socket directory of `home`, if any. Call this only while no server of `home` runs."""
    made = recorded(home)
    if made is not None and made != home / "run" and made.exists() and _was_made_for(home, made, made.lstat().st_uid):
        shutil.rmtree(made)


def _record(home: Path) -> Path:
    return home / "socket-directory"


def _temporary_directory(home: Path, name: str, owner: int) -> Path:
    before = recorded(home)
    if before is not None and _was_made_for(home, before, owner) and _can_bind(before, name):
        return before
    made = Path(tempfile.mkdtemp(prefix="perdure-"))
    if _can_bind(made, name):
        (made / _MADE_FOR).write_text(str(home), encoding="utf-8")
        return made
    made.rmdir()
    raise EmbeddedServerError(
        f"no unix socket can be made in {home / 'run'} nor in {made.parent}: the paths are too long, or those file "
        "systems hold no sockets. Set PERDURE_DATA_DIR or TMPDIR to a short path on a local disk."
    )


def _was_made_for(home: Path, directory: Path, owner: int) -> bool:
    """Whether `directory` is the one that `_temporary_directory` created for `home`.

    After a cleanup of `/tmp`, any account can create a directory with the same name. If `home` is a copy of another
    directory, its record names the original's socket directory. The original's server may still use that directory.
    """
    try:
        entry = directory.lstat()
        private = stat.S_ISDIR(entry.st_mode) and entry.st_uid == owner and stat.S_IMODE(entry.st_mode) == stat.S_IRWXU
        return private and (directory / _MADE_FOR).read_text(encoding="utf-8") == str(home)
    except FileNotFoundError:
        return False


def _can_bind(directory: Path, name: str) -> bool:
    """Try to bind a socket `name` in `directory`; returns whether it succeeds. Removes the socket of a dead server."""
    path = directory / name
    if not _PLAIN.fullmatch(str(path)):
        return False
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(str(path))
        except OSError:
            return False
    path.unlink()
    return True
