"""The files in a prompt: each message with files describes them, and has those that the model reads.

The files of the present turn are sent first, then those of the newest turns, as far as they fit: `budget_files` tokens
by their estimates, and `PERDURE_FILES__PROMPT_BYTES`. The text of a text file is part of the message's text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.errors import NotFound
from perdure.files.kinds import TEXTS
from perdure.files.parts import TEXT_CHARS, describe
from perdure.files.store import Files
from perdure.models.protocol import Attachment, Message
from perdure.text.untrusted import cut, storable
from perdure.turns.transcript import Entry

_GONE = "it is no longer stored"
_LEFT_OUT = "its content is not shown here"
_END = "[end of the file]"


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What of the files a prompt has: types in `media_types`, within `tokens` and `size` bytes.

    `is_strict`: the files of the present turn count towards `tokens`, too.
    """

    media_types: Collection[str]
    tokens: int
    size: int
    is_strict: bool = False


def messages(entries: Sequence[Entry], files: Files, limits: FileLimits, present: UUID) -> list[Message]:
    """The messages of a prompt. Runs no statement if no entry has a file.

    Raises:
        ProviderError: an object cannot be read.
        Unavailable: the database cannot be reached.
    """
    rows = files.rows(UUID(part["file_id"]) for entry in entries for part in entry.parts)
    sent = _chosen(entries, rows, limits, present)
    return [_message(entry, files, rows, sent) if entry.parts else entry.message() for entry in entries]


def _chosen(
    entries: Sequence[Entry], rows: Mapping[UUID, Row[Any]], limits: FileLimits, present: UUID
) -> dict[UUID, Row[Any]]:
    """The files to send, the newest first, up to the first one that does not fit."""
    chosen, tokens, size = dict[UUID, Row[Any]](), 0, 0
    for entry in reversed(entries):
        is_free = entry.turn_id == present and not limits.is_strict
        for part in reversed(entry.parts):
            row = rows.get(UUID(part["file_id"]))
            if row is None or row.media_type not in limits.media_types or row.file_id in chosen:
                continue
            size += row.size
            tokens += 0 if is_free else part["tokens"]
            if size > limits.size or tokens > limits.tokens:
                return chosen
            chosen[row.file_id] = row
    return chosen


def _message(entry: Entry, files: Files, rows: Mapping[UUID, Row[Any]], sent: Mapping[UUID, Row[Any]]) -> Message:
    """The message with a description of each file in its place, and the files in `sent`."""
    message, text, at, attached = entry.message(), "", 0, list[Attachment]()
    for part in entry.parts:
        text = _appended(text, message.content[at : part["at"]])
        at = part["at"]
        row = rows.get(UUID(part["file_id"]))
        data = None if row is None or row.file_id not in sent else _data(files, row)
        described = _described(part, files, row) if data is None else describe(part)
        text = _appended(text, described)
        if row is not None and data is not None:
            attached.append(Attachment(row.media_type, part.get("name"), len(text) - len(described), len(text), data))
    return replace(message, content=_appended(text, message.content[at:]), files=tuple(attached))


def _appended(text: str, more: str) -> str:
    more = more.strip("\n")
    return f"{text}\n{more}" if text and more else text or more


def _data(files: Files, row: Row[Any]) -> bytes | None:
    try:
        return files.read(row)
    except NotFound:  # deleted after its row was read
        return None


def _described(part: Mapping[str, Any], files: Files, row: Row[Any] | None) -> str:
    if row is None:
        return describe(part, _GONE)
    if not row.media_type.startswith(TEXTS):
        return describe(part, _LEFT_OUT)
    try:
        text = files.read(row, most=4 * TEXT_CHARS).decode(errors="replace")
    except NotFound:
        return describe(part, _GONE)
    return f"{describe(part)}\n{cut(storable(text), TEXT_CHARS)}\n{_END}"
