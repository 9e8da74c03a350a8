"""Snapshots out of the system and back into it, as an operator asks.

Out goes the snapshot of the last commit with the messages that are pending now, assembled from PostgreSQL; a store
elsewhere holds a copy. Back come the working variables only, under the session's present tick: the transcript is
never rewritten, and `turns.restoring` accepts the pending messages again. The caller holds the session's lease while
it puts the variables back, under a token of its own, so that no turn begins with what is about to be replaced. The
order is a step's: the store saves, then one statement commits, so that what is not committed does not count.
"""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from perdure.database.engine import Database, Executor, as_json
from perdure.database.fencing import Fence
from perdure.errors import Conflict, NotFound
from perdure.snapshots import queries
from perdure.snapshots.codec import checked_variables
from perdure.snapshots.postgres import PostgresSnapshots, put_together
from perdure.snapshots.snapshot import HISTORY_TURNS, AgentSnapshot
from perdure.snapshots.store import SnapshotStore


def read(executor: Executor, session_id: UUID, history_turns: int = HISTORY_TURNS) -> AgentSnapshot:
    """The snapshot of the session's last commit with the messages of its last `history_turns` turns.

    That of an ended session has no working variables.

    Raises:
        NotFound: there is no such session.
        InvalidRequest: what is kept of it is damaged.
    """
    rows = executor.run(queries.PRESENT, {"session_id": session_id, "history_turns": history_turns})
    if not rows:
        raise NotFound("There is no such session.")
    return put_together(session_id, rows[0]).snapshot


def restore(database: Database, store: SnapshotStore, snapshot: AgentSnapshot, lease_s: float) -> None:
    """Put the variables of `snapshot` back into its session; a store elsewhere gets its pending events, too.

    Raises:
        NotFound: there is no such session.
        Conflict: it is over, a turn of it has begun, or it is at another tick; nothing was changed.
        SnapshotUnavailable: the store cannot be used; nothing was changed.
        Unavailable: the database cannot be reached; doing it again is safe.
    """
    asked = {"session_id": snapshot.agent_id, "tick": snapshot.tick_index, "lease_s": lease_s}
    taken = database.run(queries.TAKE, asked)
    if not taken:
        raise _refused(database, snapshot)
    fence = Fence(taken[0].token, taken[0].nonce)
    try:
        _put_back(database, store, snapshot, fence)
    except BaseException:
        database.run(queries.GIVE_BACK, fence.on(snapshot.agent_id))
        raise


def _put_back(database: Database, store: SnapshotStore, snapshot: AgentSnapshot, fence: Fence) -> None:
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
    if not database.run(queries.PUT_BACK, {**fence.on(snapshot.agent_id), "variables": kept, "elsewhere": elsewhere}):
        raise Conflict("That session was taken over meanwhile. Nothing was put back.")


def _refused(executor: Executor, snapshot: AgentSnapshot) -> NotFound | Conflict:
    rows = executor.run(queries.STANDING, {"session_id": snapshot.agent_id})
    if not rows:
        return NotFound(f"There is no session {snapshot.agent_id}.")
    if rows[0].over:
        return Conflict("That session has ended, or is about to: nothing can be put back into it.")
    if rows[0].tick != snapshot.tick_index:
        return Conflict(
            f"The snapshot is of tick {snapshot.tick_index}, and the session is at tick {rows[0].tick}: only one of "
            "the last commit can be put back. To go on from an earlier tick, fork the session there."
        )
    return Conflict("That session is busy with a turn: wait until it is settled.")
