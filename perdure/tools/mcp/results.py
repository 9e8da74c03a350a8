"""Renders the untrusted answer of an MCP server as text of limited length for a model."""

from __future__ import annotations

from base64 import b64decode
from typing import assert_never

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from perdure.errors import PerdureError
from perdure.files.parts import MAX_FILES
from perdure.files.results import File
from perdure.text.untrusted import cut, dump, first_line, storable
from perdure.tools.results import Attach, Piece, fitted


def render(result: CallToolResult, limit: int, attach: Attach | None) -> str:
    """A result as text of at most `limit` characters, but for the lines of its files.

    Images, sounds and binary resources become files through `attach`, `MAX_FILES` at most. For one that is refused or
    left out, there is a line with its type and size.
    """
    if not result.content and result.structured_content is not None:
        return dump(result.structured_content, limit)
    pieces: list[Piece] = []
    for block in result.content:
        full = sum(each.is_file for each in pieces) >= MAX_FILES
        pieces.append(_piece(block, None if full or result.is_error else attach))
    if any(each.is_file for each in pieces):
        return storable(fitted(pieces, limit, "\n\n"))
    return storable(cut("\n\n".join(each.text for each in pieces), limit))


def _piece(block: ContentBlock, attach: Attach | None) -> Piece:
    match block:
        case TextContent():
            return Piece(block.text)
        case ImageContent() | AudioContent():
            return _binary(f"{block.type} {_word(block.mime_type)}", block.data, "", block.mime_type, attach)
        case EmbeddedResource():
            return _resource(block.resource, attach)
        case ResourceLink():
            about = f": {block.description}" if block.description else ""
            return Piece(f"[link to {_word(block.title or block.name)}: {_word(block.uri)}]{about}")
        case _:
            assert_never(block)


def _resource(resource: TextResourceContents | BlobResourceContents, attach: Attach | None) -> Piece:
    uri = _word(resource.uri)
    if isinstance(resource, TextResourceContents):
        return Piece(f"[resource {uri}]\n{resource.text}")
    name = uri.partition("?")[0].rpartition("/")[2]
    return _binary(f"resource {uri} {_word(resource.mime_type)}", resource.blob, name, resource.mime_type, attach)


def _binary(title: str, base64: str, name: str, media_type: str | None, attach: Attach | None) -> Piece:
    """The line of the file that is made of a content, or, if there is none, the content's type and size."""
    why = ""
    if attach is not None:
        try:
            return Piece(attach(File(b64decode(base64), name or None, media_type)), is_file=True)
        except PerdureError as error:
            why = f" ({first_line(error.message, 300)})"
        except ValueError:
            why = " (it is not in Base64)"
    return Piece(f"[{title}, about {len(base64) * 3 // 4:,} bytes: not shown{why}]")


def _word(given: str | None) -> str:
    return first_line(given or "of unknown type", 500)
