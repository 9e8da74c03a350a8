"""What a caller reaches: a route declares whose things it is about, and these dependencies check that.

A route that names a user takes `TheUsers`, which makes the user's key; one that names a turn or a session by its id
takes `TheTurn` or `TheSession`, which answer 404 for what the caller does not reach, as for what does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Query

from perdure.access.tenants import PATTERN, parse_tenant, tenant_of, user_key
from perdure.channels.http import requests
from perdure.channels.http.auth import Caller
from perdure.channels.http.gateway import Gateway, TheCaller, TheGateway
from perdure.errors import Forbidden, NotFound
from perdure.sessions import reading as sessions
from perdure.turns import reading as turns

Tenant = Annotated[
    str | None,
    Query(
        description="The user's tenant; only with an admin key that has none. A key with a tenant implies its own.",
        json_schema_extra={"pattern": PATTERN},
    ),
]


@dataclass(frozen=True, slots=True)
class Users:
    """The users that a request may be about: those of `tenant`, or without one.

    `everybody`: the caller is the operator and has named no tenant, so a list may be of all users.
    """

    tenant: str | None
    everybody: bool = False

    def key(self, user_id: str) -> str:
        """The key of a user that the request names.

        Raises:
            InvalidRequest: no user can have that id.
        """
        return user_key(self.tenant, user_id)


async def _users(caller: TheCaller, tenant: Tenant = None) -> Users:
    named = parse_tenant(tenant)
    if named is None:
        return Users(caller.tenant, everybody=caller.is_operator)
    if named != caller.tenant and not caller.is_operator:
        raise Forbidden("tenant: another one than the key's takes an admin key without a tenant.")
    return Users(named)


TheUsers = Annotated[Users, Depends(_users)]
"""A route that declares it is about users whom the caller reaches."""


def require(caller: Caller, owner: Callable[[], str], thing: str) -> None:
    """Check that the caller reaches the user whose key `owner` returns.

    Raises:
        NotFound: the caller does not, or `owner` raises it.
    """
    if not caller.is_operator and tenant_of(owner()) != caller.tenant:
        raise NotFound(f"There is no such {thing}.")


def require_session(gateway: Gateway, caller: Caller, session_id: UUID) -> None:
    """Check that the caller reaches a session. Blocks.

    Raises:
        NotFound: the caller does not, or there is no such session.
    """
    require(caller, partial(sessions.owner, gateway.runtime.database, session_id), "session")


async def _turn(turn_id: str, gateway: TheGateway, caller: TheCaller) -> UUID:
    wanted = requests.parse_id(turn_id, "turn")
    if not caller.is_operator:
        owner = partial(turns.owner, gateway.runtime.database, wanted)
        await gateway.in_thread(partial(require, caller, owner, "turn"))
    return wanted


async def _session(session_id: str, gateway: TheGateway, caller: TheCaller) -> UUID:
    wanted = requests.parse_id(session_id, "session")
    if not caller.is_operator:
        await gateway.in_thread(partial(require_session, gateway, caller, wanted))
    return wanted


TheTurn = Annotated[UUID, Depends(_turn)]
"""A turn that the caller reaches, by the `turn_id` in the path."""

TheSession = Annotated[UUID, Depends(_session)]
"""A session that the caller reaches, by the `session_id` in the path."""
