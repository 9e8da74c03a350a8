"""Erasing a user: what they said, what was made of it, and every trace of it outside PostgreSQL.

One transaction raises the tokens of their sessions and deletes every row, so that whoever runs a
turn or a consolidation of theirs writes nothing any more. What is in Redis and in a store of
snapshots goes right after it, and once more after one lease: a process that was paused after its
last commit may still have written there. That second pass is a row of its own, which the sweeper
works off, whatever dies meanwhile. It also has the planner's statistics and the file of an embedded Redis forget
what was deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.errors import Unavailable
from perdure.ids import new_id
from perdure.memory.redis.memory import RedisMemory
from perdure.snapshots.store import SnapshotStore
from perdure.users import queries
from perdure.users.statistics import forget_samples

log = logging.getLogger(__name__)

_MOST_A_ROUND = 20


@dataclass(frozen=True, slots=True)
class ErasureResult:
    """Rows that went, by table. `everywhere` says that Redis and the snapshots are clean already, too.

    Where they are not, they will be: by the pass that comes after one lease.
    """

    rows: dict[str, int]
    everywhere: bool


class RedisFile(Protocol):
    """The file that Redis writes its commands to, where that is perdure's own to rewrite."""

    def rewrite(self) -> None:
        """Begin to write it anew from what Redis holds now, unless that was begun a moment ago.

        Raises:
            Unavailable: Redis cannot be reached.
        """
        ...

    def rewritten(self, erasures: Collection[UUID]) -> Collection[UUID]:
        """Those of `erasures`, whose keys are deleted, that are gone from the file. The others need another call.

        Raises:
            Unavailable: Redis cannot be reached.
        """
        ...


@dataclass(frozen=True, slots=True)
class Eraser:
    """What erasing takes. `redis_memory` is None where this process knows no Redis: then a worker cleans it.

    `file` is None if Redis is another's: its operator has it rewritten (docs/operating.md).
    """

    database: Database
    clock: Clock
    snapshots: SnapshotStore
    redis_memory: RedisMemory | None
    lease_s: float
    file: RedisFile | None = None

    def erase(self, user_id: str) -> ErasureResult:
        """Erase all that is held of a user. One who is not known has nothing: that is no error.

        Raises:
            Unavailable: the database cannot be reached; it may be tried again.
        """
        asked = {"user_id": user_id}
        with self.database.transaction("erasure.erase") as transaction:
            transaction.run(queries.RAISE_TOKENS, asked)
            transaction.run(queries.LOCK_USER, asked)
            # Once more: a session may have been opened before the user was locked.
            sessions = [row.session_id for row in transaction.run(queries.RAISE_TOKENS, asked)]
            transaction.run(queries.LOCK_CASES, asked)
            rows = {table: transaction.run(delete, asked)[0].gone for table, delete in queries.ERASE.items()}
            left = {"erasure_id": new_id(self.clock), "session_ids": sessions, "lease_s": self.lease_s, **asked}
            noted = transaction.run(queries.NOTE, left)[0]
        log.info("a user was erased: %d rows, %d sessions", sum(rows.values()), len(sessions))
        return ErasureResult(rows, self._cleaned(user_id, sessions, noted.erased_at))

    def finish_due(self) -> int:
        """Do the second pass of the erasures that are a lease old; how many are done with.

        Raises:
            Unavailable: the database cannot be reached.
        """
        due = self.database.run(queries.DUE, {"most": _MOST_A_ROUND, "lease_s": self.lease_s})
        clean = {
            row.erasure_id
            for row in due
            if self.redis_memory is not None and self._cleaned(row.user_id, row.session_ids, row.erased_at)
        }
        gone = self._gone_for_good(clean) if clean else clean
        for row in due:
            done = queries.FINISH if row.erasure_id in gone else queries.POSTPONE
            self.database.run(done, {"erasure_id": row.erasure_id, "lease_s": self.lease_s})
        return len(gone)

    def _gone_for_good(self, clean: Collection[UUID]) -> Collection[UUID]:
        """Those whose texts are gone from the statistics and from Redis's file, too."""
        forget_samples(self.database)
        if self.file is None:
            return clean
        try:
            return self.file.rewritten(clean)
        except Unavailable as error:
            log.warning("erased texts are in Redis's file still, and are seen to again: %s", error.message)
            return ()

    def _cleaned(self, user_id: str, sessions: Sequence[UUID], until: datetime) -> bool:
        """Whether all that is kept of these sessions outside PostgreSQL is gone."""
        try:
            for session_id in sessions:
                self.snapshots.delete(session_id)
            if self.redis_memory is None:
                return False
            self.redis_memory.stream.trim_session(user_id, None, until)
            for session_id in sessions:
                self.redis_memory.working.forget(session_id)
            if self.file is not None:
                self.file.rewrite()
        except Unavailable as error:
            log.warning("an erased user's traces are not gone yet, and are seen to again: %s", error.message)
            return False
        return True
