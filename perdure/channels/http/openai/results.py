"""The results of calls that a request's client ran, as text for the model.

A result may have images and files. As the files of perdure's own tools (`files.results`), they are stored, and a line
in the text names each. What cannot be used has a line that says so: a request that is refused for a result would be
refused again with each later one, because clients send their history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from perdure.access.tenants import UserKey, tenant_of
from perdure.errors import InvalidRequest, NotFound, TooLarge
from perdure.files.parts import MAX_FILES
from perdure.files.results import describe_result
from perdure.files.spool import Spool
from perdure.files.store import Call, Files, Owner
from perdure.text.untrusted import first_line

_MANY = f"a result has at most {MAX_FILES} files"


def text_of(files: Files, user: UserKey, call: Call, parts: Sequence[Mapping[str, Any]]) -> str:
    """The text of a result with these `parts`, whose files are stored. Storing a result again stores no file twice.

    Raises:
        RateLimited: too many files are being read from URLs.
        ProviderError: a file cannot be read or written.
        Unavailable: the database cannot be reached.
    """
    lines, stored = list[str](), 0
    for part in parts:
        if part["type"] == "text":
            lines.append(str(part["text"]))
            continue
        stored += 1
        try:
            lines.append(_attached(files, user, call, part) if stored <= MAX_FILES else _left_out(part, _MANY))
        except (InvalidRequest, NotFound, TooLarge) as error:
            lines.append(_left_out(part, error.message))
    return "\n".join(lines)


def _attached(files: Files, user: UserKey, call: Call, part: Mapping[str, Any]) -> str:
    """Store the file of a part for the call; returns the line that names it."""
    name = part.get("name")
    with files.spool() as content:
        named = _fill(content, files, user, part)
        stored = files.put(
            content, Owner.of(user), named=named, name=first_line(name, 200) if name else None, of_call=call
        )
    return describe_result(files.rows([stored.file_id])[stored.file_id])


def _fill(content: Spool, files: Files, user: UserKey, part: Mapping[str, Any]) -> str | None:
    """Write the content that a part names. Returns its media type, if that is known."""
    if "url" in part:
        files.fetching.fetch(part["url"], user, content)
    elif "data" in part:
        content.write_base64(part["data"])
    else:
        tenant = tenant_of(user) or ""
        row = files.find(UUID(part["file_id"]), lambda of, owner: owner == user or (owner is None and of == tenant))
        for piece in files.pieces(row):
            content.write(piece)
        return str(row.media_type)
    return None


def _left_out(part: Mapping[str, Any], why: str) -> str:
    return f"[{part['type']}: left out: {first_line(why, 300)}]"
