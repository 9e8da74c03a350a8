"""A real MCP server, made with the official SDK: `python mcp_server.py stdio` or `python mcp_server.py http PORT`.

Some of its tools fail on purpose. `python mcp_server.py shelves` has these forty tools instead: one for each shelf.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from pydantic import Field

server = MCPServer("test")


def leave(mark: str) -> None:
    """Create a file that the test waits for."""
    Path(mark).touch()


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: Annotated[int, Field(description="The other one.")]) -> int:
    """Add two numbers."""
    return a + b


@server.tool(annotations=ToolAnnotations(idempotent_hint=True), structured_output=False)
def key(context: Context[Any, Any]) -> str:
    """Return the idempotency key that came with the call."""
    meta = context.request_context.meta or {}
    return str(meta.get("perdure/effect_id"))


@server.tool(structured_output=False)
async def count(context: Context[Any, Any]) -> str:
    """Report progress in numbers, and in words."""
    await context.report_progress(1, 3)
    await context.report_progress(2, 3, "almost there")
    return "counted"


def list_orders(**given: Any) -> str:
    """List orders."""
    return str(given)


_PAGE = inspect.Parameter(
    "page", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[dict[str, int], Field(alias="page[size]")]
)
list_orders.__signature__ = inspect.Signature([_PAGE])  # type: ignore[attr-defined]  # (as `inspect` reads it)
server.add_tool(list_orders, structured_output=False)


@server.tool(structured_output=False)
def environment() -> str:
    """Return the names of this process's environment variables."""
    return " ".join(sorted(os.environ))


@server.tool()
def things() -> CallToolResult:
    """Return a text, an image, a resource and a link."""
    resource = TextResourceContents(uri="note://1", text="remember")
    image = Image(data=b"123456", format="png").to_image_content()
    link = ResourceLink(name="more", uri="note://2")
    text = TextContent(text="see:\x00")
    return CallToolResult(content=[text, image, EmbeddedResource(resource=resource), link])


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def screenshot(image: str) -> CallToolResult:
    """Return an image, which is given in Base64."""
    return CallToolResult(content=[TextContent(text="the page:"), ImageContent(data=image, mime_type="image/png")])


@server.tool()
def documents() -> CallToolResult:
    """Return 25 files of text and other contents, some of them damaged, and with hostile names."""

    def resource(content: bytes, uri: str, mime_type: str | None = None) -> EmbeddedResource:
        blob = base64.b64encode(content).decode()
        return EmbeddedResource(resource=BlobResourceContents(uri=uri, mime_type=mime_type, blob=blob))

    hostile = "file:///a/b\n; file 01931e71-0000-7000-8000-000000000000].csv?x=1"
    broken = ImageContent(data="abcde", mime_type="image/png")
    odd: list[ContentBlock] = [resource(b"a,b", hostile, "text/csv\x00"), resource(b"", "x://"), broken]
    return CallToolResult(content=[*odd, *(resource(b"%d" % each, f"note://{each}.txt") for each in range(25))])


@server.tool()
def refuse() -> CallToolResult:
    """Fail."""
    return CallToolResult(content=[TextContent(text="No seats are left.")], is_error=True)


@server.tool(structured_output=False)
def die() -> str:
    """Exit during a call."""
    os._exit(3)


@server.tool(annotations=ToolAnnotations(idempotent_hint=True), structured_output=False)
def die_once(mark: str) -> str:
    """Exit during the first call, and answer the next call."""
    if not Path(mark).exists():
        leave(mark)
        os._exit(3)
    return "done"


@server.tool(structured_output=False)
async def hang(mark: str) -> str:
    """Never answer. Creates a file when the call begins, and another file when the call is cancelled."""
    leave(f"{mark}.begun")
    try:
        await asyncio.sleep(3_600)
    except asyncio.CancelledError:
        leave(f"{mark}.cancelled")
        raise
    return "late"


@server.tool(structured_output=False)
def big(megabytes: int) -> str:
    """Return a text of the given size."""
    return "x" * (megabytes * 1_000_000)


@server.tool(structured_output=False)
def child() -> str:
    """Start a child process and return its process id."""
    return str(subprocess.Popen(["sleep", "3600"]).pid)


@server.tool(structured_output=False)
async def grow(context: Context[Any, Any]) -> str:
    """Add a tool and announce it."""
    server.add_tool(lambda: "new", name="grown", description="New.", structured_output=False)
    await context.notify_tools_changed()
    return "grown"


SHELVES = tuple(f"{letter}{number}" for letter in "abcd" for number in range(10))


def shelves() -> MCPServer:
    """A server with a tool for each shelf of a library."""
    made = MCPServer("library")

    def tool_of(shelf: str) -> None:
        def read(title: str, limit: int = 10) -> str:
            return f"{title} is not on shelf {shelf} ({limit})"

        made.add_tool(read, name=f"shelf_{shelf}", description=f"Find a book by its title on shelf {shelf}.")

    for shelf in SHELVES:
        tool_of(shelf)
    return made


def main() -> None:
    """Run the server over stdio or HTTP."""
    if sys.argv[1] == "shelves":
        shelves().run("stdio")
    elif sys.argv[1] == "http":
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")


if __name__ == "__main__":
    main()
