"""File locks that the kernel releases when their holder dies.

A `flock` belongs to the open file description, so a child that inherits the descriptor holds the lock as well. The
kernel releases the lock when the last process that holds it has ended. `lifecycle` uses such a lock to check whether an
embedded server is alive.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


class FileLock:
    """A lock on the file at `path`. If `create` is true, a missing file is created with mode 0600.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self._descriptor: int | None = os.open(path, flags, 0o600)

    @property
    def descriptor(self) -> int:
        """The file descriptor, for a child process to inherit."""
        if self._descriptor is None:
            raise ValueError("the lock's file is closed")
        return self._descriptor

    def exclusive(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def shared(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        """Acquire the exclusive lock unless another process holds the lock; returns whether it was acquired."""
        return self._try(fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        return self._try(fcntl.LOCK_SH)

    def close(self) -> None:
        """Close the file. This releases the lock, unless a running child process has inherited the descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
