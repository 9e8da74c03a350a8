"""The text of long JSON documents in chunks, so that no process holds a whole document."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

_CHUNK_CHARS = 2**17


def json_list(pages: Iterable[Iterable[Any]]) -> Iterator[str]:
    """The text of one JSON list with the items of all pages, a piece per item."""
    separator = "["
    for page in pages:
        for item in page:
            yield separator + json.dumps(item, ensure_ascii=False)
            separator = ", "
    yield "[]" if separator == "[" else "]"


def joined(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces, joined to chunks of at least 128 Ki characters; the last chunk may be shorter."""
    waiting: list[str] = []
    length = 0
    for piece in pieces:
        waiting.append(piece)
        length += len(piece)
        if length >= _CHUNK_CHARS:
            yield "".join(waiting)
            waiting, length = [], 0
    if waiting:
        yield "".join(waiting)
