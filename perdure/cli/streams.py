"""Makes the standard streams usable for commands, whatever streams and encoding the caller has chosen."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

_STDERR = 2
_NOTHING = Path(os.devnull)


def prepare() -> None:
    """Replace closed streams by the null device, and print escapes for what the encoding of stdout lacks.

    A closed stream is `None` in `sys`. Its number would be that of the next socket, and libraries in C, which write to
    stderr by its number, would write to the socket.
    """
    while (number := os.open(_NOTHING, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)  # noqa: FBT003 (positional only)
    os.close(number)
    sys.stdin = sys.stdin or _NOTHING.open(encoding="utf-8")
    sys.stdout = sys.stdout or _NOTHING.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or _NOTHING.open("w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
