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
from perdure.memory.consolidation.judging import Topic
from perdure.memory.consolidation.queries import LOCK_USER

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

    Raises:
        NotFound: the user has no such memory.
        Conflict: another memory has superseded it.
    """
    content = " ".join(content.split())
    new, topic = new_id(clock), Topic.of(content)
    with database.transaction("memories.correct") as transaction:
        locked = transaction.run(LOCK_USER, {"user_id": user_id})
        rows = transaction.run(owned_queries.TO_CORRECT, {"memory_id": memory_id, "user_id": user_id}) if locked else ()
        if not rows:
            raise NotFound("There is no such memory.")
        [found] = rows
        if content in (found.content, found.newer_content):
            return read_memory(transaction, memory_id if content == found.content else found.superseded_by)
        if not found.holds:
            raise Conflict("A newer memory has superseded this one. Correct the newer one.")
        correction = {
            "memory_id": memory_id, "new_id": new, "content": content, "subject": topic.subject or None,
            "attribute": topic.attribute or None, "user_id": user_id,
        }  # fmt: skip
        transaction.run(owned_queries.CORRECT, correction)
        return read_memory(transaction, new)


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
