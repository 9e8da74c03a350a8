"""The gateway's error responses: `application/problem+json` (RFC 9457) with a stable `code`.

Routes raise errors, and this module makes the responses. An unexpected error is logged with its traceback and answered
with a fixed message, so no traceback, query or secret reaches the client.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.errors import (
    INTERNAL_ERROR,
    Conflict,
    InvalidRequest,
    NotFound,
    PerdureError,
    RateLimited,
    TooLarge,
    TurnCancelled,
    Unauthorized,
    Unavailable,
)
from perdure.text.untrusted import what_is_invalid

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

NO_RETRY = {"x-should-retry": "false"}
"""Stops the retries of OpenAI's and similar clients, which repeat a request after a 409."""

_LONGEST_DETAIL = 2_000
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


def _codes() -> dict[int, tuple[str, ...]]:
    codes_of: dict[int, set[str]] = {HTTPStatus.REQUEST_TIMEOUT: {InvalidRequest.code}}
    tree: list[type[PerdureError]] = [PerdureError]
    for error in tree:
        codes_of.setdefault(error.http_status, set()).add(error.code)
        tree += error.__subclasses__()
    return {status: tuple(sorted(codes)) for status, codes in codes_of.items()}


CODES = _codes()
"""The possible error codes for each HTTP status."""


def problem(status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a problem document; a `detail` longer than `_LONGEST_DETAIL` characters is truncated."""
    if len(detail) > _LONGEST_DETAIL:
        detail = f"{detail[:_LONGEST_DETAIL]}…"
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
    }
    return Response(json.dumps(body).encode(), status, headers, MEDIA_TYPE)


def problem_of(error: PerdureError) -> Response:
    return problem(error.http_status, error.code, error.message, headers_of(error))


Shape = Callable[[PerdureError], Response]
"""Makes the response for an error on routes whose clients do not expect a problem document."""


def install(app: FastAPI, shapes: Mapping[str, Shape], of_header: Mapping[str, Shape]) -> None:
    """Make `app` answer errors with problem documents.

    The keys of `shapes` are paths. Errors at such a path, or below it, get the path's shape instead. So do the errors
    of requests with a header of `of_header`.
    """
    app.state.error_shapes = dict(shapes)
    app.state.error_shapes_of_headers = dict(of_header)
    app.add_exception_handler(PerdureError, _on_perdure_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(_LastResort)


def headers_of(error: PerdureError) -> dict[str, str]:
    match error:
        case Unauthorized():
            return {"WWW-Authenticate": 'Bearer realm="perdure"'}
        case Unavailable(retry_after_s=float() | int() as seconds):
            return {"Retry-After": str(math.ceil(seconds))}
        case RateLimited(retry_after_s=float() | int() as seconds):
            return {"Retry-After": str(math.ceil(seconds))}
        case Conflict() | TurnCancelled():
            return NO_RETRY
        case TooLarge():
            return {"Connection": "close"}  # the rest of the body may be unread
        case _:
            return {}


def _shaped(request: Request, error: PerdureError) -> Response:
    """The response for an error, in the shape for the request's path."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))  # the gateway may be mounted
    shapes = request.app.state.error_shapes
    of_path = next((shapes[each] for each in shapes if path == each or path.startswith(f"{each}/")), problem_of)
    of_headers = request.app.state.error_shapes_of_headers
    shape = next((of_headers[name] for name in of_headers if name in request.headers), of_path)
    response: Response = shape(error)
    return response


async def _on_perdure_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, PerdureError):
        raise error
    return _shaped(request, error)


async def _on_invalid_request(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    unusable_body = getattr(request.state, "unusable_body", None)  # set by the module `body`
    if isinstance(unusable_body, PerdureError):
        return _shaped(request, unusable_body)
    return _shaped(request, invalid_request(error.errors()))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == HTTPStatus.NOT_FOUND:
        return _shaped(request, NotFound("There is no such route."))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"This route does not know the method {request.method}."
        refused = _shaped(request, InvalidRequest(detail))
        if refused.media_type == MEDIA_TYPE:
            refused = problem(error.status_code, InvalidRequest.code, detail)
        refused.status_code = error.status_code
        refused.headers["Allow"] = ", ".join(_allowed_methods(request))
        return refused
    code = InvalidRequest.code if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR else PerdureError.code
    return problem(error.status_code, code, str(error.detail), error.headers)


def _allowed_methods(request: Request) -> list[str]:
    """The methods of all routes with the request's path. Starlette reports only the first route's methods.

    An included router does not list the methods of its routes, but tells whether one of them matches a request.
    """
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    routes = request.app.routes
    return [method for method, scope in scopes.items() if any(each.matches(scope)[0] is Match.FULL for each in routes)]


def invalid_request(errors: Iterable[Any]) -> InvalidRequest:
    """The error for a request with pydantic's `errors`; each `loc` has FastAPI's form, as in `("body", "user_id")`."""
    return InvalidRequest(what_is_invalid(errors, skip=1))


class _LastResort:
    """ASGI middleware that answers unexpected errors. It sends nothing to a client that has disconnected."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = False

        async def send_and_note(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except ClientDisconnect:
            log.debug("the client of %s %s has disconnected", scope["method"], scope["path"])
        except Exception:
            if began:
                raise  # the response has begun: the server closes the connection and logs the error
            log.exception("%s %s failed", scope["method"], scope["path"])
            response = _shaped(Request(scope), PerdureError(INTERNAL_ERROR))
            await response(scope, receive, send)
