"""The routes under `/console`: the page, its files, the session, and `/console/v1`, which forwards to `/v1`.

Only the page and its files are answered without a session.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from perdure import audit
from perdure.channels.http.console.access import session_of, sign_in, sign_out
from perdure.channels.http.dependencies import CALLER, TheGateway
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.pages.routes import respond
from perdure.errors import Unauthorized

router = APIRouter(prefix="/console", include_in_schema=False)

_PATH = "/console/v1"


@router.head("")
@router.get("")
async def page(request: Request) -> Response:
    """The page of the console, which asks for an admin key unless there is a session."""
    return respond(request, "console", "console.html")


@router.get("/session")
async def read(request: Request, gateway: TheGateway) -> dict[str, Any]:
    """The browser's session: its operator, its CSRF token and its end. All are null if there is no valid session."""
    try:
        caller, cookie = session_of(gateway, request)
    except Unauthorized:
        return {"operator": None, "csrf": None, "expires_at": None, "needs_key": not gateway.is_open}
    sessions = gateway.keys.console
    return {
        "operator": caller.name,
        "csrf": sessions.csrf(cookie),
        "expires_at": sessions.expires_at(cookie).isoformat(),
        "needs_key": not gateway.is_open,
    }


@router.post("/session", status_code=HTTPStatus.CREATED)
async def begin(request: Request, response: Response, gateway: TheGateway) -> dict[str, Any]:
    """Begin a session with the admin key in `Authorization`."""
    caller, csrf, expires_at = sign_in(gateway, request, response)
    action = audit.Action("console", caller.name, "console.sign-in")
    await gateway.in_thread(partial(_record, gateway, action))
    return {"operator": caller.name, "csrf": csrf, "expires_at": expires_at.isoformat()}


@router.delete("/session", status_code=HTTPStatus.NO_CONTENT)
async def end(request: Request, gateway: TheGateway) -> Response:
    """Sign out: the browser forgets the session. `PERDURE_SECRET_KEY` ends all sessions."""
    session_of(gateway, request)
    response = Response(status_code=HTTPStatus.NO_CONTENT)
    sign_out(request, response)
    return response


@router.head("/{name}")
@router.get("/{name}")
async def file(name: str, request: Request) -> Response:
    """A script or the style sheet of the console."""
    return respond(request, "console", name)


class Forward:
    """Answers `/console/v1/…` as `/v1/…` is answered to an admin key, if the request has a session.

    Each changing request needs the session's CSRF token, too, whatever its route.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Verify the session, then call the application's route."""
        if scope["type"] != "http":
            await self._app.router.not_found(scope, receive, send)
            return
        gateway: Gateway = self._app.state.gateway
        caller, _ = session_of(gateway, Request(scope))
        mounted = scope["root_path"]
        root = mounted.removesuffix(_PATH)
        path = f"{root}/v1{scope['path'].removeprefix(mounted)}"
        forwarded = {**scope, "root_path": root, "path": path, "path_params": {}}
        await self._app.router({**forwarded, CALLER: caller}, receive, send)


def install(app: FastAPI) -> None:
    """Add the console to the gateway's application."""
    app.router.routes.append(Mount(_PATH, app=Forward(app)))
    app.include_router(router)


def _record(gateway: Gateway, action: audit.Action) -> None:
    with audit.recorded(gateway.runtime.database, gateway.runtime.clock, action):
        pass
