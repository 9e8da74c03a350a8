"""hikari's REST client for synchronous callers in any thread. The client's errors become `DeliveryFailed`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from threading import Lock, Thread
from typing import Any, TypeVar

import hikari
from hikari.api import RESTClient
from hikari.impl import HTTPSettings, HTTPTimeoutSettings, RESTApp

from perdure.channels.services.protocol import UPLOAD_S
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable

T = TypeVar("T")

TIMEOUT_S = 10.0
HTTP = HTTPSettings(timeouts=HTTPTimeoutSettings(total=TIMEOUT_S))
_HTTP_OF_CALLS = HTTPSettings(timeouts=HTTPTimeoutSettings(total=UPLOAD_S))  # `run` bounds each call by itself

_GONE = frozenset({10003, 10004, 10008, 50001, 50007, 50013, 50278})
"""Discord's codes of permanent errors: the channel is unknown, or the bot may not write in the channel."""


class Rest:
    """Runs hikari's REST client on an event loop in a separate thread. The first call of `run` starts the thread."""

    def __init__(self, token: str, url: str | None) -> None:
        self._token = token
        self._url = url
        self._lock = Lock()
        self._opening = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._app: RESTApp | None = None
        self._client: RESTClient | None = None

    def run(self, work: Callable[[RESTClient], Coroutine[Any, Any, T]], within_s: float = TIMEOUT_S) -> T:
        """Run `work` on the client's event loop; returns its result.

        Raises:
            NotAsked: Discord asks for a pause.
            Undeliverable: Discord's answer is a permanent error.
            DeliveryFailed: another error occurs, or `work` takes more than `within_s` seconds.
        """
        loop = self._started()
        future = asyncio.run_coroutine_threadsafe(self._within(work, within_s), loop)
        try:
            return future.result()
        except hikari.RateLimitTooLongError as error:
            raise NotAsked("Discord asks for a pause", error.retry_after) from error
        except hikari.ClientHTTPResponseError as error:
            raise _refused(error) from error
        except hikari.HTTPResponseError as error:
            raise DeliveryFailed(f"answered with status {int(error.status)}", int(error.status)) from error
        except (hikari.HikariError, OSError, TimeoutError) as error:
            raise DeliveryFailed(type(error).__name__) from error

    def close(self) -> None:
        """Close the client and end the thread."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._close(), loop).result(TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(TIMEOUT_S)
        loop.close()

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._app is not None:
            await self._app.close()
        self._client = self._app = None

    async def _within(self, work: Callable[[RESTClient], Coroutine[Any, Any, T]], seconds: float) -> T:
        async with asyncio.timeout(seconds):
            return await work(await self._opened())

    async def _opened(self) -> RESTClient:
        async with self._opening:
            if self._client is None:
                self._app = RESTApp(http_settings=_HTTP_OF_CALLS, max_rate_limit=0, max_retries=0, url=self._url)
                await self._app.start()
                client = self._app.acquire(self._token, hikari.TokenType.BOT)
                client.start()
                self._client = client
            return self._client

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = Thread(target=self._loop.run_forever, name="discord", daemon=True)
                self._thread.start()
            return self._loop


def _refused(error: hikari.ClientHTTPResponseError) -> DeliveryFailed:
    status = int(error.status)
    code = int(getattr(error, "code", 0) or 0)
    message = f"answered with status {status}, code {code}"
    too_large = status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    if code in _GONE or too_large or isinstance(error, hikari.BadRequestError):
        return Undeliverable(message, status)
    return DeliveryFailed(message, status)
