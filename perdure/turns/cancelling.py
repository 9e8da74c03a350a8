"""Cancel: at once where a turn has not begun, at its next safe point where it has."""

from __future__ import annotations

from uuid import UUID

from perdure.errors import NotFound
from perdure.ids import new_id
from perdure.runtime import Runtime
from perdure.turns import queries
from perdure.turns.settlement import CANCELLED


def cancel(runtime: Runtime, turn_id: UUID) -> None:
    """Ask for a turn to be cancelled; nothing happens if it is settled already.

    A turn that is running stops between steps or in the middle of a model's stream. One that
    nobody runs is woken, so that a worker claims it and settles it.

    Raises:
        NotFound: there is no such turn.
    """
    parameters = {"turn_id": turn_id, "message": CANCELLED, "delivery_id": new_id(runtime.clock)}
    rows = runtime.database.run(queries.CANCEL, parameters)
    if not rows:
        if not runtime.database.run(queries.READ, {"turn_id": turn_id}):
            raise NotFound("There is no such turn.")
        return
    row = rows[0]
    if row.delivery_id is not None:
        runtime.wake.delivery(row.delivery_id)
    if row.may_end:
        runtime.wake.ending(row.session_id)
    if row.status != "cancelled":
        runtime.wake.session(row.session_id, row.priority)
