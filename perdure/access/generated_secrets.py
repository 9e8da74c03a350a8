"""Secrets that an installation makes for itself, once, in private files under its data directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile


def made_once(path: Path, make: Callable[[], str]) -> str:
    """The text of the file at `path`; if it does not exist, `make` makes it. Of two concurrent processes, one makes it.

    The file's mode is 0600.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-") as file:  # created with mode 0600
            file.write(make())
            file.flush()
            with suppress(FileExistsError):
                os.link(file.name, path)
    return path.read_text(encoding="utf-8").strip()
