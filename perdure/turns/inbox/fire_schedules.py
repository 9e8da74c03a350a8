"""Fires users' schedules: at each slot (due time), a schedule sends an ordinary message in its user's name.

Every worker's sweeper calls `fire_due`. The transaction that accepts the message also advances the schedule. So a slot
never becomes two messages, even if a worker crashes. A schedule that is concurrently removed, paused or erased sends no
message. If slots were missed while no worker ran, only the newest slot fires. While a schedule's earlier message is
queued, this message stands for the slots that pass; while its turn runs or waits, the schedule waits, too, and fires
the newest slot then. No schedule fires during quiet hours. A schedule with slots in the quiet hours fires once, when
the quiet hours end. A schedule that was made in a fork sends its messages to the fork, until the fork's end.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.database.engine import Transaction
from perdure.errors import INTERNAL_ERROR, Conflict, NotFound, PerdureError, RateLimited, Unavailable, loggable
from perdure.runtime import Runtime
from perdure.settings import OnBusy
from perdure.timetable import reminder_queries as queries
from perdure.timetable import reminders
from perdure.timetable.cron import Cron
from perdure.timetable.quiet import QuietHours
from perdure.turns.inbox.accept import Accepted, SourceTaken, accept
from perdure.turns.inbox.incoming import Incoming, stored_incoming

log = logging.getLogger(__name__)

MOST_AT_ONCE = 100
LONGEST_S = 5.0

_LONGEST_ERROR = 500
_SHORT_S = 5.0
_AGAIN_S = 300.0


def fire_due(runtime: Runtime, most: int = MOST_AT_ONCE) -> int:
    """Fire due schedules in batches of `most`, for about `LONGEST_S` seconds; returns the number of due schedules.

    Raises:
        Unavailable: the database cannot be reached. A schedule that was taken but did not fire is due again when its
            lease expires.
    """
    fired, began = 0, time.monotonic()
    while time.monotonic() - began < LONGEST_S and runtime.database.run(queries.ANY_DUE, {})[0].due:
        taken = runtime.database.run(queries.TAKE_DUE, {"most": most, "lease_s": runtime.settings.turn.lease_s})
        for row in taken:
            _fire_one(runtime, row)
        fired += len(taken)
        if len(taken) < most:
            break
    return fired


def _fire_one(runtime: Runtime, row: Row[Any]) -> None:
    try:
        _fire(runtime, row)
    except SourceTaken:
        log.info("schedule %s was paused, removed or erased while it fired", row.schedule_id)
    except (RateLimited, Unavailable) as refused:
        log.info("schedule %s is postponed: %s", row.schedule_id, loggable(refused))
        _postpone(runtime, row, getattr(refused, "retry_after_s", None) or _SHORT_S)  # raises if PostgreSQL is down
    except Exception:  # one schedule must not hold up the others
        log.exception("schedule %s cannot be fired; retry in %d s", row.schedule_id, _AGAIN_S)
        _postpone(runtime, row, _AGAIN_S, INTERNAL_ERROR)


def _postpone(runtime: Runtime, row: Row[Any], seconds: float, error: str | None = None) -> None:
    given = {"schedule_id": row.schedule_id, "due": row.next_due, "error": error, "again_s": seconds}
    runtime.database.run(queries.POSTPONE, given)


def _fire(runtime: Runtime, row: Row[Any]) -> None:
    zone = ZoneInfo(row.timezone)
    quiet = QuietHours.of(runtime.settings.schedule)
    if quiet is not None and (later := quiet.over(row.now, zone)) > row.now:
        runtime.database.run(queries.ADVANCE, _Due(row, later).parameters())
        return
    if (postponed_s := _postponed_s(runtime, row)) > 0:
        _postpone(runtime, row, postponed_s)
        return
    slot: datetime = row.once if row.cron is None else Cron(row.cron, zone).previous(row.now)
    following = None if row.cron is None else Cron(row.cron, zone).next(row.now)
    if following is not None and quiet is not None:
        following = quiet.over(following, zone)
    due = _Due(row, following, slot)
    if row.earlier == "accepted":
        log.info("schedule %s: its message for an earlier slot is still queued", row.schedule_id)
        runtime.database.run(queries.ADVANCE, due.parameters())
        return
    try:
        _accept(runtime, _message(row, slot), due)
    except (Unavailable, RateLimited):
        raise
    except PerdureError as refused:
        log.warning("schedule %s: its message was refused: %s", row.schedule_id, loggable(refused))
        runtime.database.run(queries.ADVANCE, due.parameters(error=refused.message[:_LONGEST_ERROR]))


def _postponed_s(runtime: Runtime, row: Row[Any]) -> float:
    """For how many seconds the schedule is postponed; 0 if it can fire now."""
    waited_s: float = (row.now - row.next_due).total_seconds()
    is_lacking = row.agent is not None and runtime.agents.find(row.agent) is None
    if is_lacking and waited_s < runtime.settings.turn.unknown_agent_s:
        log.info("schedule %s is left to another worker: this one lacks the agent %r", row.schedule_id, row.agent)
        return _SHORT_S
    if row.earlier is not None and row.earlier != "accepted":
        log.info("schedule %s waits until the turn of its earlier message is settled", row.schedule_id)
        return min(max(waited_s, _SHORT_S), _AGAIN_S)
    return 0


def _accept(runtime: Runtime, message: Incoming, due: _Due) -> None:
    """Accept the message in the fork in which the schedule was made, or else in the schedule's conversation."""
    target = due.row.reply_to
    if due.row.session_id is not None:
        apart = message.model_copy(update={"session_id": due.row.session_id, "conversation": None})
        try:
            accept(runtime, apart, target=target, source=due, answers=False)
        except (Conflict, NotFound) as ended:
            log.info("schedule %s fires outside of the fork: %s", due.row.schedule_id, loggable(ended))
        else:
            return
    accept(runtime, message, target=target, source=due, answers=False)


@dataclass(frozen=True, slots=True)
class _Due:
    """A schedule's row, as the `Source` of the message for `slot`. The schedule is due again at `following`."""

    row: Row[Any]
    following: datetime | None
    slot: datetime | None = None

    def begin(self, transaction: Transaction) -> None:
        """Do nothing: `TAKE_DUE` has taken the row."""

    def end(self, transaction: Transaction, accepted: Accepted) -> None:
        """Advance the schedule, or delete it if it fires once."""
        given = self.parameters(turn_id=accepted.turn_id)
        if not transaction.run(queries.FINISH if self.row.cron is None else queries.ADVANCE, given):
            raise SourceTaken

    def parameters(self, turn_id: UUID | None = None, error: str | None = None) -> dict[str, Any]:
        """The parameters of the statements that advance the schedule."""
        return {
            "schedule_id": self.row.schedule_id,
            "due": self.row.next_due,
            "next_due": self.following,
            "slot": self.slot,
            "turn_id": turn_id,
            "error": error,
        }


def _message(row: Row[Any], slot: datetime) -> Incoming:
    set_on = row.created_at.astimezone(ZoneInfo(row.timezone))
    fields = {
        "text": reminders.DUE_NOW.format(date=f"{set_on:%Y-%m-%d}") + row.text,
        "channel": row.channel,
        "message_id": reminders.message_id(row.schedule_id, slot),
        "conversation": row.conversation,
        "agent": row.agent,
        "on_busy": OnBusy.ENQUEUE,
        "remember": row.remember,
        "metadata": {"schedule_id": str(row.schedule_id), "slot": slot.isoformat(), "timezone": row.timezone},
    }
    return stored_incoming(UserKey(row.user_id), fields)
