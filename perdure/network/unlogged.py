"""Keeps URLs of receivers, files and MCP servers out of logs: their paths and queries may contain a secret.

HTTP clients log each request's URL at INFO. perdure's own processes do not show these lines, but the process of an
application may, whose log perdure does not configure.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    import httpx2

_URLS: WeakValueDictionary[int, httpx2.URL] = WeakValueDictionary()
"""By their `id`: requests that overlap may have equal URLs, and each ends on its own."""


def unlogged(request: httpx2.Request) -> httpx2.Request:
    """`request`, whose URL the HTTP client will not log."""
    _URLS[id(request.url)] = request.url
    return request


async def unlogged_soon(request: httpx2.Request) -> None:
    """`unlogged`, as an event hook of a client."""
    unlogged(request)


def _may_be_logged(record: logging.LogRecord) -> bool:
    return not isinstance(record.args, tuple) or not any(_URLS.get(id(each)) is each for each in record.args)


logging.getLogger("httpx2").addFilter(_may_be_logged)
