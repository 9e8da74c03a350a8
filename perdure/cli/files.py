"""Reads files that may contain invalid UTF-8, and writes files atomically, for commands."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from perdure.cli.errors import Failure

STDIO = Path("-")
"""The path that denotes stdin or stdout."""


def write_whole(file: Path, text: str | Iterable[str]) -> None:
    """Write a temporary file and rename it, so that a reader of `file` sees the old content or the complete new one."""
    file = file.resolve()
    parts = [text] if isinstance(text, str) else text
    try:
        if file.exists() and not file.is_file():  # a pipe or a device is written to, not replaced
            with file.open("w", encoding="utf-8") as stream:
                stream.writelines(parts)
            return
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as temporary:
                temporary.writelines(parts)
                temporary.flush()
                os.fsync(temporary.fileno())
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Failure(f"{file} cannot be written: {error.strerror}.") from error


@contextmanager
def opened(file: Path) -> Iterator[TextIO]:
    """Open a file for reading; `STDIO` denotes stdin. Bytes that are not UTF-8 become U+FFFD.

    A byte order mark is skipped.
    """
    if file == STDIO:
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace")  # type: ignore[union-attr]  # stdin is a text stream
        yield sys.stdin
        return
    try:
        with file.open(encoding="utf-8-sig", errors="replace", newline="\n") as lines:
            yield lines
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror}.") from error


@contextmanager
def opened_bytes(file: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes; `STDIO` denotes stdin."""
    if file == STDIO:
        yield sys.stdin.buffer
        return
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror}.") from error
