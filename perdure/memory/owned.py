"""A user's own view of what is remembered of them: list the memories, read one, correct one.

A correction is a new memory that supersedes the wrong one and has its sources, or a memory that has its words already.
It also supersedes the current memories that it changes by the rules (`consolidation.judging`), of the `MOST_NEAR` by
words and as many of its attribute. `recall.agent_memory.forget` erases a memory.
Called by `/v1/memories` and `perdure memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.clock import Clock, iso
from perdure.database.engine import Database, Executor
from perdure.errors import Conflict, NotFound
from perdure.ids import new_id
from perdure.memory import owned_queries
from perdure.memory.consolidation.candidates import comparison_key
from perdure.memory.consolidation.judging import Pair, Topic, guard, settle
from perdure.memory.consolidation.merging import QUOTATION_KIND
from perdure.memory.consolidation.queries import ENDED_BY, LOCK_USER
from perdure.memory.consolidation.reopening import current_near, reopen
from perdure.text.injections import instructs
from perdure.text.reading import USER, read
from perdure.text.statements import Relation

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

    Raises:
        NotFound: the user has no memory `after`, so where the list continues is unknown.
    """
    parameters = {"user_id": user_id, "after": after, "limit": limit}
    rows = executor.run(owned_queries.LIST, parameters)
    if not rows and after is not None:
        known = executor.run(owned_queries.OWNER, {"memory_id": after})
        if not known or known[0].user_id != user_id:
            raise NotFound("There is no such memory to continue after: begin the list again, without `after`.")
    return [_body(row) for row in rows]


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
    turns whose prompts or results of `recall` had the memory, the newest first; all messages of the user since then are
    read for them.

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
    """Replace a memory by the user's own words; returns the new memory, or the current one that has these words.

    A repeated call returns the same memory. What the memory had superseded holds again if the new words do not change
    it. A memory that has ended, and that no other has superseded, may be corrected, too: the new one holds. With the
    words that it has, it holds again itself.

    Raises:
        NotFound: the user has no such memory.
        Conflict: another memory has superseded it.
    """
    content = " ".join(content.split())
    found = _read(content)  # the first time takes a part of a second, for which no transaction is open
    with database.transaction("memories.correct") as transaction:
        locked = transaction.run(LOCK_USER, {"user_id": user_id})
        rows = transaction.run(owned_queries.TO_CORRECT, {"memory_id": memory_id, "user_id": user_id}) if locked else ()
        if not rows:
            raise NotFound("There is no such memory.")
        [wrong] = rows
        is_own = content == wrong.content
        if is_own and (wrong.holds or wrong.superseded_by is not None):
            return read_memory(transaction, memory_id)
        if wrong.newer_content is not None and comparison_key(content) == comparison_key(wrong.newer_content):
            return read_memory(transaction, wrong.superseded_by)
        if wrong.superseded_by is not None:
            raise Conflict("A newer memory has superseded this one. Correct the newer one.")
        correction = _Correction(transaction, user_id, memory_id, content, *found)
        same, changed = correction.compared()
        right = memory_id if is_own and same is None else same
        if right is None:
            right = correction.store(new_id(clock))
        else:
            correction.confirm(right)
        correction.end([*changed, memory_id], right)
        return read_memory(transaction, right)


def _read(content: str) -> tuple[bool, Topic | None]:
    """Whether the words of a correction instruct a model, and the topic that the rules read in them."""
    if instructs(content):
        return True, Topic()
    found = read(content)
    is_read = found.attribute is not None or found.taste != 0 or found.subject != USER
    return False, Topic(found.subject, found.attribute or "") if is_read else None


@dataclass(frozen=True, slots=True)
class _Correction:
    """The words `content` that replace the memory `memory_id`, in the caller's transaction.

    `topic` is `None` if the rules read none: the new memory then has the old one's, by which it ends no other memory.
    """

    executor: Executor
    user_id: UserKey
    memory_id: UUID
    content: str
    is_quotation: bool
    topic: Topic | None

    def compared(self) -> tuple[UUID | None, list[UUID]]:
        """The memory that has these words, and the other current ones that they change. Uses no vectors.

        A memory that the corrected one had superseded may have these words, too.
        """
        near = current_near(self.executor, self.user_id, self.content, self.topic or Topic())
        current = [row for row in near if self._fits(row)]
        ended = self.executor.run(ENDED_BY, {"memory_id": self.memory_id, "user_id": self.user_id})
        words = comparison_key(self.content)
        same = [row.memory_id for row in (*current, *ended) if comparison_key(row.content) == words]
        changed = [row.memory_id for row in current if row.memory_id not in same and self._changes(row)]
        return next(iter(same), None), changed

    def store(self, right_id: UUID) -> UUID:
        """Store the words as a memory of its own."""
        topic = self.topic or Topic()
        stored = {
            "memory_id": self.memory_id,
            "new_id": right_id,
            "content": self.content,
            "instructs": self.is_quotation,
            "is_read": self.topic is not None,
            "subject": topic.subject or None,
            "attribute": topic.attribute or None,
        }
        self.executor.run(owned_queries.CORRECT, stored)
        return right_id

    def confirm(self, right_id: UUID) -> None:
        """Let the memory that has these words hold, as its owner's own."""
        confirmed = {"memory_id": self.memory_id, "confirmed_id": right_id, "user_id": self.user_id}
        self.executor.run(owned_queries.CONFIRM, confirmed)

    def end(self, memory_ids: Sequence[UUID], by: UUID) -> None:
        """End memories now, and let what the corrected one had superseded hold again."""
        ended = [each for each in memory_ids if each != by]
        self.executor.run(owned_queries.END, {"memory_ids": ended, "by": by, "user_id": self.user_id})
        if by != self.memory_id:
            reopen(self.executor, self.user_id, self.memory_id)

    def _fits(self, row: Any) -> bool:
        """Whether the row is another memory. What instructs a model is compared with the same text only."""
        if row.memory_id == self.memory_id:
            return False
        return bool(row.content == self.content if self.is_quotation else row.kind != QUOTATION_KIND)

    def _changes(self, row: Any) -> bool:
        pair = Pair(row.content, self.content)
        topics = Topic(row.subject or "", row.attribute or ""), self.topic or Topic()
        settled = settle(pair, guard(pair, threshold=1.0), None, topics, is_named=False)
        return settled.relation is Relation.CHANGES


def _body(row: Any) -> dict[str, Any]:
    return {
        "id": row.memory_id,
        "content": row.content,
        "type": row.kind,
        "subject": row.subject,
        "attribute": row.attribute,
        "importance": row.importance,
        "valid_from": row.valid_from.isoformat(),
        "valid_until": iso(row.valid_to),
        "message_ids": list(row.message_ids),
    }
