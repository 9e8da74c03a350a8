"""Forgetting a session's snapshot: the last thing that is done with it, when the session ends.

State is there to survive a crash, and an ended session has nothing left to survive. Both are
deleted: what PostgreSQL keeps of every session, whatever the store, and what the store keeps.
"""

from __future__ import annotations

from uuid import UUID

from perdure.database.engine import Executor
from perdure.snapshots import queries
from perdure.snapshots.store import SnapshotStore


def forget(executor: Executor, store: SnapshotStore, session_id: UUID) -> None:
    """Delete the session's working variables, their history, and its snapshot. Safe to repeat.

    Raises:
        SnapshotUnavailable: the store cannot be used now; what PostgreSQL kept is gone.
        Unavailable: the database cannot be reached.
    """
    executor.run(queries.DELETE, {"session_id": session_id})
    store.delete(session_id)
