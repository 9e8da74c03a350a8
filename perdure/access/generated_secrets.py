"""Secrets that an installation generates once, in private files under its data directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile


def made_once(path: Path, make: Callable[[], str]) -> str:
    """The text of the file at `path`, without surrounding whitespace.

    If the file does not exist, creates it with mode 0600 and the text that `make` returns. If several processes do this
    at the same time, only one of them creates the file, and all of them return its text.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file is created with mode 0600.
        with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}-") as file:
            file.write(make())
            file.flush()
            with suppress(FileExistsError):
                os.link(file.name, path)
    return path.read_text(encoding="utf-8").strip()
