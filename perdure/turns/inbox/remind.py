"""Fires users' schedules: each slot that is due becomes an ordinary message of its user.

The sweeper of every worker calls this. The slot is the message's id: after a worker dies between taking a schedule and
accepting its message, another one repeats it, and the message is accepted once. Of the slots that were missed while no
worker ran, only the newest fires. Nothing fires in the quiet hours; their slots become one message at their end.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from sqlalchemy import Row

from perdure.errors import PerdureError, RateLimited, Unavailable, loggable
from perdure.runtime import Runtime
from perdure.schedule import reminder_queries as queries
from perdure.schedule.cron import Cron
from perdure.schedule.quiet import QuietHours
from perdure.settings import OnBusy
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming

log = logging.getLogger(__name__)

MOST_A_ROUND = 100

_LONGEST_ERROR = 500


def fire_due(runtime: Runtime, most: int = MOST_A_ROUND) -> int:
    """Fire up to `most` schedules that are due; returns their number.

    Raises:
        Unavailable: the database cannot be reached; a schedule that was taken is due again when its lease expires.
    """
    if not runtime.database.run(queries.ANY_DUE, {})[0].due:
        return 0
    lease_s = runtime.settings.turn.lease_s
    taken = runtime.database.run(queries.TAKE_DUE, {"most": most, "lease_s": lease_s})
    for row in taken:
        try:
            _fire(runtime, row)
        except Unavailable:
            raise
        except Exception:  # one schedule must not hold up the others; it is due again when its lease expires
            log.exception("schedule %s cannot be fired", row.schedule_id)
    return len(taken)


def _fire(runtime: Runtime, row: Row[Any]) -> None:
    zone = ZoneInfo(row.timezone)
    quiet = QuietHours.of(runtime.settings.schedule)
    if quiet is not None and (later := quiet.over(row.now, zone)) > row.now:
        _advance(runtime, row, later)
        return
    slot: datetime = row.once if row.cron is None else Cron(row.cron, zone).previous(row.now)
    turn_id, error = None, None
    try:
        turn_id = accept(runtime, _message(row, slot), target=row.reply_to).turn_id
    except (Unavailable, RateLimited) as refused:
        if isinstance(refused, Unavailable):
            raise
        log.info("schedule %s is postponed: %s", row.schedule_id, loggable(refused))
        return
    except PerdureError as refused:
        error = refused.message[:_LONGEST_ERROR]
        log.warning("schedule %s: its message was refused: %s", row.schedule_id, loggable(refused))
    if row.cron is None and error is None:
        runtime.database.run(queries.FINISH, {"schedule_id": row.schedule_id, "due": row.next_due})
        return
    following = None if row.cron is None else Cron(row.cron, zone).next(row.now)
    if following is not None and quiet is not None:
        following = quiet.over(following, zone)
    _advance(runtime, row, following, slot=slot, turn_id=turn_id, error=error)


def _advance(
    runtime: Runtime,
    row: Row[Any],
    next_due: datetime | None,
    *,
    slot: datetime | None = None,
    turn_id: UUID | None = None,
    error: str | None = None,
) -> None:
    given = {"next_due": next_due, "slot": slot, "turn_id": turn_id, "error": error}
    runtime.database.run(queries.ADVANCE, {"schedule_id": row.schedule_id, "due": row.next_due, **given})


def _message(row: Row[Any], slot: datetime) -> Incoming:
    """The message of a slot. Its prefix tells the model that the user wrote it earlier, not now."""
    set_on = row.created_at.astimezone(ZoneInfo(row.timezone))
    return Incoming(
        user_id=row.user_id,
        text=f"[Due now, as the user scheduled it on {set_on:%Y-%m-%d}] {row.text}",
        channel=row.channel,
        message_id=f"schedule:{row.schedule_id}:{slot.isoformat()}",
        conversation=row.conversation,
        agent=row.agent,
        on_busy=OnBusy.ENQUEUE,
        metadata={"schedule_id": str(row.schedule_id), "slot": slot.isoformat()},
    )
