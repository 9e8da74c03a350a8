"""Secrets that an installation generates once, in private files under its data directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from perdure.errors import SettingsError


def made_once(path: Path, make: Callable[[], str], variable: str) -> str:
    """The text of the file at `path`, without surrounding whitespace. It replaces the unset `variable`.

    If the file does not exist, creates it with mode 0600 and the text that `make` returns. If several processes do this
    at the same time, only one of them creates the file, and all of them return its text.

    Raises:
        SettingsError: the file cannot be created or read, or it is empty. The message names the variable and the file.
    """
    try:
        if not path.exists():
            _create(path, make())
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8"
        raise SettingsError(_unusable(path, variable, why)) from error
    if not text:
        raise SettingsError(_unusable(path, variable, "it is empty"))
    return text


def _create(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file is created with mode 0600.
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}-") as file:
        file.write(text)
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)


def _unusable(path: Path, variable: str, why: str) -> str:
    return (
        f"{variable} is not set, and the file that replaces it, {path.absolute()}, cannot be used: {why}; set "
        f"{variable}, or set PERDURE_DATA_DIR to a directory that this account may write"
    )
