"""Erasing a user: what they said, what was made of it, and every trace of it outside PostgreSQL.

One transaction raises the tokens of their sessions and deletes every row, so that whoever runs a
turn or a consolidation of theirs writes nothing any more. What is in Redis and in a store of
snapshots goes right after it, and once more after one lease: a process that was paused after its
last commit may still have written there. That second pass is a row of its own, which the sweeper
works off, whatever dies meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.errors import Unavailable
from perdure.ids import new_id
from perdure.memory import erasure_queries as queries
from perdure.memory.volatile import Volatile
from perdure.snapshots.store import SnapshotStore

log = logging.getLogger(__name__)

_MOST_A_ROUND = 20


@dataclass(frozen=True, slots=True)
class Erased:
    """Rows that went, by table. `everywhere` says that Redis and the snapshots are clean already, too.

    Where they are not, they will be: by the pass that comes after one lease.
    """

    rows: dict[str, int]
    everywhere: bool


@dataclass(frozen=True, slots=True)
class Eraser:
    """What erasing takes. `volatile` is None where this process knows no Redis: then a worker cleans it."""

    database: Database
    clock: Clock
    snapshots: SnapshotStore
    volatile: Volatile | None
    lease_s: float

    def erase(self, user_id: str) -> Erased:
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
        return Erased(rows, self._cleaned(user_id, sessions, noted.erased_at))

    def finish_due(self) -> int:
        """Do the second pass of the erasures that are a lease old; how many are done with.

        Raises:
            Unavailable: the database cannot be reached.
        """
        done = 0
        for row in self.database.run(queries.DUE, {"most": _MOST_A_ROUND, "lease_s": self.lease_s}):
            asked = {"erasure_id": row.erasure_id, "lease_s": self.lease_s}
            if self.volatile is not None and self._cleaned(row.user_id, row.session_ids, row.erased_at):
                self.database.run(queries.FINISH, asked)
                done += 1
            else:
                self.database.run(queries.POSTPONE, asked)
        return done

    def _cleaned(self, user_id: str, sessions: Sequence[UUID], until: datetime) -> bool:
        """Whether all that is kept of these sessions outside PostgreSQL is gone."""
        try:
            for session_id in sessions:
                self.snapshots.delete(session_id)
            if self.volatile is None:
                return False
            self.volatile.stream.trim_session(user_id, None, until)
            for session_id in sessions:
                self.volatile.working.forget(session_id)
        except Unavailable as error:
            log.warning("an erased user's traces are not gone yet, and are seen to again: %s", error.message)
            return False
        return True
