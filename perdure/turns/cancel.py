"""Cancelling a turn. A turn that waits is settled at once; a running turn stops at its next safe point."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.database.engine import Statement
from perdure.database.fencing import Fence
from perdure.errors import NotFound, TurnCancelled
from perdure.ids import new_id
from perdure.runtime import Runtime
from perdure.turns import pauses
from perdure.turns import queries as turns_queries
from perdure.turns.calls.awaited import report_now
from perdure.turns.inbox import queries as inbox_queries
from perdure.turns.inbox import route_unrouted
from perdure.turns.lease.tenure import TurnRow
from perdure.turns.outcome import CANCELLED
from perdure.turns.reading import find_owner
from perdure.turns.run.leave import settle_begun

_AT_ONCE = 200

_UNSETTLED = Statement(
    "turns.unsettled_of",
    f"""
    SELECT turn_id FROM turns AS t WHERE {pauses.UNSETTLED_OF} AND turn_id > %(after)s::uuid
    ORDER BY turn_id LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

_WAITING = frozenset({"waiting_approval", "parked"})


def cancel(runtime: Runtime, turn_id: UUID) -> None:
    """Request the cancellation of a turn. A settled turn is not changed.

    A running turn stops between steps or during a model call. A turn that has not begun, or that waits for an approval,
    a task, a client, an agent or a time, is settled at once. Its calls that wait for approval are denied, and the
    sweeper revokes its tasks, and cancels the turns of its agents. For any other begun turn that no worker runs, a
    wake-up is published, and a worker settles the turn.

    Raises:
        NotFound: there is no such turn.
    """
    parameters = {"turn_id": turn_id, "message": CANCELLED, "delivery_id": new_id(runtime.clock)}
    rows = runtime.database.run(turns_queries.CANCEL, parameters)
    if not rows:
        found = find_owner(runtime.database, turn_id)
        if found is None:
            raise NotFound("There is no such turn.")
        is_routed = found[1]  # if CANCEL did not change a routed turn, the turn was settled before
        if not is_routed and not route_unrouted.cancel(runtime, turn_id, TurnCancelled(CANCELLED)):
            cancel(runtime, turn_id)  # the message was routed concurrently
        return
    row = rows[0]
    if row.delivery_id is not None:
        runtime.wake.delivery(row.delivery_id)
    if row.may_end:
        runtime.wake.ending(row.session_id)
    if row.status == "cancelled" and row.answers_call:
        report_now(runtime, turn_id)
    if row.status == "cancelled" or (row.waits and _close(runtime, row.session_id, turn_id)):
        return
    runtime.wake.session(row.session_id, row.priority)


def cancel_all(runtime: Runtime, *, tenant: str | None, user: UserKey | None, agent: str | None) -> int:
    """Request the cancellation of all unsettled turns to which all the given apply; returns their number.

    Messages that are accepted meanwhile are not affected: pause before, if none is to run.
    """
    cancelled, after = 0, UUID(int=0)
    whom = pauses.given(tenant, user, agent)
    while rows := runtime.database.run(_UNSETTLED, {**whom, "after": after, "most": _AT_ONCE}):
        for row in rows:
            with suppress(NotFound):  # its user was erased meanwhile
                cancel(runtime, row.turn_id)
                cancelled += 1
        after = rows[-1].turn_id
    return cancelled


def _close(runtime: Runtime, session_id: UUID, turn_id: UUID) -> bool:
    """Settle a turn if it still waits. Returns True if the session has no turn left to run."""
    with runtime.database.transaction("turns.close_waiting") as transaction:
        seized = transaction.run(turns_queries.SEIZE_WAITING, {"session_id": session_id})
        rows = transaction.run(inbox_queries.BEGUN, {"session_id": session_id}) if seized else ()
        if not rows or rows[0].turn_id != turn_id or rows[0].status not in _WAITING:
            return False
        fence = Fence(seized[0].token, seized[0].nonce)
        settled = settle_begun(transaction, runtime.clock, fence, TurnRow.begun(session_id, rows[0]), runtime.agents)
    if settled.delivery_id is not None:
        runtime.wake.delivery(settled.delivery_id)
    if settled.may_end:
        runtime.wake.ending(session_id)
    if settled.answers_call:
        report_now(runtime, turn_id)
    return settled.unsettled == 0
