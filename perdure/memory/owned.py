"""A user's own view of what is remembered of them: list the memories, read one, correct one.

A correction is a new memory that supersedes the wrong one and has its sources. `recall.agent_memory.forget` erases one.
Called by `/v1/memories` and `perdure memory`.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.clock import Clock
from perdure.database.engine import Database, Executor
from perdure.errors import Conflict, NotFound
from perdure.ids import new_id
from perdure.memory import owned_queries
from perdure.memory.consolidation.queries import END_AT, LOCK_USER
from perdure.memory.consolidation.reopening import reopen
from perdure.text.injections import instructs
from perdure.text.statements import USER, read

_MOST_SOURCES = 50
_SOURCE_CHARS = 2_000


def owner(executor: Executor, memory_id: UUID) -> UserKey:
    """The key of the user whose memory it is.

    Raises:
        NotFound: there is no such memory.
    """
    rows = executor.run(owned_queries.OWNER, {"memory_id": memory_id})
    if not rows:
        raise NotFound("There is no such memory.")
    return UserKey(rows[0].user_id)


def list_memories(executor: Executor, user_id: UserKey, limit: int, after: UUID | None = None) -> list[dict[str, Any]]:
    """At most `limit` of the user's memories, the newest first, superseded ones included.

    `after`: the id of the memory after which the list continues.
    """
    parameters = {"user_id": user_id, "after": after, "limit": limit}
    return [_body(row) for row in executor.run(owned_queries.LIST, parameters)]


def read_memory(executor: Executor, memory_id: UUID) -> dict[str, Any]:
    """One memory.

    Raises:
        NotFound: there is no such memory.
    """
    rows = executor.run(owned_queries.READ, {"memory_id": memory_id})
    if not rows:
        raise NotFound("There is no such memory.")
    return _body(rows[0])


def read_with_sources(executor: Executor, memory_id: UUID) -> dict[str, Any]:
    """One memory with `sources` and `used_in`, at most 50 of each.

    `sources` are the messages that it came from, the earliest first, each cut to 2,000 characters. `used_in` are the
    turns whose prompts had the memory, the newest first; all messages of the user since then are read for them.

    Raises:
        NotFound: there is no such memory.
    """
    memory = read_memory(executor, memory_id)
    parameters = {"memory_id": memory_id, "most": _MOST_SOURCES, "most_chars": _SOURCE_CHARS}
    memory["used_in"] = [
        {
            "turn_id": row.turn_id,
            "session_id": row.session_id,
            "conversation": row.conversation,
            "at": row.created_at.isoformat(),
        }
        for row in executor.run(owned_queries.USES, {"memory_id": memory_id, "most": _MOST_SOURCES})
    ]
    memory["sources"] = [
        {
            "message_id": row.message_id,
            "session_id": row.session_id,
            "conversation": row.conversation,
            "channel": row.channel,
            "role": row.role,
            "text": row.text,
            "said_at": row.created_at.isoformat(),
        }
        for row in executor.run(owned_queries.SOURCES, parameters)
    ]
    return memory


def correct(database: Database, clock: Clock, user_id: UserKey, memory_id: UUID, content: str) -> dict[str, Any]:
    """Replace a memory by the user's own words; returns the new memory. A repeated call returns the same memory.

    What the memory had superseded holds again if the new words do not change it. A memory that has ended, and that no
    other has superseded, may be corrected, too: the new one holds. With the words that it has, it holds again itself.

    Raises:
        NotFound: the user has no such memory.
        Conflict: another memory has superseded it.
    """
    content = " ".join(content.split())
    new = new_id(clock)
    with database.transaction("memories.correct") as transaction:
        locked = transaction.run(LOCK_USER, {"user_id": user_id})
        rows = transaction.run(owned_queries.TO_CORRECT, {"memory_id": memory_id, "user_id": user_id}) if locked else ()
        if not rows:
            raise NotFound("There is no such memory.")
        [found] = rows
        if content == found.content:
            if found.superseded_by is None:
                transaction.run(END_AT, {"memory_id": memory_id, "by": None, "at": None})
            return read_memory(transaction, memory_id)
        if content == found.newer_content:
            return read_memory(transaction, found.superseded_by)
        if found.superseded_by is not None:
            raise Conflict("A newer memory has superseded this one. Correct the newer one.")
        given = {"memory_id": memory_id, "new_id": new, "content": content, "user_id": user_id}
        transaction.run(owned_queries.CORRECT, {**given, **_read(content)})
        reopen(transaction, user_id, memory_id)
        return read_memory(transaction, new)


def _read(content: str) -> dict[str, Any]:
    """What the rules read in the words of a correction, for the statement `CORRECT`."""
    if instructs(content):
        return {"instructs": True, "is_read": True, "subject": None, "attribute": None}
    found = read(content)
    is_read = found.attribute is not None or found.taste != 0 or found.subject != USER
    return {"instructs": False, "is_read": is_read, "subject": found.subject, "attribute": found.attribute}


def _body(row: Any) -> dict[str, Any]:
    return {
        "id": row.memory_id,
        "content": row.content,
        "type": row.kind,
        "subject": row.subject,
        "attribute": row.attribute,
        "importance": row.importance,
        "valid_from": row.valid_from.isoformat(),
        "valid_until": None if row.valid_to is None else row.valid_to.isoformat(),
        "message_ids": list(row.message_ids),
    }
