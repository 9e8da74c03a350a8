"""Replies to a URL: POSTed as JSON, signed, within one time limit for the whole attempt.

A receiver that sends its answer a byte at a time, or redirects, fails like one that refuses. Only the status
counts; no body is read. Each receiver has a breaker, `webhook:HOST`: one that keeps failing is not asked for a
while, and holds no threads of the workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx2

from perdure.errors import CircuitBreakerOpen
from perdure.resilience.registry import BreakerRegistry
from perdure.turns.outbox import DeliveryFailed, NotAsked, signature
from perdure.untrusted import first_line

T = TypeVar("T")

TIMEOUT_S = 10.0
"""Seconds that one attempt may take, from the look-up of the name to the status."""

_LAST_PORT = 65_535


class UrlCarrier:
    """A `perdure.turns.outbox.Carrier` to `{"url": ...}`. Threads may share it. Without `breakers`, all are asked."""

    def __init__(self, key: bytes, *, timeout_s: float = TIMEOUT_S, breakers: BreakerRegistry | None = None) -> None:
        self._key = key
        self._timeout_s = timeout_s
        self._breakers = breakers
        self._tls = httpx2.create_ssl_context()

    def carry(self, target: dict[str, Any], body: bytes) -> None:
        """POST `body` to the target's URL with its signature in `X-Perdure-Signature`.

        Raises:
            DeliveryFailed: it was not answered with a 2xx status in time.
            NotAsked: its host's breaker is open.
        """
        try:
            url = _address(target["url"])
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise DeliveryFailed(_said(error)) from error
        if self._breakers is None:
            return self._attempt(url, body)
        breaker = self._breakers.get(f"webhook:{url.netloc.decode('ascii')}")
        try:
            return breaker.execute(lambda: self._attempt(url, body), self._timeout_s)
        except CircuitBreakerOpen as error:
            raise NotAsked(f"the breaker of {url.host} is open", error.retry_after_s or 0.0) from None

    def _attempt(self, url: httpx2.URL, body: bytes) -> None:
        try:
            status = _run(self._post(url, body))
        except TimeoutError:
            raise DeliveryFailed(f"no answer within {self._timeout_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
            raise DeliveryFailed(_said(error)) from error
        if not httpx2.codes.is_success(status):
            raise DeliveryFailed(f"answered with status {status}", status)

    async def _post(self, url: httpx2.URL, body: bytes) -> int:
        """The status of the answer. httpx2 bounds each wait; the bound on their sum is asyncio's."""
        headers = {"Content-Type": "application/json", "X-Perdure-Signature": signature(self._key, body)}
        async with (
            asyncio.timeout(self._timeout_s),
            httpx2.AsyncClient(verify=self._tls, timeout=None, follow_redirects=False) as client,
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            return response.status_code


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, which would also wait, without a limit, for the thread of a name look-up that hangs."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _said(error: Exception) -> str:
    return first_line(f"{type(error).__name__}: {error}", 200)


def _address(url: str) -> httpx2.URL:
    made = httpx2.URL(url)
    if made.port is not None and made.port > _LAST_PORT:
        raise httpx2.InvalidURL(f"there is no port {made.port}")
    return made
