"""Rate limits: the number of one user's messages that are accepted per minute and per hour.

Without a limit, no statement is run. With a limit, a user's messages are accepted one at a time, so the count is exact.
A repeated message is not counted again. Side requests and forks begin no turn, but count as messages (`meter`).
"""

from __future__ import annotations

from typing import Literal
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.clock import Clock
from perdure.database.engine import Executor, Transaction
from perdure.errors import RateLimited
from perdure.ids import new_id
from perdure.settings import GuardSettings
from perdure.turns.inbox import queries

_MINUTE_S, _HOUR_S = 60, 3_600


def is_on(guard: GuardSettings) -> bool:
    return guard.per_minute > 0 or guard.per_hour > 0


def queue_up(transaction: Transaction, guard: GuardSettings, user_id: UserKey) -> None:
    """Serialise the acceptance of this user's messages. To avoid deadlocks, call this before any row is locked."""
    if is_on(guard):
        transaction.run(queries.QUEUE_UP, {"user_id": user_id})


def check(executor: Executor, guard: GuardSettings, user_id: UserKey) -> None:
    """Check that one more message is within the limits.

    Raises:
        RateLimited: a limit is reached. `retry_after_s`: seconds until a message is accepted again.
    """
    if not is_on(guard):
        return
    rates = {"per_minute": guard.per_minute, "per_hour": guard.per_hour, "minute_s": _MINUTE_S, "hour_s": _HOUR_S}
    [row] = executor.run(queries.FULL_FOR, {"user_id": user_id, **rates})
    if row.full_s is not None and row.full_s > 0:
        limits = [(guard.per_minute, "minute"), (guard.per_hour, "hour")]
        accepted = " and ".join(
            f"{most} an {name}" if name == "hour" else f"{most} a {name}" for most, name in limits if most
        )
        raise RateLimited(f"Too many messages: {accepted} are accepted from one user.", retry_after_s=row.full_s)


def meter(
    transaction: Transaction,
    clock: Clock,
    guard: GuardSettings,
    user_id: UserKey,
    kind: Literal["side_request", "fork"],
) -> UUID:
    """Count a request that begins no turn as one of the user's messages; returns the id of the request's record.

    A user's metered requests run one at a time until the transaction ends.

    Raises:
        RateLimited: as `check`.
    """
    request_id = new_id(clock)
    transaction.run(queries.QUEUE_UP, {"user_id": user_id})
    check(transaction, guard, user_id)
    transaction.run(queries.METER, {"request_id": request_id, "user_id": user_id, "kind": kind})
    return request_id
