"""A content on its way in: counted and hashed, and beyond its first bytes kept in a temporary file without a name.

So a process holds a few bytes of each content that it takes in, and one that is killed leaves no file behind.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, Self, cast

from perdure.errors import InvalidRequest, TooLarge
from perdure.files.kinds import Kind, kind_of

_IN_MEMORY = 2**20
_DECODED_CHARS = 2**18
"""The characters of Base64 that are decoded at once; a multiple of four."""


class Spool:
    """A content of at most `max_bytes` bytes. A context manager, which removes the temporary file."""

    def __init__(self, max_bytes: int) -> None:
        self.size = 0
        self._max_bytes = max_bytes
        self._hash = hashlib.sha256()
        self._file = cast(BinaryIO, SpooledTemporaryFile(_IN_MEMORY))  # noqa: SIM115 (closed by `__exit__`)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            TooLarge: the content is longer than `max_bytes`.
        """
        self.size += len(piece)
        if self.size > self._max_bytes:
            raise TooLarge(f"The file is longer than {self._max_bytes:,} bytes (PERDURE_FILES__MAX_BYTES).")
        self._hash.update(piece)
        self._file.write(piece)

    def write_base64(self, text: str) -> None:
        """Add the content that `text` encodes, which may be a `data:` URL.

        Raises:
            TooLarge: the content is longer than `max_bytes`.
            InvalidRequest: `text` is no Base64.
        """
        if text.startswith("data:"):
            text = text[text.find(",") + 1 :]
        try:
            for start in range(0, len(text), _DECODED_CHARS):
                self.write(base64.b64decode(text[start : start + _DECODED_CHARS], validate=True))
        except (binascii.Error, ValueError):
            raise InvalidRequest("The data cannot be decoded: accepted: Base64, without line breaks.") from None

    @property
    def sha256(self) -> bytes:
        return self._hash.digest()

    def kind(self, named: str | None = None) -> Kind:
        """What the content is; see `kind_of`.

        Raises:
            InvalidRequest: the content is empty, or `kind_of` raised it.
        """
        if not self.size:
            raise InvalidRequest("The file is empty.")
        return kind_of(self._file, named)

    def pieces(self, size: int) -> Iterator[bytes]:
        """The content in pieces of `size` bytes."""
        self._file.seek(0)
        while piece := self._file.read(size):
            yield piece
