"""Keeps URLs of receivers, files and MCP servers out of logs: their paths and queries may contain a secret.

HTTP clients log each request's URL at INFO. perdure's own processes do not show these lines, but the process of an
application may, whose log perdure does not configure.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    import httpx2

_URLS: WeakSet[httpx2.URL] = WeakSet()


def unlogged(request: httpx2.Request) -> httpx2.Request:
    """`request`, whose URL the HTTP client will not log."""
    _URLS.add(request.url)
    return request


async def unlogged_soon(request: httpx2.Request) -> None:
    """`unlogged`, as an event hook of a client."""
    unlogged(request)


def _may_be_logged(record: logging.LogRecord) -> bool:
    return not isinstance(record.args, tuple) or not any(each in _URLS for each in record.args)


logging.getLogger("httpx2").addFilter(_may_be_logged)
