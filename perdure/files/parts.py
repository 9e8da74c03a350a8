"""The parts of a message: as senders give them, as they are stored, and as a line of text for models that cannot read.

A message is its text and, in the order of the text, its files. The text parts are joined by newlines. The stored record
of a file says where in the text it stands (`at`, a number of characters), so the order of the parts is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator
from sqlalchemy import Row

from perdure.files.kinds import IMAGES, PDF, TEXTS
from perdure.text.tokens import BYTES_PER_TOKEN
from perdure.text.untrusted import STORABLE_PATTERN, checked_storable, first_line

MAX_FILES = 20
"""The most files of a message."""

PIXELS_PER_TOKEN = 750
MAX_IMAGE_TOKENS = 4_800
"""Estimates of an image's tokens: Anthropic's rule, up to its newest models' limit."""

PAGE_TOKENS = 2_000
"""An estimate of a PDF page's tokens: its text, and its image."""

BYTES_PER_PAGE = 100_000
"""Of a PDF whose pages cannot be counted."""

TEXT_CHARS = 20_000
"""The most characters of a text file that a prompt contains."""

DESCRIPTION_TOKENS = 40
"""An estimate of the tokens of a file's description."""

_SHOWN = ("type", "file_id", "media_type", "name", "size", "sha256", "width", "height", "pages")

_ABSENT: JsonValue = {"type": "null"}
_SOURCES = ("file_id", "url", "data")
_ONE_SOURCE: list[JsonValue] = [
    {"required": [each], "properties": {other: _ABSENT for other in _SOURCES if other != each}} for each in _SOURCES
]


_Text = Annotated[
    str, Field(strict=True, json_schema_extra={"pattern": STORABLE_PATTERN}), AfterValidator(checked_storable)
]


class TextPart(BaseModel):
    """A part of a message's text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]
    text: _Text


class FilePart(BaseModel):
    """An image or another file: uploaded (`file_id`), at a public URL, or itself (`data`, in Base64 or a `data:` URL).

    `media_type` distinguishes kinds of text; what else a file is, its content shows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"oneOf": _ONE_SOURCE})

    type: Literal["image", "file"]
    file_id: UUID | None = None
    url: Annotated[_Text, Field(max_length=2_000)] | None = None
    data: Annotated[_Text, Field(min_length=1)] | None = None
    media_type: Annotated[_Text, Field(max_length=200)] | None = None
    name: Annotated[_Text, Field(min_length=1, max_length=200)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> FilePart:
        if sum(getattr(self, source) is not None for source in _SOURCES) != 1:
            raise ValueError("give one of file_id, url and data")
        return self


Part: TypeAlias = Annotated[TextPart | FilePart, Field(discriminator="type")]
Parts: TypeAlias = Annotated[tuple[Part, ...], Field(min_length=1, max_length=100)]


def files_in(parts: Iterable[TextPart | FilePart]) -> list[FilePart]:
    return [part for part in parts if isinstance(part, FilePart)]


def places(parts: Iterable[TextPart | FilePart]) -> list[int]:
    """For each file in `parts`, the number of characters of the message's text before it."""
    found, at = list[int](), 0
    for part in parts:
        if isinstance(part, FilePart):
            found.append(at)
        else:
            at += len(part.text) + bool(at and part.text)
    return found


def joined(texts: Iterable[str]) -> str:
    """The text of a message with these text parts."""
    return "\n".join(text for text in texts if text)


def record(part: FilePart, row: Row[Any], at: int) -> dict[str, Any]:
    """The stored record of a file. `row` is from `store.use`, and `at` from `places`."""
    known = {"width": row.width, "height": row.height, "pages": row.pages, "name": part.name or row.name}
    return {
        "type": part.type,
        "file_id": str(row.file_id),
        "media_type": row.media_type,
        "size": row.size,
        "sha256": bytes(row.sha256).hex(),
        "at": at,
        "tokens": tokens(row.media_type, row.size, row.width, row.height, row.pages),
        **{name: value for name, value in known.items() if value is not None},
    }


def tokens(media_type: str, size: int, width: int | None, height: int | None, pages: int | None) -> int:
    """An estimate of the tokens of a file in a prompt. A file that no model reads has those of its description."""
    if media_type in IMAGES:
        return DESCRIPTION_TOKENS + min((width or 0) * (height or 0) // PIXELS_PER_TOKEN, MAX_IMAGE_TOKENS)
    if media_type == PDF:
        return DESCRIPTION_TOKENS + PAGE_TOKENS * (pages or -(-size // BYTES_PER_PAGE))
    if media_type.startswith(TEXTS):
        return DESCRIPTION_TOKENS + min(size, TEXT_CHARS) // BYTES_PER_TOKEN
    return DESCRIPTION_TOKENS


def text_tokens(stored: Mapping[str, Any]) -> int:
    """Of the tokens of a stored file, those of text: its description, and the text of a text file."""
    known: int = stored.get("tokens", DESCRIPTION_TOKENS)
    return known if str(stored.get("media_type")).startswith(TEXTS) else min(known, DESCRIPTION_TOKENS)


def describe(stored: Mapping[str, Any], remark: str = "") -> str:
    """A line about a file, for models that cannot read it, such as `[image: cat.png, image/png, 12.3 kB]`."""
    sizes = [f"{stored['width']} by {stored['height']} pixels"] if stored.get("width") else []
    sizes += [f"{stored['pages']} pages"] if stored.get("pages") else []
    names = [first_line(stored["name"])] if stored.get("name") else []
    facts = [*names, stored["media_type"], *sizes, _bytes(stored["size"])]
    return f"[{stored['type']}: {', '.join(facts)}{f'; {remark}' if remark else ''}]"


def _bytes(size: int) -> str:
    for unit, bound in (("MB", 10**6), ("kB", 10**3)):
        if size >= bound:
            return f"{size / bound:.1f} {unit}"
    return f"{size} bytes"


def as_given(text: str, stored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a message as its sender could have given them, from its text and the stored records of its files."""
    found, at = list[dict[str, Any]](), 0
    for each in stored:
        if each["at"] > at:
            found.append({"type": "text", "text": text[at : each["at"]].strip("\n")})
            at = each["at"]
        found.append({name: each[name] for name in ("type", "file_id", "name") if name in each})
    return [*found, *([{"type": "text", "text": text[at:].strip("\n")}] if text[at:] else [])]


def shown(stored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Stored records as the routes return them."""
    return [{name: each[name] for name in _SHOWN if name in each} for each in stored]
