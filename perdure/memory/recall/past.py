"""What memory has for a turn's prompt besides the search: the user's past, and what surrounds the recalled memories.

Each function runs at most one statement, which reads a bounded number of rows. `turns.prompt` calls them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from perdure.access.tenants import UserKey, tenant_of
from perdure.database.engine import Executor
from perdure.memory.recall import past_queries
from perdure.memory.recall.search import Layer, Recalled
from perdure.text.untrusted import cut

_SOURCE_CHARS = 300
_HOT = 100
_SOURCES = 3
_ENTITIES = 20
_FAN_OUT = 20
_RELATIONS = 60


@dataclass(frozen=True, slots=True)
class Dated:
    """A text and its time. `id` is that of its session or memory."""

    at: datetime
    content: str
    id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """What a user's past has for a prompt, regardless of the question.

    `searchable`: the user has other sessions or memories. `summaries` of earlier sessions are newest first, `hot`
    memories by rank. `related_sessions` are the other sessions in the fork tree. `has_cases`: the bank has cases that
    the user may see.
    """

    searchable: bool = False
    has_cases: bool = False
    summaries: Sequence[Dated] = ()
    hot: Sequence[Dated] = ()
    related_sessions: Sequence[UUID] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The relations of the entities in recalled memories, nearest first, and each memory's sources, newest first."""

    relations: Sequence[str] = ()
    sources: Mapping[UUID, Sequence[Dated]] = field(default_factory=dict)


def past_parameters(
    user_id: UserKey,
    session_id: UUID,
    *,
    previous_id: UUID | None,
    most_summaries: int,
    bank: str | None,
    embedder: str,
    authors: Sequence[UserKey],
    all_cases: bool,
) -> dict[str, Any]:
    """The parameters of `past_queries.PAST`: the past of a session's user, without the session `previous_id`.

    `has_cases` counts the cases in `bank` whose vectors `embedder` made, of `authors` (user keys) and those shared with
    the user's tenant; with `all_cases`, of all users. A `bank` of `None` has no cases.
    """
    return {
        "user_id": user_id,
        "authors": authors,
        "tenant": tenant_of(user_id),
        "session_id": session_id,
        "previous_id": previous_id,
        "archive": most_summaries,
        "hot": _HOT,
        "embedder": embedder,
        "all_cases": all_cases,
        "bank": bank,
    }


def read_past(executor: Executor, parameters: Mapping[str, Any]) -> Past:
    """Read what `past_parameters` describes."""
    [row] = executor.run(past_queries.READ_PAST, parameters)
    return past_of(row.past)


def past_of(read: str | None) -> Past:
    """The past in a value of `past_queries.PAST`."""
    rows = [_Row(*each) for each in json.loads(read or "[]")]
    return Past(
        searchable=any(row.section == "past" for row in rows),
        has_cases=any(row.section == "bank" for row in rows),
        summaries=[row.dated() for row in rows if row.section == "archive"],
        hot=[row.dated() for row in rows if row.section == "meta"],
        related_sessions=[UUID(row.content) for row in rows if row.section == "kin"],
    )


class _Row(NamedTuple):
    section: str
    content: str
    at: str
    id: str

    def dated(self) -> Dated:
        return Dated(datetime.fromisoformat(self.at), self.content, UUID(self.id))


def read_surroundings(executor: Executor, user_id: UserKey, recalled: Sequence[Recalled]) -> Surroundings:
    """Read the surroundings of the memories in `recalled`. Runs no statement if there are none."""
    memory_ids = [UUID(str(each.id)) for each in recalled if each.layer is Layer.SEMANTIC]
    if not memory_ids:
        return Surroundings()
    rows = executor.run(
        past_queries.AROUND,
        {
            "user_id": user_id,
            "memory_ids": memory_ids,
            "entities": _ENTITIES,
            "fan_out": _FAN_OUT,
            "relations": _RELATIONS,
            "sources": _SOURCES,
            "most_chars": _SOURCE_CHARS,
        },
    )
    sources: dict[UUID, list[Dated]] = {}
    for row in rows:
        if row.section == "source":
            sources.setdefault(row.memory_id, []).append(Dated(row.at, cut(row.content, _SOURCE_CHARS)))
    return Surroundings([row.content for row in rows if row.section == "concepts"], sources)
