"""The files in a prompt: each message with files describes them, and has those that the model reads.

The files of the present turn are sent first, then those of the newest turns, as far as they fit: `budget_files` tokens
by their estimates, and `PERDURE_FILES__PROMPT_BYTES`. The text of a text file is part of the message's text. A tool's
result names the files that the tool returned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.errors import NotFound
from perdure.files.kinds import TEXTS, kind_of
from perdure.files.parts import TEXT_CHARS, describe, tokens
from perdure.files.results import named_in
from perdure.files.store import Files
from perdure.models.protocol import Attachment, Message, Role
from perdure.text.untrusted import cut, storable
from perdure.turns.transcript import Entry

_GONE = "it is no longer stored"
_LEFT_OUT = "its content is not shown here"
_END = "[end of the file]"


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What of the files a prompt has: types in `media_types`, within `tokens` and `size` bytes.

    `is_strict`: the files of the present turn count towards `tokens`, too. `naming`: the roles whose texts name files.
    """

    media_types: Collection[str]
    tokens: int
    size: int
    is_strict: bool = False
    naming: Collection[Role] = (Role.TOOL,)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A file in an entry: its record, or its row and the end of the line by which a tool's result names it."""

    file_id: UUID
    row: Row[Any] | None
    part: Mapping[str, Any] | None = None
    end: int = 0

    @property
    def tokens(self) -> int:
        row = self.row
        if self.part is not None or row is None:
            return int((self.part or {}).get("tokens", 0))
        return tokens(row.media_type, row.size, row.width, row.height, row.pages)


def attached_tokens(attached: Attachment) -> int:
    """An estimate of the tokens of a file that is sent to a model."""
    kind = kind_of(BytesIO(attached.data), attached.media_type)
    return tokens(attached.media_type, len(attached.data), kind.width, kind.height, kind.pages)


def messages_by_entry(
    earlier: Sequence[Entry], present: Sequence[Entry], files: Files, limits: FileLimits, user: UserKey
) -> list[tuple[Message, ...]]:
    """For each entry of earlier turns and of the present one, its messages in a prompt of `user`.

    Runs no statement if no entry has a file.

    Raises:
        ProviderError: an object cannot be read.
        Unavailable: the database cannot be reached.
    """
    entries = [*earlier, *present]
    results = [entry for entry in entries if entry.role in limits.naming and "; file " in entry.content]
    named = {id(entry): named_in(entry.content) for entry in results}
    wanted = [UUID(part["file_id"]) for entry in entries for part in entry.parts]
    if not wanted and not results:
        return [entry.messages for entry in entries]
    rows = files.rows([*wanted, *(file_id for found in named.values() for file_id, _ in found)])
    rows = {file_id: row for file_id, row in rows.items() if row.user_id == user}
    placed = [
        [
            *(_Placed(UUID(part["file_id"]), rows.get(UUID(part["file_id"])), part) for part in entry.parts),
            *(_Placed(file_id, rows.get(file_id), end=end) for file_id, end in named.get(id(entry), ())),
        ]
        for entry in entries
    ]
    sent = _chosen(placed, limits, len(earlier))
    return [_message(*each, files, sent) for each in zip(entries, placed, strict=True)]


def files_of_results(rendered: Iterable[Message]) -> dict[UUID, bytes]:
    """The files of tools' results and of replies that are sent, from what `messages_by_entry` returned."""
    return {
        file_id: attached.data
        for message in rendered
        if message.role is not Role.USER and message.files
        for file_id, end in named_in(message.content)
        for attached in message.files
        if attached.end == end
    }


def _chosen(placed: Sequence[Sequence[_Placed]], limits: FileLimits, earlier: int) -> set[UUID]:
    """The files to send, the newest first, up to the first one that does not fit.

    The files of `earlier` entries, which are of earlier turns, come first.
    """
    chosen, spent, size = set[UUID](), 0, 0
    for number, found in reversed(list(enumerate(placed))):
        is_free = number >= earlier and not limits.is_strict
        for each in reversed(found):
            row = each.row
            if row is None or row.media_type not in limits.media_types or each.file_id in chosen:
                continue
            size += row.size
            spent += 0 if is_free else each.tokens
            if size > limits.size or spent > limits.tokens:
                return chosen
            chosen.add(each.file_id)
    return chosen


def _message(entry: Entry, placed: Sequence[_Placed], files: Files, sent: Collection[UUID]) -> tuple[Message, ...]:
    """The message with a description of each file in its place, and the files in `sent`."""
    if not placed:
        return entry.messages
    message = entry.message
    text, at, attached = "", 0, list[Attachment]()
    for each in placed:
        row, part = each.row, each.part
        data = _data(files, row) if row is not None and each.file_id in sent else None
        start = end = each.end
        if part is not None:
            text = _appended(text, message.content[at : part["at"]])
            at = part["at"]
            described = describe(part) if data is not None else _described(part, files, row)
            text = _appended(text, described)
            start, end = len(text) - len(described), len(text)
        if row is not None and data is not None:
            attached.append(Attachment(row.media_type, row.name, start, end, data))
    content = _appended(text, message.content[at:]) if entry.parts else message.content
    return (replace(message, content=content, files=tuple(attached)),)


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
