"""The error that the functions for embedded servers raise, and its messages.

Each message names the server, the directory, `PERDURE_DATA_DIR` and a remedy.
"""

from __future__ import annotations

import errno
import getpass
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class EmbeddedServerError(Exception):
    """An embedded server cannot be started, found or stopped; the message gives the reason and a remedy."""


@contextmanager
def explained(server: str, directory: Path) -> Iterator[None]:
    """Convert an `OSError` from the block to an `EmbeddedServerError` whose message gives a remedy.

    Raises:
        EmbeddedServerError: the block raised an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise EmbeddedServerError(_message(server, directory, error)) from error


def disk_full(server: str, directory: Path) -> str:
    """The error message for a full disk under `directory`; it gives the disk's free space."""
    try:
        free = f"{shutil.disk_usage(_existing(directory)).free / 2**20:.1f} MiB are free"
    except OSError:
        free = "the free space is unknown"
    return (
        f"the embedded {server} cannot write to {directory}: the disk is full ({free}). "
        "Make room, or set PERDURE_DATA_DIR to a directory on another disk."
    )


def _message(server: str, directory: Path, error: OSError) -> str:
    if error.errno in _DISK_FULL:
        return disk_full(server, directory)
    where = error.filename or directory
    if error.errno in _NOT_WRITABLE:
        return (
            f"the embedded {server} needs {directory}, but {_account()} may not use {where} ({error.strerror}). "
            "Set PERDURE_DATA_DIR to a directory that this account may write, or run as the account that made it."
        )
    return (
        f"the embedded {server} cannot use {directory}: {error.strerror or error} ({where}). "
        "Set PERDURE_DATA_DIR to a directory on a local disk."
    )


def _existing(path: Path) -> Path:
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _account() -> str:
    try:
        return f"the account {getpass.getuser()!r}"
    except (KeyError, OSError):
        return f"user id {os.geteuid()}"
