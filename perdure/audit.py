"""The audit: what operators do, over the API, in the console and by commands.

An action is written before it begins, and its outcome after it, so that no action is missing whose process died in the
middle of it. A record has ids and names, and no text of a user, a model or a tool. The records of a user's data are
erased with the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.clock import Clock
from perdure.database.bodies import body
from perdure.database.engine import Executor, Statement
from perdure.errors import PerdureError
from perdure.ids import new_id

Via = Literal["api", "command", "console"]

DONE = "done"

_AFTER_ALL = UUID(int=2**128 - 1)

# The user of what was changed, if it is found by its id: ids are unique over all tables.
BEGIN = Statement(
    "audit.begin",
    """
    INSERT INTO audit (audit_id, via, actor, action, target, user_id, began_at)
    VALUES (
        %(audit_id)s, %(via)s, %(actor)s, %(action)s, %(target)s,
        coalesce(
            %(user_id)s::text,
            (SELECT user_id FROM turns WHERE turn_id = %(id)s::uuid),
            (SELECT user_id FROM sessions WHERE session_id = %(id)s::uuid),
            (SELECT user_id FROM memories WHERE memory_id = %(id)s::uuid),
            (SELECT user_id FROM deliveries WHERE delivery_id = %(id)s::uuid),
            (SELECT user_id FROM reminders WHERE schedule_id = %(id)s::uuid)
        ),
        perdure_now()
    )
    """,
)

# What was refused to another tenant's administrator is nothing that happened to the user: its record names nobody.
FINISH = Statement(
    "audit.finish",
    """
    UPDATE audit SET outcome = %(outcome)s, note = %(note)s,
        user_id = CASE WHEN %(outcome)s::text NOT IN ('NOT_FOUND', 'FORBIDDEN')
                       THEN coalesce(user_id, %(user_id)s::text) END
    WHERE audit_id = %(audit_id)s
    """,
)

NEWEST = Statement(
    "audit.newest",
    """
    SELECT audit_id, via, actor, action, target, user_id, note, began_at, outcome
    FROM audit WHERE audit_id < %(before)s
    ORDER BY audit_id DESC LIMIT %(limit)s
    """,
    writes=False,
)


@dataclass(slots=True)
class Action:
    """What an operator does. The code that does it may add `user` and `note` until the action ends.

    `actor` is the operator, as well as it is known: the digest of a key, or a user of the machine.
    """

    via: Via
    actor: str
    name: str
    target: str | None = None
    user: UserKey | None = None
    note: str | None = None


def begin(executor: Executor, clock: Clock, action: Action) -> UUID:
    """Write that an action begins; returns the record's id."""
    audit_id = new_id(clock)
    executor.run(
        BEGIN,
        {
            "audit_id": audit_id,
            "via": action.via,
            "actor": action.actor,
            "action": action.name,
            "target": action.target,
            "id": _id_of(action.target),
            "user_id": action.user,
        },
    )
    return audit_id


def finish(executor: Executor, audit_id: UUID, action: Action, outcome: str) -> None:
    """Write how an action ended."""
    executor.run(FINISH, {"audit_id": audit_id, "outcome": outcome, "note": action.note, "user_id": action.user})


@contextmanager
def recorded(executor: Executor, clock: Clock, action: Action) -> Iterator[None]:
    """Record the action that the `with` block is, with its outcome."""
    audit_id, outcome = begin(executor, clock, action), DONE
    try:
        yield
    except BaseException as error:
        outcome = outcome_of(error)
        raise
    finally:
        finish(executor, audit_id, action, outcome)


def outcome_of(error: BaseException) -> str:
    """The outcome of an action that an error ended: a stable code, or else the error's class."""
    return error.code if isinstance(error, PerdureError) else type(error).__name__


def list_actions(executor: Executor, limit: int, before: UUID | None = None) -> list[dict[str, Any]]:
    """The newest actions, at most `limit` of them. `before`: only those older than this record."""
    return [body(row) for row in executor.run(NEWEST, {"limit": limit, "before": before or _AFTER_ALL})]


def _id_of(target: str | None) -> UUID | None:
    try:
        return UUID(target or "")
    except ValueError:
        return None
