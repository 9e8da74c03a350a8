"""Routing: creates an ordinary turn for each message that an application inserted in its own transaction.

`perdure.send` inserts a row into `unrouted` and locks no other row. After the application's commit, a wake-up or the
sweeper starts routing. `accept` then accepts the message like any other; the turn has the id that `perdure.send`
returned. If the message joined another turn, the accepting transaction marks the row settled; otherwise it deletes the
row. So each message is routed only one time. Messages of an erased user are not routed. The messages of one user are
routed in the order of insertion, by one process at a time.

A message that a rate limit refuses waits until the limit allows it. Any other refusal is final: the API shows the
message as a failed turn, and the error is delivered to the message's `reply_to`.

Each function that runs a statement raises `Unavailable` if the database cannot be reached.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.database.engine import Executor, Transaction, as_json
from perdure.errors import INTERNAL_ERROR, PerdureError, RateLimited, Unavailable, loggable
from perdure.ids import new_id
from perdure.runtime import Runtime
from perdure.turns.inbox import route_queries as queries
from perdure.turns.inbox.accept import Accepted, SourceTaken, accept
from perdure.turns.inbox.incoming import MessageFields, ReplyTo, stored_incoming

log = logging.getLogger(__name__)

_MOST_USERS = 200
_MOST_OF_USER = 100
_LONGEST_S = 10.0
_SHORTEST_WAIT_S = 1.0
_FIRST_PAUSE_S = 5.0
_MOST_ATTEMPTS = 8
"""After this number of unexpected errors, a message is refused, so that it no longer blocks its user's messages."""


def route_due(runtime: Runtime, most: int = _MOST_USERS) -> int:
    """Route due messages for about `_LONGEST_S` seconds; returns the number of users whose messages were due.

    Reads the oldest `most` due messages, and routes all messages of their users. If more messages are due, considers
    `most` users instead, and the next call considers the next users. Each user has an equal share of the time. A user
    whose rows are locked does not delay other users.
    """
    until = time.monotonic() + _LONGEST_S
    rows = runtime.database.run(queries.DUE_USERS, {"most": most})
    if sum(row.messages for row in rows) >= most:
        rows = runtime.database.run(queries.NEXT_USERS, {"most": most})
    users = [UserKey(row.user_id) for row in rows]
    for number, user in enumerate(users):
        now = time.monotonic()
        if now > until:
            break
        try:
            route_user(runtime, user, now + (until - now) / (len(users) - number))
        except Unavailable as error:
            log.info("an application's messages for a user wait: %s", loggable(error))
            runtime.database.run(queries.DUE_USERS, {"most": 1})  # raises if the database cannot be reached
    return len(users)


def route_user(runtime: Runtime, user: UserKey, until: float | None = None) -> None:
    """Route this user's messages in order; returns immediately if another process is routing them.

    `user` is a user's key. No message is begun after `until`, a time of the monotonic clock.
    """
    # Read again after the last row: a process that was woken for a newer message may have skipped it because of the
    # lock that this process held.
    while rows := runtime.database.run(queries.OF_USER, {"user_id": user, "most": _MOST_OF_USER}):
        for row in rows:
            if not row.due or (until is not None and time.monotonic() > until):
                return
            try:
                if not _route(runtime, user, row):
                    return
            except _RoutedElsewhere:
                return
            except SourceTaken:  # another process routed the message, or it was erased with its user
                break


def resolve(runtime: Runtime, turn_id: UUID) -> UUID:
    """The turn of an application's message: `turn_id`, or the earlier turn that the message joined or repeated.

    A message that is not routed yet is routed now, unless it or an earlier message of its user must wait.
    """
    row = _read(runtime.database, turn_id)
    if row is not None and row.settled_at is None:
        route_user(runtime, UserKey(row.user_id))
        row = _read(runtime.database, turn_id)
    return turn_id if row is None or row.routed_to is None else row.routed_to


