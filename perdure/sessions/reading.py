"""Reads sessions and transcripts in the form in which the HTTP routes and the CLI return them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.database.bodies import body
from perdure.database.engine import Executor
from perdure.database.paging import pages
from perdure.errors import NotFound
from perdure.files.parts import shown as shown_files
from perdure.sessions import queries
from perdure.text.untrusted import load_object


def read_session(executor: Executor, session_id: UUID) -> dict[str, Any]:
    """The body of `GET /v1/sessions/{id}`.

    Raises:
        NotFound: there is no such session.
    """
    rows = executor.run(queries.READ, {"session_id": session_id})
    if not rows:
        raise NotFound("There is no such session.")
    return body(rows[0])


def owner(executor: Executor, session_id: UUID) -> UserKey:
    """The key of the session's user.

    Raises:
        NotFound: there is no such session.
    """
    rows = executor.run(queries.OWNER, {"session_id": session_id})
    if not rows:
        raise NotFound("There is no such session.")
    return UserKey(rows[0].user_id)


def find_live(executor: Executor, user_id: UserKey, scope: str, idle_s: float) -> tuple[UUID, int] | None:
    """The session that gets the user's next message, and the session's message count.

    Returns `None` if that message would open a new session.
    """
    rows = executor.run(queries.LIVE, {"user_id": user_id, "scope": scope, "idle_s": idle_s})
    return (rows[0].session_id, rows[0].message_count) if rows else None


def list_sessions(
    executor: Executor,
    user: UserKey | None = None,
    limit: int = 100,
    *,
    tenant: str | None = None,
    given_up: bool = False,
    scope: str | None = None,
    delegated: bool = True,
) -> list[dict[str, Any]]:
    """List at most `limit` sessions of one user, of one tenant's users, or of all users; newest first.

    `user` is the user's key. With `scope` (see `routing`), which requires `user`, lists only that scope's sessions.
    `delegated`: a user's list includes the sessions in which agents answer each other.

    With `given_up`, lists only sessions whose consolidation was abandoned, most recently abandoned first.
    """
    if user is not None and scope is not None:
        statement = queries.LIST_OF_SCOPE
    elif user is not None:
        of_user = queries.LIST_OF_USER if delegated else queries.LIST_FOR_USER
        statement = queries.LIST_GIVEN_UP_OF_USER if given_up else of_user
    elif tenant is not None:
        statement = queries.LIST_GIVEN_UP_OF_TENANT if given_up else queries.LIST_OF_TENANT
    else:
        statement = queries.LIST_GIVEN_UP if given_up else queries.LIST
    named = {"user_id": user, "tenant": tenant, "scope": scope, "limit": limit}
    return [body(row) for row in executor.run(statement, named)]


def read_queue(executor: Executor, session_id: UUID, limit: int) -> list[dict[str, Any]]:
    """The session's unsettled turns with their messages, in the order in which they run; at most `limit`.

    Raises:
        NotFound: there is no such session.
    """
    rows = executor.run(queries.QUEUE, {"session_id": session_id, "limit": limit})
    if not rows:
        read_session(executor, session_id)
    return [
        {
            "turn_id": str(row.turn_id),
            "seq": row.seq,
            "status": row.status,
            "attempts": row.attempts,
            "message_id": row.message_id,
            "text": row.text,
            **({"parts": shown_files(row.parts)} if row.parts else {}),
            "channel": row.channel,
            "accepted_at": row.accepted_at.isoformat(),
        }
        for row in rows
    ]


def read_messages(
    executor: Executor, session_id: UUID, after: int = 0, limit: int | None = None
) -> list[dict[str, Any]]:
    """The committed transcript after message number `after`, in order.

    Raises:
        NotFound: there is no such session.
    """
    return [message for page in message_pages(executor, session_id, after, limit) for message in page]


def message_pages(
    executor: Executor, session_id: UUID, after: int = 0, limit: int | None = None
) -> Iterator[list[dict[str, Any]]]:
    """The messages of `read_messages`, page by page. No transaction is open between two pages.

    Raises:
        NotFound: there is no such session.
    """
    found = False
    given = {"session_id": session_id, "after": after}
    for rows in pages(executor, queries.MESSAGES, given, lambda last: {"after": last.seq}, limit):
        found = True
        yield [message_body(row) for row in rows]
    if not found:
        read_session(executor, session_id)


def message_body(row: Row[Any]) -> dict[str, Any]:
    """A row of `messages` as the routes return it. `error` marks the reply of a failed turn."""
    shown = {
        "seq": row.seq,
        "turn_id": str(row.turn_id),
        "role": row.role,
        "content": row.content,
        "message_id": row.message_id,
        "parts": shown_files(row.parts) if row.parts else None,
        "tool_calls": _calls(row) if row.tool_calls else None,
        "tool_call_id": row.tool_call_id,
        "channel": row.channel,
        "token_count": row.token_count,
        "model": row.model,
        "fallback": row.fallback,
        "stop_reason": row.stop_reason,
        "error": None if row.error_code is None else {"code": row.error_code, "message": row.error_message},
        "created_at": row.created_at.isoformat(),
    }
    optional = ("message_id", "parts", "tool_calls", "tool_call_id", "model", "fallback", "stop_reason", "error")
    return {key: value for key, value in shown.items() if key not in optional or value is not None}


def _calls(row: Row[Any]) -> list[dict[str, Any]]:
    """The stored tool calls of a message; for questions to the user, with their state."""
    questions = row.questions or {}
    return [
        {**_call(call), **({"question": questions[str(position)]} if str(position) in questions else {})}
        for position, call in enumerate(row.tool_calls)
    ]


def _call(call: dict[str, str]) -> dict[str, Any]:
    """A stored tool call. If the arguments are a JSON object, they are parsed; otherwise they stay text."""
    try:
        arguments: Any = load_object(call["arguments"])
    except ValueError:
        arguments = call["arguments"]
    return {**call, "arguments": arguments}
