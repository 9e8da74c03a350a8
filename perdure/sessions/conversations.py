"""Conversations of a user: each has a key that the caller chooses, a title, and at most one live session.

The table `conversations` stores the titles. The column `scope` of a session contains the key; see `routing`. All
conversations of a user share the user's memory.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.database.bodies import body
from perdure.database.engine import Database, Executor
from perdure.errors import NotFound
from perdure.sessions import queries
from perdure.sessions.ending import EndWaker, Requested, request_end
from perdure.text.titles import MAX_CHARS
from perdure.text.untrusted import first_line

_ARCHIVED = "its conversation was archived"
_LEFT_OUT = "its conversation is left out of memory"


def list_conversations(
    executor: Executor, user: UserKey, limit: int, *, archived: bool | None = None
) -> list[dict[str, Any]]:
    """The conversations of the user with the key `user`, the most recently active first.

    If `archived` is True, returns only archived conversations. If it is False, returns only conversations that are not
    archived. If it is `None`, returns all conversations.
    """
    rows = executor.run(queries.CONVERSATIONS, {"user_id": user, "archived": archived, "limit": limit})
    return [body(row) for row in rows]


def read_conversation(executor: Executor, user: UserKey, conversation: str) -> dict[str, Any]:
    """The user's conversation with the key `conversation`.

    Raises:
        NotFound: the user has no such conversation.
    """
    rows = executor.run(queries.CONVERSATION, {"user_id": user, "conversation": conversation})
    if not rows:
        raise NotFound("There is no such conversation.")
    return body(rows[0])


def change_conversation(
    database: Database,
    wake: EndWaker,
    user: UserKey,
    conversation: str,
    *,
    title: str | None,
    archived: bool | None,
    remember: bool | None = None,
) -> dict[str, Any]:
    """Change a conversation's title, archive or restore it, or leave it out of memory; returns the conversation.

    An argument of `None` changes nothing. If `archived` is True, also requests the end of the conversation's live
    session. The next message to an archived conversation restores the conversation. If `remember` is False, no memory
    is extracted from the conversation from now on, no search finds its messages, earlier ones included, and the cases
    that were learnt from it are archived. If `remember` is True, later messages are remembered again.

    Raises:
        NotFound: the user has no such conversation.
    """
    named = {"user_id": user, "conversation": conversation}
    changes = {"title": None if title is None else first_line(title, MAX_CHARS), "archived": archived}
    changes["remember"] = remember
    requested: list[Requested | None] = []
    with database.transaction("conversations.change") as transaction:
        live = read_conversation(transaction, user, conversation)["session_id"]
        if archived and live is not None:
            # Locks the session before the conversation: the same order as when a message is accepted.
            requested.append(request_end(transaction, UUID(live), _ARCHIVED))
        if remember is not None:
            transaction.run(queries.MARK_SESSIONS, {**named, "remember": remember})
        transaction.run(queries.CHANGE_CONVERSATION, {**named, **changes})
        if remember is not None:
            transaction.run(queries.MARK_SESSIONS, {**named, "remember": remember})
        if remember is False:
            transaction.run(queries.LEAVE_OUT, named)
            transaction.run(queries.ARCHIVE_CASES, {**named, "reason": _LEFT_OUT})
        found = read_conversation(transaction, user, conversation)
        if archived and found["session_id"] is not None:  # opened before this transaction had locked the conversation
            requested.append(request_end(transaction, UUID(found["session_id"]), _ARCHIVED))
            found = read_conversation(transaction, user, conversation)
    for each in requested:
        if each is not None:
            each.wake(wake)
    return found
