"""Lets memories hold again that a wrong memory had ended.

A memory ends when a later one changes it. If the later one is forgotten, or corrected to words that change nothing, the
earlier one holds again, unless another current memory changes it. What its owner has corrected stays ended.

Called in the transaction that forgets or corrects a memory, under the user's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.database.engine import Executor
from perdure.memory.consolidation import queries
from perdure.memory.consolidation.judging import Pair, Topic, guard
from perdure.memory.consolidation.merging import MOST_NEAR, QUOTATION_KIND
from perdure.text.reading import SINGLE
from perdure.text.statements import Relation

_NO_VECTORS: dict[str, Any] = {"embedder_id": 0, "vector": None, "named": [], "most": MOST_NEAR}


def reopen(executor: Executor, user_id: UserKey, memory_id: UUID) -> None:
    """Let the memories hold again that the memory `memory_id` has superseded, which holds no longer itself."""
    for ended in executor.run(queries.ENDED_BY, {"memory_id": memory_id, "user_id": user_id}):
        newer = _newer(executor, user_id, ended, memory_id)
        at = None if newer is None else newer.valid_from
        by = None if newer is None else newer.memory_id
        executor.run(queries.END_AT, {"memory_id": ended.memory_id, "by": by, "at": at})


def current_near(executor: Executor, user_id: UserKey, content: str, topic: Topic) -> Sequence[Any]:
    """The current memories near a content by words, or of its topic, as rows of `queries.SIMILAR`. Uses no vectors."""
    sought = {
        "user_id": user_id,
        "content": content,
        "said_at": "infinity",  # only what holds
        "subject": topic.subject,
        "attribute": topic.attribute,
    }
    return executor.run(queries.SIMILAR, {**sought, **_NO_VECTORS})


def _newer(executor: Executor, user_id: UserKey, ended: Any, wrong_id: UUID) -> Any | None:
    """The row of the earliest current memory, besides `wrong_id`, that changes the memory `ended`."""
    topic = Topic(ended.subject or "", ended.attribute or "")
    found = [
        row
        for row in current_near(executor, user_id, ended.content, topic)
        if row.kind != QUOTATION_KIND and row.memory_id != wrong_id and row.valid_from >= ended.valid_from
        if _changes(ended.content, topic, row)
    ]
    return min(found, key=lambda row: row.valid_from, default=None)


def _changes(content: str, topic: Topic, row: Any) -> bool:
    relation = guard(Pair(content, row.content), threshold=1.0)
    is_value = topic.attribute in SINGLE and topic.is_one_with(Topic(row.subject or "", row.attribute or ""))
    return relation is Relation.CHANGES or (relation is Relation.UNKNOWN and is_value)
