"""Deletes the snapshots of an ending session from PostgreSQL and from the snapshot store.

Whichever snapshot store is configured, PostgreSQL also stores the session's working variables.
"""

from __future__ import annotations

from uuid import UUID

from perdure.database.engine import Executor
from perdure.snapshots import queries
from perdure.snapshots.store import SnapshotStore


def delete_snapshots(executor: Executor, store: SnapshotStore, session_id: UUID) -> None:
    """Delete the session's snapshot, and the session's working variables of all ticks. Safe to repeat.

    Raises:
        SnapshotUnavailable: the store cannot be used now; the rows in PostgreSQL are already deleted.
    """
    executor.run(queries.DELETE, {"session_id": session_id})
    store.delete(session_id)
