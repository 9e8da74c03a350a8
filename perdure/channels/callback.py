"""POSTs replies to URLs as signed JSON, with a time limit for each attempt.

The sender of a message chooses the URL for the reply. Each attempt therefore checks the URL and connects only to a
checked address (`perdure.network.egress`). An attempt fails if the host answers with a redirect, or does not answer
within the time limit. An attempt reads only the status of the response, not the body.

Each host has a circuit breaker, `webhook:HOST`. While the breaker is open, no worker sends a request to the host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property
from http import HTTPStatus
from ssl import SSLContext
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.errors import CircuitBreakerOpen
from perdure.network import egress
from perdure.network.reply_urls import Reachable
from perdure.network.webhook_signatures import signed_headers
from perdure.observe.traces import OFF, Traces
from perdure.resilience.registry import BreakerRegistry
from perdure.text.untrusted import first_line
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

TIMEOUT_S = 10.0
"""Seconds for one attempt, from the DNS look-up to the response's status."""


class UrlCarrier:
    """A `perdure.turns.outbox.Carrier` for targets `{"url": ...}`. Thread-safe.

    `keys` sign the requests as the Standard Webhooks specification requires. If `breakers` is `None`, attempts use no
    circuit breaker. While `traces` are on, a request tells its span (`traceparent`).
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        reachable: Reachable,
        *,
        timeout_s: float = TIMEOUT_S,
        breakers: BreakerRegistry | None = None,
        clock: Callable[[], float] = time.time,
        traces: Traces = OFF,
    ) -> None:
        self._keys = tuple(keys)
        self._reachable = reachable
        self._timeout_s = timeout_s
        self._breakers = breakers
        self._clock = clock
        self._traces = traces

    @cached_property
    def _tls(self) -> SSLContext:
        """Trusts the authorities of the system. They take time and memory to read."""
        import httpx2  # noqa: PLC0415 (a worker starts without it)

        return httpx2.create_ssl_context()

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        """POST `body` to the target's URL, signed.

        Raises:
            DeliveryFailed: the receiver did not answer with a 2xx status in time, or the receiver's host name resolves
                to an address that is not allowed.
            Undeliverable: the URL itself is not allowed, or the receiver answered with 410.
            NotAsked: the host's breaker is open.
        """
        try:
            url = egress.check(target["url"], self._reachable)
        except egress.EgressRefused as error:
            raise Undeliverable(error.message) from error
        if self._breakers is None:
            return self._attempt(url, body, message_id)
        breaker = self._breakers.get(f"webhook:{url.netloc.decode('ascii')}")
        try:
            return breaker.execute(lambda: self._attempt(url, body, message_id), self._timeout_s)
        except CircuitBreakerOpen as error:
            raise NotAsked(f"the breaker of {url.host} is open", error.retry_after_s or 0.0) from None

    def _attempt(self, url: httpx2.URL, body: bytes, message_id: str) -> None:
        import httpx2  # noqa: PLC0415 (a worker starts without it)

        try:
            status = _run(self._post(url, body, message_id))
        except TimeoutError:
            raise DeliveryFailed(f"no answer within {self._timeout_s:g} s") from None
        except egress.EgressRefused as error:
            raise DeliveryFailed(error.message) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
            raise DeliveryFailed(_describe(error)) from error
        if status == HTTPStatus.GONE:
            raise Undeliverable(f"answered with status {status}", status)
        if not httpx2.codes.is_success(status):
            raise DeliveryFailed(f"answered with status {status}", status)

    async def _post(self, url: httpx2.URL, body: bytes, message_id: str) -> int:
        """POST `body` to `url`; returns the status of the response.

        `asyncio.timeout` limits the whole request. httpx2's own timeouts would limit only each single wait.
        """
        import httpx2  # noqa: PLC0415 (a worker starts without it)

        headers = {
            "Content-Type": "application/json",
            **signed_headers(self._keys, message_id, int(self._clock()), body),
            **self._traces.headers(),
        }
        async with (
            asyncio.timeout(self._timeout_s),
            httpx2.AsyncClient(verify=self._tls, timeout=None, follow_redirects=False, trust_env=False) as client,
        ):
            *others, last = await egress.resolve(url, self._reachable)
            for address in others:
                try:
                    return await _status(client, egress.pinned(client, "POST", url, address, headers, content=body))
                except httpx2.ConnectError:  # nothing was sent, so trying the next address is safe
                    continue
            return await _status(client, egress.pinned(client, "POST", url, last, headers, content=body))


async def _status(client: httpx2.AsyncClient, request: httpx2.Request) -> int:
    response = await client.send(request, stream=True)
    try:
        return response.status_code
    finally:
        await response.aclose()


def _run(attempt: Coroutine[Any, Any, T]) -> T:
    """Run `attempt` in a new event loop. `asyncio.run` would wait without limit for a DNS look-up that hangs."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(attempt)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _describe(error: Exception) -> str:
    return first_line(f"{type(error).__name__}: {error}", 200)
