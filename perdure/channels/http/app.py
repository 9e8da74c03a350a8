"""The gateway's application, put together from its parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi import APIRouter, FastAPI

from perdure.channels.http import (
    breakers,
    casebank,
    consolidation,
    health,
    memory,
    messages,
    problems,
    schema,
    sessions,
    turns,
    users,
)
from perdure.channels.http.auth import Keys
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.headers import SafeHeaders
from perdure.channels.http.segments import WholeSegments
from perdure.runtime import Runtime


def create_app(runtime: Runtime, broker_reachable: Callable[[], bool]) -> FastAPI:
    """The application over `runtime`. Its `state.gateway` is told to `leave` when the server shuts down.

    Args:
        runtime: The parts of this process; whoever made them closes them.
        broker_reachable: Whether the broker answers; may block.

    Raises:
        SettingsError: the configured keys cannot be used.
    """
    gateway = Gateway(runtime, Keys(runtime.settings))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.ensure_future(gateway.follow_intake())
        yield
        following.cancel()
        await asyncio.wait([following])
        gateway.close()

    app = FastAPI(
        title="perdure",
        description="Durable LLM agents: messages in, replies out, whatever dies on the way.",
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    app.state.checks = [health.database_check(runtime.database), health.broker_check(broker_reachable)]
    problems.install(app)
    app.add_middleware(WholeSegments)
    app.add_middleware(SafeHeaders)
    app.include_router(health.router)
    v1 = APIRouter(prefix="/v1")
    for room in (messages, turns, sessions, memory, users, casebank, consolidation, breakers):
        v1.include_router(room.router)
    app.include_router(v1)
    app.openapi = partial(schema.describe, app)  # type: ignore[method-assign]
    return app
