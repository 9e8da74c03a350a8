"""Renders the untrusted answer of an MCP server as text of limited length for a model."""

from __future__ import annotations

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

from perdure.text.untrusted import cut, dump, first_line, storable


def render(result: CallToolResult, limit: int) -> str:
    """A result as text of at most `limit` characters. Images and other binary content appear as their type and size."""
    text = "\n\n".join(_block(each) for each in result.content)
    if not result.content and result.structured_content is not None:
        return dump(result.structured_content, limit)
    return storable(cut(text, limit))


def _block(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return f"[{block.type} {_word(block.mime_type)}, {_bytes(block.data)}: not shown]"
        case EmbeddedResource():
            return _resource(block.resource)
        case ResourceLink():
            about = f": {block.description}" if block.description else ""
            return f"[link to {_word(block.title or block.name)}: {_word(block.uri)}]{about}"
        case _:
            assert_never(block)


def _resource(resource: TextResourceContents | BlobResourceContents) -> str:
    if isinstance(resource, TextResourceContents):
        return f"[resource {_word(resource.uri)}]\n{resource.text}"
    return f"[resource {_word(resource.uri)} {_word(resource.mime_type)}, {_bytes(resource.blob)}: not shown]"


def _word(given: str | None) -> str:
    return first_line(given or "of unknown type", 500)


def _bytes(base64: str) -> str:
    return f"about {len(base64) * 3 // 4:,} bytes"
