"""Loads a session's snapshot from the configured store after a claim, and saves it before the reply.

Every step commits the working variables to PostgreSQL, so the PostgreSQL store needs no save. With another store, the
runner takes three steps at the end of a turn:

1. It commits the turn's verdict as unsaved (`queries.KEEP_UNSAVED`). Callers of the API do not see an unsaved verdict.
2. It saves the snapshot with the session's fencing token and with the tick that step 3 will commit.
3. It settles the turn.

If the worker crashes after step 1, the next worker repeats steps 2 and 3 without calling the model again.

Each function that runs a statement raises `Unavailable` if the database cannot be reached.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row

from perdure.database.engine import Database
from perdure.errors import PerdureError, loggable
from perdure.models.protocol import Message, Role, ToolCall
from perdure.runtime import Runtime
from perdure.snapshots import pending
from perdure.snapshots.codec import checked_variables
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.snapshots.snapshot import AgentSnapshot, Memory, Status
from perdure.snapshots.store import SnapshotStore, StaleSnapshot
from perdure.text.untrusted import load_object
from perdure.tools.variables import VariableSet
from perdure.turns.lease.tenure import LeaseLost, Tenure
from perdure.turns.outcome import NotSaved
from perdure.turns.run import queries
from perdure.turns.run.commit import persist
from perdure.turns.run.verdict import Verdict

log = logging.getLogger(__name__)

MAX_EVENTS = 100
"""The most pending messages in a snapshot that is saved with a turn: the oldest ones. An export has all of them."""

_STEP_S = 10.0
"""Seconds within which a store must answer or raise; see `SnapshotStore`."""


def is_elsewhere(store: SnapshotStore) -> bool:
    """Whether the store needs a separate save, because the commit of a step does not write to it."""
    return not isinstance(store, PostgresSnapshots)


def hydrate(runtime: Runtime, tenure: Tenure) -> VariableSet:
    """The session's working variables: from the store if its snapshot is of the last commit, otherwise from PostgreSQL.

    The session's row records the version of the committed snapshot. If the store's snapshot has another version, this
    sets the store's snapshot aside. If a turn stopped between two steps, the recorded snapshot is older than the last
    commit. In this case, the store's snapshot stays in the store, but is not used.

    Raises:
        LeaseLost: another worker has the session.
    """
    store, saved = runtime.snapshots, tenure.saved
    if is_elsewhere(store):
        tenure.step_within(_STEP_S)
        try:
            found = store.load(tenure.session_id)
            if found is None and saved is not None:
                log.warning("session %s has no snapshot in %s: the next turn saves one", tenure.session_id, store.name)
            elif found is not None and found.version != saved:
                _require_lease(runtime, tenure)
                committed = f"the committed one is of {saved}" if saved else "no snapshot is committed"
                store.set_aside(tenure.session_id, found.version, f"it is of {found.version}; {committed}")
            elif found is not None and found.version.tick == tenure.tick:
                return VariableSet(found.snapshot.memory.working_variables)
        except LeaseLost:
            raise
        except Exception as error:  # noqa: BLE001
            # A third party's store may raise any error. PostgreSQL also has the variables.
            reason = _reason(store, error)
            log.warning("session %s uses PostgreSQL's copy of its variables: %s", tenure.session_id, reason)
    return VariableSet(kept_variables(runtime.database, tenure))


def kept_variables(database: Database, tenure: Tenure) -> Mapping[str, Any]:
    """The working variables in PostgreSQL. Runs a statement only if `tenure` does not have valid variables."""
    if tenure.variables_tick is None:
        return {}
    if tenure.variables is not None:
        try:
            return checked_variables(load_object(tenure.variables))
        except (ValueError, PerdureError) as error:
            log.debug("session %s: %s", tenure.session_id, loggable(error))
    found = PostgresSnapshots(database).load(tenure.session_id)  # sets a damaged snapshot aside
    return {} if found is None else found.snapshot.memory.working_variables


def save(runtime: Runtime, tenure: Tenure, verdict: Verdict, memory: Memory) -> NotSaved | None:
    """Store the turn's verdict in its row, and save the snapshot of the state that settling the turn will commit.

    `memory` is the session's memory at the last commit.

    Returns the refusal of the store, if it refused the snapshot.

    Raises:
        LeaseLost: another worker has the session.
    """
    given = {
        **tenure.fenced,
        "lease_s": tenure.lease_s,
        "turn_id": tenure.at_hand.turn_id,
        "verdict": verdict.to_json(),
        "most": MAX_EVENTS,
    }

    def store_verdict() -> Sequence[Row[Any]]:
        asked_at = runtime.clock.monotonic()
        rows = runtime.database.run(queries.KEEP_UNSAVED, given)
        if not rows:
            raise LeaseLost
        tenure.renewed(asked_at)
        return rows

    rows = persist(runtime, tenure, store_verdict)
    if rows is None:  # another runner has settled the turn
        raise LeaseLost
    said = [
        Message(
            Role(each["role"]),
            each["content"],
            tuple(ToolCall.from_dict(call) for call in each["tool_calls"] or ()),
            each["tool_call_id"],
        )
        for each in verdict.for_models
    ]
    snapshot = AgentSnapshot(
        agent_id=tenure.session_id,
        tick_index=rows[0].tick + 1,
        timestamp=int(runtime.clock.now().timestamp() * 1000),
        status=Status.WAITING_FOR_EVENT,
        memory=Memory(
            (*memory.short_term_history, *said),
            memory.working_variables if verdict.variables is None else verdict.variables,
        ),
        event_queue_backup=pending.events(rows[0].pending),
    )
    tenure.step_within(_STEP_S)
    refusal = _try_save(runtime.snapshots, snapshot, tenure.token)
    if not isinstance(refusal, StaleSnapshot):
        return refusal
    # The store has a newer snapshot: either another worker holds the session, or the database was restored from an
    # older backup.
    _require_lease(runtime, tenure)
    try:
        runtime.snapshots.set_aside(tenure.session_id, refusal.stored, f"the session is at tick {rows[0].tick}")
    except PerdureError as error:
        return NotSaved(error.message)
    refusal = _try_save(runtime.snapshots, snapshot, tenure.token)
    return NotSaved(refusal.message) if isinstance(refusal, StaleSnapshot) else refusal


def _try_save(store: SnapshotStore, snapshot: AgentSnapshot, token: int) -> StaleSnapshot | NotSaved | None:
    """Save `snapshot`; returns the refusal of the store. `StaleSnapshot`: the store has a newer snapshot."""
    try:
        store.save(snapshot, token)
    except StaleSnapshot as stale:
        return stale
    except Exception as error:  # noqa: BLE001 (a third party's store may raise any error)
        return NotSaved(_reason(store, error))
    return None


def _require_lease(runtime: Runtime, tenure: Tenure) -> None:
    rows = runtime.database.run(queries.OWNED, tenure.fenced)
    if not rows:
        raise LeaseLost


def _reason(store: SnapshotStore, error: Exception) -> str:
    if isinstance(error, PerdureError):
        return error.message
    log.error("the snapshot store %s raised an unexpected error", store.name, exc_info=error)
    return f"The snapshot store {store.name} raised an unexpected error ({type(error).__name__})."
