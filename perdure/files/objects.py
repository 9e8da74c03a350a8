"""Contents in a directory or a bucket, through fsspec. The name of an object is the id of its content.

An object is written after its row, which no file can have until then, and deleted before its row. So no process that is
killed leaves an object without a row, by which `Files.collect` deletes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from perdure.errors import ProviderError, SettingsError
from perdure.text.untrusted import error_summary

_PIECE = 2**20


def check(url: str) -> None:
    """Check that objects can be stored under `url`. Opens no connection.

    Raises:
        SettingsError: fsspec, or its package for this kind of URL, is not installed.
    """
    try:
        import_module("fsspec").core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SettingsError(
            f"PERDURE_FILES__URL (its value is not shown): {error_summary(error)}; accepted: a URL of fsspec, such as "
            "file:///var/lib/perdure/files (pip install 'perdure[files]') or s3://bucket/perdure (also s3fs)"
        ) from None


def write(url: str, pieces: Iterator[bytes]) -> None:
    """Write an object.

    Raises:
        ProviderError: the object cannot be written.
    """
    with _Failing("written"):
        filesystem, path = _filesystem(url)
        filesystem.makedirs(filesystem._parent(path), exist_ok=True)  # noqa: SLF001 (as fsspec's own commands do)
        with filesystem.open(path, "wb") as file:
            for piece in pieces:
                file.write(piece)


def read(url: str, start: int, end: int | None) -> bytes:
    """The bytes of an object from `start` up to `end`.

    Raises:
        ProviderError: the object cannot be read.
    """
    with _Failing("read"):
        filesystem, path = _filesystem(url)
        found: bytes = filesystem.cat_file(path, start=start, end=end)
        return found


def delete(url: str) -> None:
    """Delete an object, if it exists.

    Raises:
        ProviderError: the object cannot be deleted now.
    """
    with _Failing("deleted"):
        filesystem, path = _filesystem(url)
        try:
            filesystem.rm_file(path)
        except FileNotFoundError:
            return


def _filesystem(url: str) -> tuple[Any, str]:
    found: tuple[Any, str] = import_module("fsspec").core.url_to_fs(url)
    return found


class _Failing:
    """Maps the errors of a file system, whatever it is, to `ProviderError`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise ProviderError(
                f"A file cannot be {self._what} where PERDURE_FILES__URL says.", transient=True
            ) from error
