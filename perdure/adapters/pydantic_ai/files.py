"""Files that tools of adapted agents return (`BinaryContent`, `ImageUrl` and `DocumentUrl`), and files of models.

Each is stored as a file of the user, like a `perdure.File` (`files.results`), when its tool returns; a URL is read
then, so what the model is sent later never changes. The row of the call's result names the files in its text. What
pydantic-ai writes to JSON has, in place of the bytes, a reference:

    {"kind": "perdure-file", "file_id": …, "description": LINE, and the members of the `BinaryContent` but `data`}

A file that a model makes (`FilePart`, or the sound of a `SpeechPart`), and one in an output, is stored before its reply
is committed. The text of the reply names it. In place of one that is refused stands a line that says why.

These names are stored data: a test pins them. A model request has the bytes of the files that fit into the prompt, and
the descriptions of the others.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from typing import Any
from uuid import UUID

from pydantic_ai.messages import BinaryContent

from perdure.access.tenants import UserKey
from perdure.database.engine import as_json
from perdure.errors import InvalidRequest, NotFound, RateLimited, TooLarge, loggable
from perdure.files.kinds import IMAGES, PDF
from perdure.files.parts import describe
from perdure.files.results import File, named_in
from perdure.files.store import Call, Files
from perdure.text.untrusted import first_line

log = logging.getLogger(__name__)

STORED = "perdure-file"

_BINARY = "binary"
_MEMBERS = {"file": "content", "speech": "audio"}
"""The kinds of parts of a reply that have a file, with the member that is the file."""

_URLS = {"image-url": IMAGES, "document-url": (PDF,)}
"""The kinds of URLs that are read, with the types of the files that they may lead to."""


class ResultFiles:
    """The files in the results of a turn's tools, in its replies and its output. Threads of calls may share it."""

    def __init__(self, files: Files, user: UserKey, session_id: UUID) -> None:
        self._files = files
        self._user = user
        self._session_id = session_id
        self._stored: dict[bytes, Any] = {}
        """The references, by the hash of the bytes. Of a file of a reply that was refused, a line."""

    def take(self, payload: dict[str, Any], effect_id: UUID) -> tuple[dict[str, Any], dict[str, Any]]:
        """Store the files of a `CallToolResult`, given as JSON values.

        Returns it with the bytes of all files, those at URLs included, and with references to them. A URL that cannot
        be read stays one.

        Raises:
            PerdureError: a file cannot be stored.
        """
        stored: dict[bytes, dict[str, Any]] = {}
        taken = _replaced(payload, partial(self._taken, effect_id=effect_id, stored=stored))
        self._stored.update(stored)
        return taken, _replaced(taken, partial(_reference, stored))

    def _taken(self, item: Mapping[str, Any], effect_id: UUID, stored: dict[bytes, dict[str, Any]]) -> Any:
        found = self._read(item) if item["kind"] in _URLS else item
        data = None if found is None else _data_of(found)
        if found is None or data is None:
            return item
        item, name = found, found.get("identifier")
        if name == BinaryContent(data, media_type=item["media_type"]).identifier:
            name = None  # pydantic-ai made it of the data
        stored[sha256(data).digest()] = self._attached(item, File(data, name, item["media_type"]), effect_id)
        return item

    def _attached(self, item: Mapping[str, Any], file: File, maker_id: UUID) -> dict[str, Any]:
        """Store a file; returns its reference. `maker_id`: of the call, or of the turn whose reply has it.

        Raises:
            PerdureError: it cannot be stored.
        """
        line = self._files.attach(self._user, Call(maker_id, self._session_id), file)
        [(file_id, _)] = named_in(line)
        kept = {member: value for member, value in item.items() if member != "data"}
        return {**kept, "kind": STORED, "file_id": str(file_id), "description": line}

    def take_reply(self, record: Mapping[str, Any], turn_id: UUID) -> dict[str, Any]:
        """Store the files of a reply, given as JSON values; returns it with references to them.

        Raises:
            PerdureError: a file cannot be stored now.
        """
        parts = [
            {**part, **{name: self.take_made(content, turn_id) for name, content in _made_in(part).items()}}
            for part in record["parts"]
        ]
        return {**record, "parts": parts}

    def take_made(self, value: Any, turn_id: UUID) -> Any:
        """Store the files in JSON values that a reply or an output of the turn has; returns them with references.

        A line stands for a file that is refused.

        Raises:
            PerdureError: a file cannot be stored now.
        """
        return _replaced(value, partial(self._made, turn_id=turn_id))

    def _made(self, item: Mapping[str, Any], turn_id: UUID) -> Any:
        if (data := _data_of(item)) is None:
            return item
        digest = sha256(data).digest()
        if digest not in self._stored:
            try:
                self._stored[digest] = self._attached(item, File(data, None, item["media_type"]), turn_id)
            except (InvalidRequest, TooLarge) as error:
                log.warning("turn %s: a file that its model made is not stored: %s", turn_id, loggable(error))
                kind = "image" if item["media_type"] in IMAGES else "file"
                known = {"type": kind, "media_type": first_line(item["media_type"], 100), "size": len(data)}
                self._stored[digest] = describe(known, f"it was not stored: {error.message}")
        return self._stored[digest]

    def _read(self, item: Mapping[str, Any]) -> dict[str, Any] | None:
        """The file at a URL, as a binary item; `None` if it cannot be read, or is of another kind."""
        if not isinstance(item.get("url"), str):
            return None
        try:
            with self._files.spool() as content:
                self._files.fetching.fetch(item["url"], self._user, content)
                media_type = content.kind(item.get("media_type")).media_type
                data = b"".join(content.pieces(2**20))
        except (InvalidRequest, TooLarge, RateLimited) as error:
            log.info("a file that a tool returned stays a URL: %s", loggable(error))
            return None
        if media_type not in _URLS[item["kind"]]:
            return None
        kept = {member: item.get(member) for member in ("vendor_metadata", "identifier")}
        return {"kind": _BINARY, "data": base64.urlsafe_b64encode(data).decode(), "media_type": media_type, **kept}

    def referring(self, value: Any) -> Any:
        """JSON values with references in place of the bytes of the files that are stored."""
        return _replaced(value, partial(_reference, self._stored))

    def restored(self, value: Any) -> Any:
        """JSON values of a call's recorded result with the bytes of its files."""
        return filled(value, self._data)

    def _data(self, reference: Mapping[str, Any]) -> bytes | None:
        row = self._files.rows([file_id := UUID(reference["file_id"])]).get(file_id)
        if row is None or row.user_id != self._user:
            return None
        try:
            data = self._files.read(row)
        except NotFound:  # deleted in between
            return None
        self._stored[sha256(data).digest()] = dict(reference)
        return data


