"""File locks that the kernel releases when their holder dies.

`flock` belongs to the open file, not to the process: a child that inherits the descriptor holds the lock, too, and it
is free when the last of them has ended. The embedded servers' liveness depends on that.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


class FileLock:
    """A lock on a file, which is created if necessary, readable by its owner only.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self._descriptor: int | None = os.open(path, flags, 0o600)

    @property
    def descriptor(self) -> int:
        """The open file, for a child process to inherit."""
        if self._descriptor is None:
            raise ValueError("the lock's file is closed")
        return self._descriptor

    def exclusive(self) -> None:
        """Wait until no other holder has the lock, and take it exclusively."""
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def shared(self) -> None:
        """Wait until no holder has the lock exclusively, and share it."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        """Take the lock exclusively if no other holder has it; returns whether it was taken."""
        return self._try(fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        """Share the lock unless a holder has it exclusively; returns whether it was taken."""
        return self._try(fcntl.LOCK_SH)

    def close(self) -> None:
        """Close the file. The lock stays with processes that inherited it; otherwise it is free."""
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
