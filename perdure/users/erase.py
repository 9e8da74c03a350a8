"""Erases a user: the user's messages, all data derived from the messages, and the copies outside PostgreSQL.

One transaction raises the fences of the user's sessions and deletes the user's rows. Processes that still run a turn or
a consolidation of the user can then no longer write to PostgreSQL. The user's data in Redis and in the snapshot store
is deleted right after the commit, and again in a second pass after the duration of a lease. Until the second pass, a
process that was paused after its last commit may still write to Redis or the store. The second pass also deletes the
files that were being stored during the erasure.

The transaction inserts a row in `erasures`, so that a worker's upkeep runs the second pass even if this process
crashes. The second pass also removes the deleted texts from the file of an embedded Redis. Workers remove them from the
planner's statistics (`perdure.users.statistics`); the erasure does not wait for that.

Each function raises `Unavailable` if the service that it calls, PostgreSQL or Redis, cannot be reached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.errors import Unavailable, loggable
from perdure.files import queries as files
from perdure.files.store import Files, release
from perdure.ids import new_id, part_task_id
from perdure.memory.redis.memory import RedisMemory
from perdure.snapshots.store import SnapshotStore
from perdure.users import queries
from perdure.users.tables import SHARED_TABLES, USER_TABLES

log = logging.getLogger(__name__)

_MOST_A_ROUND = 20


@dataclass(frozen=True, slots=True)
class ErasureResult:
    """The number of deleted rows of each table.

    `everywhere` tells that the user's data in Redis and in the snapshot store is deleted. If it is not, the second pass
    deletes it.
    """

    rows: dict[str, int]
    everywhere: bool


class RedisFile(Protocol):
    """The append-only file of a Redis that perdure runs itself."""

    def rewrite(self) -> None:
        """Start a rewrite of the file from Redis's present data, unless a rewrite has just started."""
        ...

    def rewritten(self, erasures: Collection[UUID]) -> Collection[UUID]:
        """The ids of those `erasures` whose data the file no longer contains.

        Before each call, delete the erased users' keys from Redis. Call this again for the ids that are not returned.
        """
        ...


