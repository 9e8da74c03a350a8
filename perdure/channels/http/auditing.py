"""Records what callers with an admin key do (`perdure.audit`): each route that changes something declares its action.

A user's own requests, and those of a service, are not an operator's actions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Depends, Request

from perdure import audit
from perdure.access.tenants import UserKey
from perdure.channels.http.auth import Caller, KeyKind
from perdure.channels.http.dependencies import TheCaller, TheGateway
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.middleware import unescaped
from perdure.text.untrusted import is_storable

_ACTION = "perdure.action"
"""The key in `request.scope` of the action that is recorded."""

_LONGEST = 500


def audited(name: str, target: str | None = None) -> Any:
    """The dependency of a route whose requests are recorded under `name`, if an admin key sends them.

    `target` is the path parameter that names what is changed.
    """

    async def record(request: Request, caller: TheCaller, gateway: TheGateway) -> AsyncIterator[None]:
        named = "" if target is None else unescaped(request.path_params[target])
        async with recorded(gateway, caller, name, named) as action:
            request.scope[_ACTION] = action
            yield

    return Depends(record, scope="function")


@asynccontextmanager
async def recorded(gateway: Gateway, caller: Caller, name: str, target: str) -> AsyncIterator[audit.Action | None]:
    """Record the action `name` on `target`, and how it ends, if the caller has an admin key. Yields the record."""
    if caller.kind is not KeyKind.ADMIN:
        yield None
        return
    named = target[:_LONGEST] if is_storable(target[:_LONGEST]) else ""
    action = audit.Action("console" if caller.in_console else "api", caller.name, name, named or None)
    database, clock = gateway.runtime.database, gateway.runtime.clock
    audit_id = await gateway.in_thread(partial(audit.begin, database, clock, action))
    outcome = audit.DONE
    try:
        yield action
    except Exception as error:
        outcome = audit.outcome_of(error)
        raise
    finally:
        await gateway.in_thread(partial(audit.finish, database, audit_id, action, outcome))


def describe(request: Request, *, user: UserKey | None = None, note: str | None = None) -> None:
    """Add to the record of this request whose data it changes, and how. Does nothing if it is not recorded."""
    action: audit.Action | None = request.scope.get(_ACTION)
    if action is not None:
        action.user, action.note = user or action.user, note[:_LONGEST] if note else action.note
