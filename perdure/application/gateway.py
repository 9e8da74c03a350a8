"""`perdure.gateway()`: the gateway as an ASGI application, for mounting in another ASGI application.

A mounted application gets no lifespan events, so the gateway opens its connections with the first request, and closes
them when the program ends. To open and close them earlier, use `async with agents.running()` in the lifespan of the
outer application, where `agents` is the result of `perdure.gateway()`.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from celery import Celery
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.application.queues import broker_url, publisher
from perdure.assembly import Addresses, addresses, check, database_address, redis_address
from perdure.channels.http.auth import Authenticate, Keys, MayApprove
from perdure.clock import SystemClock
from perdure.errors import PerdureError, SettingsError
from perdure.host import installed
from perdure.settings import Settings
from perdure.text import declarations
from perdure.workers.opened import OpenGateway, open_gateway


def gateway(
    *,
    app: Celery | None = None,
    authenticate: Authenticate | None = None,
    may_approve: MayApprove | None = None,
    **options: Any,
) -> MountedGateway:
    """The gateway as an ASGI application, for `app.mount("/agents", perdure.gateway(…))`.

    Args:
        app: The gateway publishes wake-ups to the broker of this Celery application. Default: the application in this
            process to which `perdure.install` added perdure, or else an application for `PERDURE_BROKER_URL`.
        authenticate: A function or coroutine function that returns the `user_id` of a request, or `None` if the request
            has no user. A request then reaches only that user's data, as with a user token. API keys and user tokens
            are not accepted.
        may_approve: A function or coroutine function of a `user_id` and of a waiting tool call, as a dict in the form
            of `GET /v1/approvals`. If it returns true, the user may decide about the call, whoever's call it is.
            Without it, a user decides only about calls of the user's own turns, unless their approver is `staff`.
        options: Settings by their names in Python, such as `model="offline"`; they override the environment.

    Raises:
        SettingsError: a setting is invalid; or there is no `authenticate` and no configured key. In the latter case,
            everyone who reaches the application could use the gateway.

    Example:
        >>> shop = FastAPI()
        >>> shop.mount("/agents", gateway(authenticate=lambda request: request.session.get("user_id")))
        >>> shop.routes[-1].path
        '/agents'
    """
    if authenticate is not None:
        accepted = "a function with one parameter, the request, or None"
        fits = declarations.takes_one(authenticate)
        declarations.require(fits, "perdure.gateway()", "authenticate", authenticate, accepted)
    settings = Settings.load(**options)
    check(settings, asks_models=False, signs=authenticate is None)
    if authenticate is None and not (settings.api_keys or settings.admin_keys):
        raise SettingsError("perdure.gateway() has no authentication: pass `authenticate`, or set PERDURE_API_KEYS")
    Keys(settings, SystemClock())  # raises if a key file cannot be read
    return MountedGateway(settings, app, authenticate, may_approve)


class MountedGateway:
    """The gateway. The first request opens it, or `running` does. Each event loop has a gateway of its own."""

    def __init__(
        self,
        settings: Settings,
        app: Celery | None,
        authenticate: Authenticate | None,
        may_approve: MayApprove | None,
    ) -> None:
        self._settings = settings
        self._celery = app
        self._rules = authenticate, may_approve
        self._openings: dict[asyncio.AbstractEventLoop, asyncio.Task[_Opened]] = {}
        self._lock = threading.Lock()
        atexit.register(self._close_parts, ended=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; opens the gateway if it is not open."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        inner = await self._app()
        await inner(scope, receive, send)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open the gateway, and close it after the block. Use this in the lifespan of the outer application."""
        try:
            await self._app()
            yield
        finally:
            await self.close()

    async def close(self) -> None:
        """Answer the waiting requests, and close the connections. A later request opens the gateway again."""
        with self._lock:
            opening = self._openings.pop(asyncio.get_running_loop(), None)
        if opening is None:
            return
        await asyncio.wait([opening])
        if (opened := _result(opening)) is not None:
            try:
                await opened.stack.aclose()
            finally:
                await asyncio.to_thread(opened.close)

    async def _app(self) -> ASGIApp:
        """The open gateway of the running event loop. A request that is cancelled does not cancel the opening."""
        loop = asyncio.get_running_loop()
        opening = self._openings.get(loop)
        if opening is None or (opening.done() and _result(opening) is None):
            self._close_parts(ended=True)
            opening = asyncio.create_task(self._open())
            with self._lock:
                self._openings[loop] = opening
        return (await asyncio.shield(opening)).app

    async def _open(self) -> _Opened:
        opened = _Opened(await asyncio.to_thread(_open, self._settings, self._celery, *self._rules))
        try:
            await opened.stack.enter_async_context(opened.app.router.lifespan_context(opened.app))
        except BaseException:
            await asyncio.to_thread(opened.close)
            raise
        return opened

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Open at startup and close at shutdown. The gateway gets these lifespan events only if it is not mounted."""
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self._app()
                except PerdureError as error:
                    await send({"type": "lifespan.startup.failed", "message": error.message})
                    return
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    def _close_parts(self, *, ended: bool) -> None:
        """Close the connections of all gateways, or of those whose event loops have `ended`."""
        with self._lock:
            loops = [loop for loop in self._openings if loop.is_closed() or not ended]
            openings = [self._openings.pop(loop) for loop in loops]
        for opening in openings:
            if (opened := _result(opening)) is not None:
                opened.close()


class _Opened:
    """The parts of an open gateway."""

    def __init__(self, gateway: OpenGateway) -> None:
        self.app, self.close = gateway
        self.stack = AsyncExitStack()


def _result(opening: asyncio.Task[_Opened]) -> _Opened | None:
    """The gateway that `opening` has opened; `None` if it has failed, or has not ended."""
    if not opening.done() or opening.cancelled() or opening.exception() is not None:
        return None
    return opening.result()


def _open(
    settings: Settings, celery: Celery | None, authenticate: Authenticate | None, may_approve: MayApprove | None
) -> OpenGateway:
    celery = celery or installed()
    if celery is None:
        where, publishing = addresses(settings), None
    else:
        where = Addresses(database_address(settings), redis_address(settings), broker_url(celery))
        publishing = publisher(celery)
    return open_gateway(settings, where, publisher=publishing, authenticate=authenticate, may_approve=may_approve)
