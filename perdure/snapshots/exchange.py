"""Export and import of snapshots, for operators.

`read` assembles an export from PostgreSQL: the session's state after its last commit, and the pending messages.

`restore` imports only the working variables. It changes neither the session's tick nor the transcript. The module
`turns.restore_snapshot` imports the pending messages.

`restore` works in three steps:

1. `restore` claims the session's lease, so no turn begins with variables that are about to be replaced.
2. `restore` saves the snapshot in the configured snapshot store, if this store is not PostgreSQL.
3. One statement commits the variables to PostgreSQL and releases the lease. If this statement does not commit, the
   engine does not use the snapshot that step 2 saved.
"""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from perdure.database.engine import Database, Executor, as_json
from perdure.database.fencing import Fence
from perdure.errors import Conflict, NotFound
from perdure.snapshots import queries
from perdure.snapshots.codec import checked_variables
from perdure.snapshots.postgres import PostgresSnapshots, assemble
from perdure.snapshots.snapshot import HISTORY_TURNS, AgentSnapshot
from perdure.snapshots.store import SnapshotStore


def read(executor: Executor, session_id: UUID, history_turns: int = HISTORY_TURNS) -> AgentSnapshot:
    """The snapshot of the session's last commit. It contains the messages of the last `history_turns` turns.

    The snapshot of an ended session has no working variables.

    Raises:
        NotFound: there is no such session.
        InvalidRequest: the stored variables are damaged.
    """
    rows = executor.run(queries.PRESENT, {"session_id": session_id, "history_turns": history_turns})
    if not rows:
        raise NotFound("There is no such session.")
    return assemble(session_id, rows[0]).snapshot


def restore(database: Database, store: SnapshotStore, snapshot: AgentSnapshot, lease_s: float) -> None:
    """Replace the session's working variables by those of `snapshot`.

    A store other than PostgreSQL also saves the pending events of `snapshot`.

    Raises:
        NotFound: there is no such session.
        Conflict: the session has ended, runs a turn, is at another tick or was claimed by another process; its
            variables are unchanged.
        SnapshotUnavailable: the store cannot be used; nothing was changed.
        Unavailable: the database cannot be reached; a retry is safe.
    """
    parameters = {"session_id": snapshot.agent_id, "tick": snapshot.tick_index, "lease_s": lease_s}
    claimed = database.run(queries.CLAIM_FOR_IMPORT, parameters)
    if not claimed:
        raise _refused(database, snapshot)
    fence = Fence(claimed[0].token, claimed[0].nonce)
    try:
        _restore_variables(database, store, snapshot, fence)
    except BaseException:
        database.run(queries.RELEASE, fence.on(snapshot.agent_id))
        raise


def _restore_variables(database: Database, store: SnapshotStore, snapshot: AgentSnapshot, fence: Fence) -> None:
    variables = snapshot.memory.working_variables
    elsewhere = not isinstance(store, PostgresSnapshots)
    if elsewhere:
        present = read(database, snapshot.agent_id)
        memory = replace(present.memory, working_variables=variables, extra=snapshot.memory.extra)
        queued = present.event_queue_backup
        events = (*queued, *(event for event in snapshot.event_queue_backup if event not in queued))
        merged = replace(present, memory=memory, event_queue_backup=events, extra=snapshot.extra)
        store.save(merged, fence.token)
    kept = as_json(checked_variables(variables))
    if not database.run(queries.RESTORE, {**fence.on(snapshot.agent_id), "variables": kept, "elsewhere": elsewhere}):
        raise Conflict("Another process claimed that session during the import. Nothing was restored.")


def _refused(executor: Executor, snapshot: AgentSnapshot) -> NotFound | Conflict:
    rows = executor.run(queries.STANDING, {"session_id": snapshot.agent_id})
    if not rows:
        return NotFound(f"There is no session {snapshot.agent_id}.")
    if rows[0].over:
        return Conflict("That session has ended, or is about to: nothing can be restored in it.")
    if rows[0].tick != snapshot.tick_index:
        return Conflict(
            f"The snapshot is of tick {snapshot.tick_index}, and the session is at tick {rows[0].tick}: only a "
            "snapshot of the last commit can be restored. To continue from an earlier tick, fork the session there."
        )
    return Conflict("That session is busy with a turn: wait until it is settled.")
