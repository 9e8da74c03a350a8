"""Cancelling a turn. A turn that waits is settled at once; a running turn stops at its next safe point.

If a message interrupts a session, `settle_begun` settles the session's begun turn.
"""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.database.engine import Transaction
from perdure.database.fencing import Fence
from perdure.errors import NotFound, TurnCancelled
from perdure.ids import new_id
from perdure.runtime import AcceptingRuntime, Runtime
from perdure.turns import queries as turns_queries
from perdure.turns.inbox import queries as inbox_queries
from perdure.turns.inbox import route_unrouted
from perdure.turns.lease.claim import TurnRef
from perdure.turns.reading import find_owner
from perdure.turns.run.settle import CANCELLED, Cancelled, Settled, Tenure, conclude, conclude_unread, settle
from perdure.turns.run.transcript import UNREADABLE, Transcript

log = logging.getLogger(__name__)

_WAITING = frozenset({"waiting_approval", "parked"})


def cancel(runtime: Runtime, turn_id: UUID) -> None:
    """Request the cancellation of a turn. A settled turn is not changed.

    A running turn stops between steps or during a model call. A turn that has not begun, or that waits for an approval,
    a task or a time, is settled at once. Its calls that wait for approval are denied, and the sweeper revokes its
    tasks. For any other begun turn that no worker runs, a wake-up is published, and a worker settles the turn.

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
    if row.status == "cancelled" or (row.waits and _close(runtime, row.session_id, turn_id)):
        return
    runtime.wake.session(row.session_id, row.priority)


def settle_begun(runtime: AcceptingRuntime, transaction: Transaction, tenure: Tenure, row: Row[Any]) -> Settled:
    """Settle a begun turn as cancelled. The caller has raised the session's fence; `tenure` has the new fence."""
    turn = TurnRef(row.turn_id, row.seq, row.user_id, row.agent, row.channel, row.first_seq, None)
    try:
        transcript = Transcript.load(transaction, tenure.session_id, turn, window=1)
        verdict = conclude(transaction, tenure.session_id, turn, transcript, Cancelled())
    except UNREADABLE:
        log.exception("turn %s cannot be parsed; its open calls are closed without its transcript", turn.turn_id)
        verdict = conclude_unread(transaction, tenure.session_id, turn, Cancelled())
    return settle(transaction, runtime.clock, tenure, turn=turn, verdict=verdict)


def _close(runtime: Runtime, session_id: UUID, turn_id: UUID) -> bool:
    """Settle a turn if it still waits. Returns True if the session has no turn left to run."""
    with runtime.database.transaction("turns.close_waiting") as transaction:
        seized = transaction.run(turns_queries.SEIZE_WAITING, {"session_id": session_id})
        rows = transaction.run(inbox_queries.BEGUN, {"session_id": session_id}) if seized else ()
        if not rows or rows[0].turn_id != turn_id or rows[0].status not in _WAITING:
            return False
        tenure = Tenure(session_id, Fence(seized[0].token, seized[0].nonce), runtime.settings.turn.lease_s)
        settled = settle_begun(runtime, transaction, tenure, rows[0])
    if settled.delivery_id is not None:
        runtime.wake.delivery(settled.delivery_id)
    if settled.may_end:
        runtime.wake.ending(session_id)
    return settled.unsettled == 0
