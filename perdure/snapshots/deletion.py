"""Deletes the snapshots of a session that ends, in PostgreSQL and in the snapshot store.

PostgreSQL has rows to delete whatever the snapshot store is.
"""

from __future__ import annotations

from uuid import UUID

from perdure.database.engine import Executor
from perdure.snapshots import queries
from perdure.snapshots.store import SnapshotStore


def delete_snapshots(executor: Executor, store: SnapshotStore, session_id: UUID) -> None:
    """Delete the session's working variables, their history, and its snapshot. Safe to repeat.

    Raises:
        SnapshotUnavailable: the store cannot be used now; the rows in PostgreSQL are deleted.
        Unavailable: the database cannot be reached.
    """
    executor.run(queries.DELETE, {"session_id": session_id})
    store.delete(session_id)
