"""Serves the files of the web chat and of the console.

A request for a file needs no key; the requests that a page sends need one, or a session of the console.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from html import escape
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, Request, Response

from perdure.access.tenants import user_of
from perdure.channels.http.gateway import Gateway
from perdure.errors import NotFound

router = APIRouter(include_in_schema=False)

_DIRECTORY = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


@router.head("/")
@router.get("/")
async def chat(request: Request) -> Response:
    """The web chat. If an application that mounts the gateway authenticates users, the page contains the user's id."""
    gateway: Gateway = request.app.state.gateway
    if gateway.authenticate is None:
        return respond(request, "chat", "chat.html")
    caller = await gateway.caller(request)
    user = escape("" if caller.user is None else user_of(caller.user))
    content = (
        _files("chat")["chat.html"].content.decode().replace("<title>", f'<meta name="user" content="{user}">\n<title>')
    )
    return Response(content, headers={**_HEADERS, "cache-control": "no-store"}, media_type=_TYPES[".html"])


@router.head("/chat/{name}")
@router.get("/chat/{name}")
async def file(name: str, request: Request) -> Response:
    """A script, the style sheet or the icon of the web chat."""
    return respond(request, "chat", name)


@router.head("/chat/vendor/{name}")
@router.get("/chat/vendor/{name}")
async def vendored(name: str, request: Request) -> Response:
    """A library that the web chat imports, or the libraries' licences."""
    return respond(request, "vendor", name)


@cache
def _files(of: str) -> dict[str, _File]:
    """All files of a page by name, read once per process."""
    found = {}
    for path in sorted((_DIRECTORY / of).iterdir()):
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        found[path.name] = _File(content, _TYPES[path.suffix], etag)
    return found


def respond(request: Request, of: str, name: str) -> Response:
    """The file `name` of the page `of`.

    Raises:
        NotFound: the page has no such file.
    """
    found = _files(of).get(name)
    if found is None:
        raise NotFound("There is no such route.")
    headers = {**_HEADERS, "etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
