"""Stores a memory, as the tool `remember` does."""

from __future__ import annotations

from perdure.access.tenants import UserKey
from perdure.ids import new_id
from perdure.memory.recall.agent_memory_queries import REMEMBER
from perdure.runtime import Runtime


def add_memory(runtime: Runtime, user: UserKey, content: str) -> str:
    """Store a fact about the user without a source; returns its id."""
    memory_id = new_id(runtime.clock)
    given = {"memory_id": memory_id, "user_id": user, "kind": "fact", "content": content, "importance": 0.5}
    given |= {"channel": "http", "session_id": None, "subject": "user", "attribute": None}
    assert runtime.database.run(REMEMBER, given)
    return str(memory_id)
