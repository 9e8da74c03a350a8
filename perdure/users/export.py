"""Exports all data about a user as one JSON document, from the tables whose rows an erasure deletes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from sqlalchemy import Row

from perdure.access.tenants import UserKey, decider_of, user_of
from perdure.clock import Clock
from perdure.database.engine import Executor
from perdure.database.paging import pages
from perdure.errors import NotFound
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.stream import MAX_ENTRIES
from perdure.text.chunks import json_list
from perdure.users.export_queries import EXPORT


def export_user(executor: Executor, clock: Clock, redis_memory: RedisMemory | None, user: UserKey) -> dict[str, Any]:
    """The document of `export_text`."""
    document: dict[str, Any] = json.loads("".join(export_text(executor, clock, redis_memory, user)))
    return document


def export_text(executor: Executor, clock: Clock, redis_memory: RedisMemory | None, user: UserKey) -> Iterator[str]:
    """Yield the text of a JSON document with the user's rows, by table, and the events of the user's Redis stream.

    `user` is the user key; the document shows only the user's id, without the tenant. It omits working memory and
    snapshots, because they are copies of these rows. Rows are read page by page. No transaction is open between two
    pages, so rows that are written or deleted during the export may be missing.

    Raises:
        NotFound: there is no data about that user. At most a few thousand characters have been yielded.
    """
    yield f'{{"user_id": {json.dumps(user_of(user), ensure_ascii=False)}, "exported_at": "{clock.now().isoformat()}"'
    found = False
    before = ', "tables": {'
    for table, (read, key) in EXPORT.items():
        given = {"user_id": user, **dict.fromkeys(key)}
        yield f'{before}"{table}": '
        before = ", "
        kept = ([_with_id(row.kept) for row in page] for page in pages(executor, read, given, partial(_place, key)))
        for number, piece in enumerate(json_list(kept)):
            found = found or number > 0
            yield piece
    if not found:
        raise NotFound("There is no data about that user.")
    events = redis_memory.stream.recent(user, MAX_ENTRIES) if redis_memory is not None else []
    shown = [{"kind": each.kind, "channel": each.channel, "at": each.at.isoformat(), "by": each.by} for each in events]
    yield f'}}, "stream": {json.dumps(shown, ensure_ascii=False)}}}'


def _place(key: dict[str, str], row: Row[Any]) -> dict[str, Any]:
    return {parameter: getattr(row, column) for parameter, column in key.items()}


def _with_id(row: dict[str, Any]) -> dict[str, Any]:
    user = {"user_id": user_of(UserKey(row["user_id"]))} if row.get("user_id") else {}
    decider = {"decided_by": decider_of(row["decided_by"])} if row.get("decided_by") else {}
    return {**row, **user, **decider}