def cancel(runtime: Runtime, turn_id: UUID, reason: PerdureError) -> bool:
    """Settle an unrouted message with the error `reason`. Returns False if the message became the turn `turn_id`."""
    row = _read(runtime.database, turn_id)
    if row is not None and row.settled_at is None:
        _refuse(runtime, row, reason)
        row = _read(runtime.database, turn_id)
    return row is not None


def _read(executor: Executor, turn_id: UUID) -> Row[Any] | None:
    return next(iter(executor.run(queries.READ, {"turn_id": turn_id})), None)


class _RoutedElsewhere(SourceTaken):
    """Another process has the lock on the user's messages, and routes all of them."""


@dataclass(frozen=True, slots=True)
class _Unrouted:
    """A row of `unrouted`, as the `Source` of a message."""

    user: UserKey
    turn_id: UUID

    def begin(self, transaction: Transaction) -> None:
        """Keep other processes from routing the user's messages until the commit."""
        if not transaction.run(queries.LOCK_USER, {"user_id": self.user})[0].locked:
            raise _RoutedElsewhere

    def end(self, transaction: Transaction, accepted: Accepted) -> None:
        """Delete the row, or record the turn that its message joined."""
        given = {"turn_id": self.turn_id, "routed_to": accepted.turn_id}
        if not transaction.run(queries.ROUTED if accepted.turn_id == self.turn_id else queries.JOINED, given):
            raise SourceTaken


def _route(runtime: Runtime, user: UserKey, row: Row[Any]) -> bool:
    """Route one message; returns whether the user's next message may be routed now.

    Raises:
        SourceTaken: another process routes or has routed the message, or it was erased.
    """
    turn_id = row.turn_id
    try:
        # Unknown fields are ignored: the application may use a newer release.
        known = {name: value for name, value in row.message.items() if name in MessageFields.model_fields}
        message = stored_incoming(user, known)
        accept(runtime, message, turn_id=turn_id, source=_Unrouted(user, turn_id), any_agent=True)
    except SourceTaken:
        raise
    except Unavailable as error:  # either the database is down and the next statement raises, or the session is locked
        log.info("message %s of an application waits: %s", turn_id, loggable(error))
        runtime.database.run(queries.POSTPONED, {"turn_id": turn_id, "seconds": _FIRST_PAUSE_S, "charged": 0})
        return False
    except RateLimited as error:
        wait_s = max(error.retry_after_s or 0.0, _SHORTEST_WAIT_S)
        runtime.database.run(queries.POSTPONED, {"turn_id": turn_id, "seconds": wait_s, "charged": 0})
        return False
    except PerdureError as error:
        log.warning("message %s of an application was refused: %s", turn_id, loggable(error))
        _refuse(runtime, row, error)
    except Exception:
        log.exception("message %s of an application cannot be routed", turn_id)
        return _postpone(runtime, row)
    return True


def _postpone(runtime: Runtime, row: Row[Any]) -> bool:
    if row.attempts + 1 >= _MOST_ATTEMPTS:
        _refuse(runtime, row, PerdureError(INTERNAL_ERROR))
        return True
    seconds = _FIRST_PAUSE_S * 2**row.attempts
    runtime.database.run(queries.POSTPONED, {"turn_id": row.turn_id, "seconds": seconds, "charged": 1})
    return False


def _refuse(runtime: Runtime, row: Row[Any], error: PerdureError) -> None:
    given = {
        "turn_id": row.turn_id,
        "code": error.code,
        "message": error.message,
        "delivery_id": new_id(runtime.clock),
        "reply_to": _reply_to(row.message),
    }
    for owed in runtime.database.run(queries.REFUSED, given):
        runtime.wake.delivery(owed.delivery_id)


def _reply_to(message: dict[str, Any]) -> str | None:
    """The receiver of the reply to a message, as JSON; `None` if it is missing or invalid."""
    try:
        reply_to = ReplyTo.model_validate(message["reply_to"])
    except (ValidationError, KeyError, TypeError):  # a database role with INSERT can write any JSON
        return None
    return as_json(reply_to.model_dump(exclude_none=True))
