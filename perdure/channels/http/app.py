"""The gateway's FastAPI application: routes, middleware, error handlers and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from perdure.channels.http import errors, openapi, webhooks
from perdure.channels.http.api import (
    audit,
    breakers,
    casebank,
    conversations,
    deliveries,
    files,
    health,
    links,
    memories,
    memory,
    messages,
    metrics,
    operating,
    pruning,
    schedules,
    sessions,
    turns,
    users,
)
from perdure.channels.http.auth import Authenticate, Keys, MayApprove
from perdure.channels.http.console import routes as console
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.middleware import CutsOffUnread, SafeHeaders, Traced, WholeSegments
from perdure.channels.http.openai import errors as openai_errors
from perdure.channels.http.openai import routes as openai_routes
from perdure.channels.http.pages import routes as pages
from perdure.channels.http.stream import websocket
from perdure.channels.services import configured
from perdure.channels.services.ingress import Ingress
from perdure.observe.readings import Latest, Source
from perdure.runtime import Runtime


def create_app(
    runtime: Runtime,
    broker_reachable: Callable[[], bool],
    killed_lately: health.KilledLately = tuple,
    authenticate: Authenticate | None = None,
    may_approve: MayApprove | None = None,
    *,
    source: Source | None = None,
) -> FastAPI:
    """Make the FastAPI application. At shutdown, the server must call the method `drain` of `app.state.gateway`.

    Args:
        runtime: The runtime of this process; the caller closes it.
        broker_reachable: Returns whether the broker is available. A call may block.
        killed_lately: Returns the kills of workers that `/readyz` reports. A call may block.
        authenticate: The authentication of an application that mounts the gateway, used instead of keys.
        may_approve: The application's function that says who may decide about a waiting call.
        source: Where `/metrics` and `/readyz` read the condition of the installation; the caller closes it. `None`:
            in the runtime's database only.

    Raises:
        SettingsError: the configured keys are invalid.
    """
    gateway = Gateway(runtime, Keys(runtime.settings, runtime.clock), authenticate, may_approve)
    channels = configured.channels(runtime.settings, runtime.clock)
    ingresses = {each.name: (each, Ingress(runtime, each)) for each in channels.values()}

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        intake = asyncio.ensure_future(gateway.follow_intake())
        gateway.start()
        yield
        intake.cancel()
        await asyncio.wait([intake])
        await gateway.close()
        for channel, ingress in ingresses.values():
            ingress.close()
            channel.close()

    app = FastAPI(
        title="perdure",
        description="Durable LLM agents: each accepted message gets a reply, also after crashes and restarts.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from a public server
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,  # `curl -d` sends JSON as a form
        telemetry={"tracing": False},  # its spans have paths and queries, so users' ids, and begin traces of their own
    )
    app.state.gateway = gateway
    app.state.chats = ingresses
    source = source or Source(runtime.database, runtime.clock, breakers=runtime.breakers)
    app.state.checks = health.checks(runtime, broker_reachable, source)
    app.state.source = source
    app.state.latest = Latest(source.read, runtime.clock, runtime.settings.metrics.every_s)
    app.state.metrics = metrics.lookup(runtime, app.state.latest)
    app.state.killed = health.Lookup(killed_lately)
    errors.install(
        app,
        dict.fromkeys(openai_errors.PATHS, openai_errors.response_of),
        {openai_errors.SDK_HEADER: openai_errors.response_of},
    )
    app.add_middleware(WholeSegments)
    app.add_middleware(SafeHeaders)
    if runtime.traces.is_on:
        app.add_middleware(Traced, traces=runtime.traces)
    app.add_middleware(CutsOffUnread)  # the outermost, so that all that a request holds is released last
    for resource in (
        messages,
        operating,  # before `sessions`, whose path of one session would match that of the live ones
        turns,
        sessions,
        deliveries,
        conversations,
        schedules,
        files,
        memories,
        memory,
        users,
        links,
        casebank,
        pruning,
        breakers,
        audit,
        webhooks,
    ):
        app.include_router(resource.router, prefix="/v1")
    app.include_router(turns.waiting, prefix="/v1")
    app.include_router(turns.listed, prefix="/v1")
    app.include_router(openai_routes.router)
    app.include_router(pages.router)
    console.install(app)
    app.include_router(websocket.router)
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.openapi = partial(openapi.document, app, runtime.settings)  # type: ignore[method-assign]
    return app
