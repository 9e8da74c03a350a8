"""Lists the tool calls that wait for a person's decision, in the form of `GET /v1/approvals`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey, user_of
from perdure.database.engine import Executor
from perdure.text.untrusted import load_object
from perdure.turns.calls import queries


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call that waits. `user` is the key of its turn's user, `body` the item of `GET /v1/approvals`."""

    effect_id: UUID
    user: UserKey
    body: dict[str, Any]


def list_waiting(
    executor: Executor,
    *,
    user: UserKey | None = None,
    tenant: str | None = None,
    all_tenants: bool = False,
    after: UUID | None = None,
    limit: int = 100,
) -> list[WaitingCall]:
    """The calls that wait for a decision, longest wait first, after the call with the effect id `after`.

    `user` is a user's key. Without `user`, the calls of the users of `tenant` (of users without a tenant, if it is
    `None`), or of all users.
    """
    given = {"user_id": user, "tenant": tenant, "after": after or UUID(int=0), "limit": limit}
    if user is not None:
        statement = queries.WAITING_OF_USER
    elif all_tenants:
        statement = queries.WAITING
    else:
        statement = queries.WAITING_WITHOUT_TENANT if tenant is None else queries.WAITING_OF_TENANT
    return [_waiting(row) for row in executor.run(statement, given)]


def find_waiting(executor: Executor, turn_id: UUID, call_id: str) -> WaitingCall | None:
    """The call of a turn that waits for a decision; `None` if it does not wait.

    As in the turn's body, the call of an agent that answers one of its calls is named by the id of its effect.
    """
    rows = executor.run(queries.WAITING_OF_TURN, {"turn_id": turn_id})
    named = ((row.call_id if row.turn_id == turn_id else str(row.effect_id), row) for row in rows)
    return next((_waiting(row) for name, row in named if name == call_id), None)


def _waiting(row: Row[Any]) -> WaitingCall:
    body = {
        "turn_id": str(row.turn_id),
        "session_id": str(row.session_id),
        "user_id": user_of(row.user_id),
        "agent": row.agent,
        "call_id": row.call_id,
        "tool": row.tool,
        "arguments": load_object(row.arguments),
        "approver": row.approver,
        "waiting_since": row.waiting_since.isoformat(),
        "expires_at": row.expires_at.isoformat(),
    }
    return WaitingCall(row.effect_id, UserKey(row.user_id), body)
