"""Routing: turns messages that an application inserted in its own transaction into ordinary turns.

`perdure.send` writes a row of `unrouted` and takes no shared lock. After the application's commit, a wake-up or the
sweeper makes a worker call this module. The message then goes through `accept`, with all its rules, and keeps its
turn's id. The messages of one user are routed in the order of insertion, by one worker at a time. If a worker dies
before it deletes the row, the next one finds the accepted message and deletes the row.

A message that a rate limit refuses waits until the limit allows it. Any other refusal is final, and shown as the failed
turn of the message.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.database.engine import Executor
from perdure.errors import PerdureError, RateLimited, Unavailable, loggable
from perdure.runtime import Runtime
from perdure.turns.inbox import route_queries as queries
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming

log = logging.getLogger(__name__)

_MOST_USERS = 200
_MOST_OF_USER = 100
_SHORTEST_WAIT_S = 1.0
_FIRST_PAUSE_S = 5.0
_MOST_ATTEMPTS = 8
"""Unexpected errors after which a message is refused, so that it does not block its user's later messages forever."""

_UNKNOWN = "Internal error. The operator's log has the details."


def route_due(runtime: Runtime, most: int = _MOST_USERS) -> int:
    """Route the due messages of the users who have the `most` oldest ones; returns the number of users.

    Raises:
        Unavailable: the database cannot be reached.
    """
    users = [row.user_id for row in runtime.database.run(queries.DUE_USERS, {"most": most})]
    for user in users:
        route_user(runtime, user)
    return len(users)


def route_user(runtime: Runtime, user: str) -> None:
    """Route this user's messages in order; returns immediately if another process is routing them.

    `user` is a user's key.

    Raises:
        Unavailable: the database cannot be reached.
    """
    given = {"user_id": user, "most": _MOST_OF_USER}
    # A message may be committed after the last read under the lock, while its wake-up finds the lock taken.
    while _first_due(rows := runtime.database.run(queries.OF_USER, given)):
        with runtime.database.lock(f"perdure routing {user}", lasting=False) as alone:
            if not alone:
                return
            for row in runtime.database.run(queries.OF_USER, given) if rows else ():
                if not row.due or not _route(runtime, user, row):
                    return


def resolve(runtime: Runtime, turn_id: UUID) -> UUID:
    """The turn of an application's message: `turn_id`, or the turn that the message was merged into or repeated.

    A message that is not routed yet is routed now, unless an earlier one must be routed first.

    Raises:
        Unavailable: the database cannot be reached.
    """
    row = _read(runtime.database, turn_id)
    if row is not None and row.settled_at is None:
        route_user(runtime, row.user_id)
        row = _read(runtime.database, turn_id)
    return turn_id if row is None or row.routed_to is None else row.routed_to


def _read(executor: Executor, turn_id: UUID) -> Row[Any] | None:
    return next(iter(executor.run(queries.READ, {"turn_id": turn_id})), None)


def _first_due(rows: Sequence[Row[Any]]) -> bool:
    return bool(rows) and bool(rows[0].due)


def _route(runtime: Runtime, user: str, row: Row[Any]) -> bool:
    """Route one message; returns whether the user's next one may follow."""
    turn_id = row.turn_id
    try:
        # Fields from a newer release in the application are ignored.
        known = {name: value for name, value in row.message.items() if name in Incoming.model_fields}
        message = Incoming.model_validate({**known, "user_id": user})
        accepted = accept(runtime, message, turn_id=turn_id)
    except Unavailable:
        raise
    except RateLimited as error:
        wait_s = max(error.retry_after_s or 0.0, _SHORTEST_WAIT_S)
        runtime.database.run(queries.POSTPONED, {"turn_id": turn_id, "seconds": wait_s, "charged": 0})
        return False
    except PerdureError as error:
        log.warning("message %s of an application was refused: %s", turn_id, loggable(error))
        _refuse(runtime, turn_id, error)
        return True
    except Exception:
        log.exception("message %s of an application cannot be routed", turn_id)
        return _postpone(runtime, row)
    if accepted.turn_id == turn_id:
        runtime.database.run(queries.ROUTED, {"turn_id": turn_id})
    else:
        runtime.database.run(queries.JOINED, {"turn_id": turn_id, "routed_to": accepted.turn_id})
    return True


def _postpone(runtime: Runtime, row: Row[Any]) -> bool:
    if row.attempts + 1 >= _MOST_ATTEMPTS:
        _refuse(runtime, row.turn_id, PerdureError(_UNKNOWN))
        return True
    seconds = _FIRST_PAUSE_S * 2**row.attempts
    runtime.database.run(queries.POSTPONED, {"turn_id": row.turn_id, "seconds": seconds, "charged": 1})
    return False


def _refuse(runtime: Runtime, turn_id: UUID, error: PerdureError) -> None:
    given = {"turn_id": turn_id, "code": error.code, "message": error.message}
    runtime.database.run(queries.REFUSED, given)
