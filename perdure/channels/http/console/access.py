"""The console's sessions over HTTP: a cookie that scripts cannot read, and a CSRF token for each changing request."""

from __future__ import annotations

import hmac
from dataclasses import replace
from datetime import datetime

from fastapi import Request, Response

from perdure.access.console_sessions import VALID
from perdure.channels.http.auth import Caller, refuse_other_origins, refuse_other_sites
from perdure.channels.http.gateway import Gateway
from perdure.errors import Forbidden, Unauthorized

COOKIE = "perdure_console"
CSRF = "x-csrf-token"

_READS = frozenset({"GET", "HEAD"})


def sign_in(gateway: Gateway, request: Request, response: Response) -> tuple[Caller, str, datetime]:
    """Begin a session for the holder of the admin key in `Authorization`: the operator, the CSRF token and the expiry.

    A gateway without keys needs none, from a page of this machine.

    Raises:
        Unauthorized, RateLimited, Forbidden: as `Keys.caller`.
        Forbidden: the key is no admin key without a tenant, or an application authenticates the users.
    """
    if gateway.authenticate is not None and gateway.keys.are_none:
        raise Forbidden("The console needs an admin key: set PERDURE_ADMIN_KEYS.")
    caller = gateway.keys.caller(request)
    if not caller.is_operator:
        raise Forbidden("The console concerns the whole installation and requires an admin key without a tenant.")
    cookie, expires_at = gateway.keys.console.begin(caller.digest)
    _set(request, response, cookie, int(VALID.total_seconds()))
    return caller, gateway.keys.console.csrf(cookie), expires_at


def sign_out(request: Request, response: Response) -> None:
    """Make the browser forget the session."""
    _set(request, response, "", 0)


def session_of(gateway: Gateway, request: Request) -> tuple[Caller, str]:
    """The operator of a request's session, and the session's cookie.

    Raises:
        Unauthorized: the request has no session, the session has expired, or its key is no longer configured.
        Forbidden: the request may change something and has not the session's CSRF token, or a page of another origin
            has sent it.
    """
    cookie = request.cookies.get(COOKIE, "")
    if gateway.authenticate is not None and gateway.keys.are_none:
        raise Unauthorized("Sign in to the console.")
    caller = gateway.keys.operator(cookie)
    if caller is None:
        raise Unauthorized("The key of this session is no longer an admin key. Sign in again.")
    (refuse_other_sites if gateway.keys.are_none else refuse_other_origins)(request)
    if request.method not in _READS:
        given = request.headers.get(CSRF, "")
        if not hmac.compare_digest(given.encode(), gateway.keys.console.csrf(cookie).encode()):
            raise Forbidden("The console's CSRF token is missing or wrong. Reload the page.")
    return replace(caller, in_console=True), cookie


def _set(request: Request, response: Response, cookie: str, max_age_s: int) -> None:
    # A client that sends the header without a proxy only keeps its own cookie from being sent without TLS.
    schemes = {request.url.scheme, request.headers.get("x-forwarded-proto", "").lower()}
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=max_age_s,
        path=f"{request.scope.get('root_path', '')}/console",
        secure="https" in schemes,
        httponly=True,
        samesite="strict",
    )