def lines_of(record: Mapping[str, Any]) -> list[str]:
    """The lines about the files of a reply's record."""
    contents = [content for part in record["parts"] for content in _made_in(part).values()]
    lines = [each["description"] if is_reference(each) else each for each in contents]
    return [each for each in lines if isinstance(each, str)]


def with_texts(message: Any) -> Any:
    """The JSON of a message in which a text stands for each file of a reply that is only described."""
    if not isinstance(message, dict) or message.get("kind") != "response":
        return message
    return {**message, "parts": [_with_text(part) for part in message.get("parts", ())]}


def _with_text(part: dict[str, Any]) -> dict[str, Any]:
    found = {name: content for name, content in _made_in(part).items() if isinstance(content, str)}
    if part.get("transcript"):  # speech without its sound
        return {**part, **dict.fromkeys(found)}
    return next(({"part_kind": "text", "content": content} for content in found.values()), part)


def _made_in(part: Mapping[str, Any]) -> dict[str, Any]:
    """The file of a part of a reply, by the name of its member; empty for other parts."""
    name = _MEMBERS.get(part.get("part_kind", ""))
    return {name: part[name]} if name is not None and part.get(name) is not None else {}


def described(value: Any) -> Any:
    """JSON values with the descriptions of the files that they refer to. A list of files and texts becomes a text."""
    found = filled(value, lambda _: None)
    if isinstance(value, list) and any(is_reference(each) for each in value):
        return "\n".join(each if isinstance(each, str) else as_json(each) for each in found)
    return found


def filled(value: Any, data: Callable[[Mapping[str, Any]], bytes | None]) -> Any:
    """JSON values with the bytes of the files that they refer to. `data` returns `None` for those to describe."""

    def binary(item: Mapping[str, Any]) -> Any:
        if not is_reference(item):
            return item
        found = data(item)
        if found is None:
            return item["description"]
        members = {member: value for member, value in item.items() if member not in {"file_id", "description"}}
        return {**members, "kind": _BINARY, "data": base64.urlsafe_b64encode(found).decode()}

    return _replaced(value, binary)


def descriptions(value: Any) -> list[str]:
    """The descriptions of the files that JSON values refer to."""
    found: list[str] = []

    def note(item: Mapping[str, Any]) -> Any:
        found.extend([item["description"]] if is_reference(item) else [])
        return item

    _replaced(value, note)
    return found


def _replaced(value: Any, replace: Callable[[Mapping[str, Any]], Any]) -> Any:
    """JSON values with what `replace` returns for each object of the `_KINDS`."""
    if isinstance(value, list):
        return [_replaced(each, replace) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("kind") in _KINDS:
        return replace(value)
    return {member: _replaced(each, replace) for member, each in value.items()}


_KINDS = frozenset({STORED, _BINARY, *_URLS})


def is_reference(item: Any) -> bool:
    """Whether JSON values are a reference to a stored file."""
    return (
        isinstance(item, dict)
        and item.get("kind") == STORED
        and isinstance(item.get("file_id"), str)
        and isinstance(item.get("description"), str)
    )


def _reference(stored: Mapping[bytes, Any], item: Mapping[str, Any]) -> Any:
    data = _data_of(item)
    return item if data is None else stored.get(sha256(data).digest(), item)


def _data_of(item: Mapping[str, Any]) -> bytes | None:
    """The bytes of a binary item; `None` if a tool's own data looks like one."""
    if item.get("kind") != _BINARY or not isinstance(item.get("media_type"), str):
        return None
    try:
        return base64.urlsafe_b64decode(item.get("data", None))
    except (TypeError, ValueError):
        return None