@dataclass(frozen=True, slots=True)
class Eraser:
    """Erases users. `redis_memory` is `None` in a process without Redis: a worker then cleans Redis.

    `file` is `None` for an external Redis, whose operator rewrites the file (docs/operating.md). `revoke` makes
    Celery's workers discard tasks, and returns whether the broker was reached. If `revoke` is `None`, a round of a
    worker's upkeep revokes the tasks.
    """

    database: Database
    clock: Clock
    snapshots: SnapshotStore
    redis_memory: RedisMemory | None
    lease_s: float
    files: Files
    file: RedisFile | None = None
    revoke: Callable[[Sequence[UUID]], bool] | None = None

    def erase(self, user_id: UserKey) -> ErasureResult:
        """Erase all data of a user. An unknown user is not an error.

        Raises:
            Unavailable: the database cannot be reached; a retry is safe.
        """
        user = {"user_id": user_id}
        self.database.run(queries.FORGET_DECIDER, user)
        with self.database.transaction("erasure.erase") as transaction:
            transaction.run(queries.RAISE_TOKENS, user)
            transaction.run(queries.LOCK_USER, user)
            # Again: a session may have opened before the user was locked.
            sessions = [row.session_id for row in transaction.run(queries.RAISE_TOKENS, user)]
            transaction.run(queries.LOCK_CASES, user)
            task_ids = _task_ids(transaction.run(queries.QUEUED_CALLS, user))
            rows = {table: transaction.run(delete, user)[0].gone for table, delete in queries.ERASE.items()}
            owned = transaction.run(files.DELETE_OF_USER, user)
            rows |= {"files": len(owned), "file_contents": release(transaction, [row.content_id for row in owned])}
            second_pass = {
                "erasure_id": new_id(self.clock),
                "session_ids": sessions,
                "task_ids": task_ids,
                "tables": [*(each.table for each in USER_TABLES), *SHARED_TABLES],
                "lease_s": self.lease_s,
                **user,
            }
            erasure = transaction.run(queries.NOTE, second_pass)[0]
        log.info("a user was erased: %d rows, %d sessions", sum(rows.values()), len(sessions))
        return ErasureResult(rows, self._clean(user_id, sessions, erasure.erased_at))

    def finish_due(self) -> int:
        """Run the second pass of the erasures that are due; returns the number of finished erasures."""
        self._revoke_tasks()
        due = self.database.run(queries.DUE, {"most": _MOST_A_ROUND, "lease_s": self.lease_s})
        revoked = self._revoke(due)
        for row in due:
            self._delete_late_files(row)
        clean = {
            row.erasure_id
            for row in due
            if self.redis_memory is not None
            and self._clean(UserKey(row.user_id), row.session_ids, row.erased_at)
            and (revoked or not row.task_ids)
        }
        finished = self._purge_file(clean) if clean else clean
        for row in due:
            self.database.run(queries.FORGET_DECIDER, {"user_id": row.user_id})  # a request ran during the first pass
            statement = queries.FINISH if row.erasure_id in finished else queries.POSTPONE
            self.database.run(statement, {"erasure_id": row.erasure_id, "lease_s": self.lease_s})
        return len(finished)

    def _delete_late_files(self, erasure: Row[Any]) -> None:
        given = {"user_id": erasure.user_id, "erased_at": erasure.erased_at}
        with self.database.transaction("erasure.late_files") as transaction:
            late = transaction.run(files.DELETE_OF_ERASED_USER, given)
            release(transaction, [row.content_id for row in late])

    def _revoke_tasks(self) -> None:
        """Revoke the Celery tasks of the erasures whose tasks are not revoked yet.

        The second pass revokes the tasks again, because a paused worker may still send a task.
        """
        due = self.database.run(queries.TO_REVOKE, {"most": _MOST_A_ROUND})
        if due and self._revoke(due):
            self.database.run(queries.REVOKED, {"erasure_ids": [row.erasure_id for row in due]})

    def _revoke(self, erasures: Sequence[Row[Any]]) -> bool:
        """Revoke the tasks of `erasures` in one broadcast, because each broadcast may have to wait for the broker.

        Returns whether the tasks are revoked.
        """
        task_ids = [task_id for row in erasures for task_id in row.task_ids]
        return not task_ids or (self.revoke is not None and self.revoke(task_ids))

    def _purge_file(self, clean: Collection[UUID]) -> Collection[UUID]:
        """Remove erased texts from Redis's file; returns the finished erasures."""
        if self.file is None:
            return clean
        try:
            return self.file.rewritten(clean)
        except Unavailable as error:
            log.warning("erased texts are still in Redis's file; the next pass retries: %s", loggable(error))
            return ()

    def _clean(self, user_id: UserKey, sessions: Sequence[UUID], until: datetime) -> bool:
        """Delete a user's data outside PostgreSQL; returns whether that succeeded.

        Events in the user's stream that are later than `until` are kept.
        """
        try:
            self.files.collect()
            for session_id in sessions:
                self.snapshots.delete(session_id)
            if self.redis_memory is None:
                return False
            self.redis_memory.stream.trim_session(user_id, None, until)
            for session_id in sessions:
                self.redis_memory.working.forget(session_id)
                self.redis_memory.events.forget(session_id)
            if self.file is not None:
                self.file.rewrite()
        except Exception as error:  # noqa: BLE001 (a third party's store must not hold up other erasures)
            log.warning("an erased user's copies outside PostgreSQL remain; the next pass retries: %s", loggable(error))
            return False
        return True


def _task_ids(calls: Sequence[Row[Any]]) -> list[UUID]:
    """The ids of the queued tasks of `calls`, which are rows of `queries.QUEUED_CALLS`."""
    ids: list[UUID] = []
    for call in calls:
        ids += [part_task_id(call.effect_id, part) for part in call.parts] if call.is_list else [call.effect_id]
    return ids
