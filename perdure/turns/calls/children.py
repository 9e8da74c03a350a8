"""Calls that another agent answers, in a session of its own: the child.

`CallLedger.delegate` opens the child under the caller's fence, in one statement. The child's session and its only turn
have the id of the call (`queries.DELEGATE`). So a call is asked once, however often it is begun, and each of both is
found from the other.

The commit that settles the child's turn ends its session, and is followed by `report`, which records the answer as the
result of the call and wakes the caller's session (`awaited.record`). If the process dies in between, the sweeper's
probe reports the answer (`awaited.probe_due`), as it reads the result of a Celery task. If the caller no longer waits,
because it was cancelled, ended, or the call's time is over, the same probe cancels the child's turn.

What the child needs from a person is shown in the caller's turn: its questions, approvals and calls for a client, those
of its own children included (`queries.below`). A message to the caller's session answers such a question; it locks
the caller's session, and then the one that asks.

The caller's row is locked only after the child's commit, and the child is opened only while the caller holds its own
row: no process waits for one while it holds the other in the opposite order.
"""

from __future__ import annotations

import json
import logging
from typing import Any
from uuid import UUID

from perdure.database.engine import Executor
from perdure.errors import Unavailable
from perdure.runtime import Runtime
from perdure.tools.awaited.port import TaskEnded
from perdure.turns import queries as turn_queries
from perdure.turns.calls import queries

log = logging.getLogger(__name__)

GONE = "The agent's session does not exist any more."
CANCELLED = "The agent's turn was cancelled."


def answer_of(executor: Executor, effect_id: UUID) -> TaskEnded | None:
    """The answer to the call `effect_id`; `None` if the agent still works on it."""
    rows = executor.run(queries.ANSWER, {"effect_id": effect_id})
    if not rows:
        return TaskEnded(failed=True, value=GONE)
    row = rows[0]
    if not row.is_settled:
        return None
    if row.status == "done":
        return TaskEnded(failed=False, value=value_of(row.reply, row.data))
    return TaskEnded(failed=True, value=CANCELLED if row.status == "cancelled" else row.error_message)


def announce_above(runtime: Runtime, turn_id: UUID) -> None:
    """Make the gateways read the turns again for which the turn `turn_id` works: they show for what it waits now."""
    if runtime.events is None or not runtime.events.followed():
        return
    try:
        above = runtime.database.run(turn_queries.ABOVE, {"turn_id": turn_id})
    except Unavailable as error:  # the gateways look every few seconds
        log.warning("what the turn %s waits for is shown later: %s", turn_id, error.message)
        return
    for row in above:
        runtime.events.announce(row.turn_id)


def value_of(reply: str | None, data: Any) -> Any:
    """The result of a call: the agent's `reply`, or its `data`, with the members in the order of the reply's JSON.

    The column `data` does not keep this order, which is that of the agent's type.

    >>> value_of('{"why": "late", "refund": true}', {"refund": True, "why": "late"})
    {'why': 'late', 'refund': True}
    """
    if data is None or reply is None:
        return reply if data is None else data
    try:
        written = json.loads(reply)
    except ValueError:
        return data
    return written if written == data else data
