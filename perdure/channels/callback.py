"""Replies to a URL: POSTed as JSON, signed, within a bound on the whole of it.

A receiver that drips its answer a byte at a time, or redirects, gets no further than one
that refuses. Only the status counts; no body is read.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2

from perdure.turns.outbox import DeliveryFailed, signature
from perdure.untrusted import first_line

TIMEOUT_S = 10.0
"""Seconds that one attempt may take, from the look-up of the name to the status."""

_LAST_PORT = 65_535


class UrlCarrier:
    """A `perdure.turns.outbox.Carrier` to `{"url": ...}`. Threads may share it."""

    def __init__(self, key: bytes, *, timeout_s: float = TIMEOUT_S) -> None:
        self._key = key
        self._timeout_s = timeout_s
        self._tls = httpx2.create_ssl_context()

    def carry(self, target: dict[str, Any], body: bytes) -> None:
        """POST `body` to the target's URL with its signature in `X-Perdure-Signature`.

        Raises:
            DeliveryFailed: it was not answered with a 2xx status in time.
        """
        try:
            status = asyncio.run(self._post(_address(target["url"]), body))
        except TimeoutError:
            raise DeliveryFailed(f"no answer within {self._timeout_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
            raise DeliveryFailed(first_line(f"{type(error).__name__}: {error}", 200)) from error
        if not httpx2.codes.is_success(status):
            raise DeliveryFailed(f"answered with status {status}")

    async def _post(self, url: httpx2.URL, body: bytes) -> int:
        """The status of the answer. httpx2 bounds each wait; the bound on their sum is asyncio's."""
        headers = {"Content-Type": "application/json", "X-Perdure-Signature": signature(self._key, body)}
        async with (
            asyncio.timeout(self._timeout_s),
            httpx2.AsyncClient(verify=self._tls, timeout=None, follow_redirects=False) as client,
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            return response.status_code


def _address(url: str) -> httpx2.URL:
    made = httpx2.URL(url)
    if made.port is not None and made.port > _LAST_PORT:
        raise httpx2.InvalidURL(f"there is no port {made.port}")
    return made
