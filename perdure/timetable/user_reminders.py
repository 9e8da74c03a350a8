"""Gives one tool call access to the schedules of the call's user.

Each `UserReminders` belongs to one call and its user, so the call cannot reach another user's schedules. The id of a
new schedule is the call's `effect_id`, which stays the same if the call is repeated after a crash. Therefore a repeated
call stores no second schedule, not even if the schedule has fired and was deleted. It counts minutes from the time when
the model made the call, or a person approved it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.errors import InvalidRequest
from perdure.ids import made_at
from perdure.settings import Settings
from perdure.timetable import reminder_queries as queries
from perdure.timetable import reminders


@dataclass(frozen=True, slots=True)
class UserReminders:
    """The schedules that one tool call can reach: those of the call's user.

    `user` is the user's key. `timezone` is the zone of times without one: the user's zone, as the prompt names it.
    """

    database: Database
    clock: Clock
    settings: Settings
    user: UserKey
    timezone: str
    turn_id: UUID
    effect_id: UUID

    def add(
        self, text: str, at: str | None, cron: str | None, timezone: str | None, in_minutes: int | None = None
    ) -> dict[str, Any]:
        """Add a schedule and return it. The schedule's replies go to the receiver of this turn's reply.

        Give one of `at`, `cron` and `in_minutes`, the minutes from now. If this call stored the schedule before a
        crash, returns that schedule; without a `next_due` if it has fired since.

        Raises:
            InvalidRequest: the time is invalid or in the past, or the user was erased.
            Conflict: the user has too many schedules.
        """
        if stored := reminders.find(self.database, self.effect_id):
            return stored
        given = {"turn_id": self.turn_id, "user_id": self.user, "effect_id": self.effect_id}
        rows = self.database.run(queries.PLACE, given)
        if not rows:
            raise InvalidRequest("The user was erased.")
        [row] = rows
        now = row.decided_at or made_at(self.effect_id)
        if in_minutes is not None:
            if at is not None or cron is not None:
                raise InvalidRequest("Give one of at, in_minutes and cron.")
            at = (now + timedelta(minutes=in_minutes)).isoformat()
        moment = reminders.parse_moment(self.settings, now, at, cron, timezone or self.timezone)
        new = reminders.NewReminder(
            self.effect_id,
            self.user,
            text,
            moment,
            row.channel,
            conversation=row.conversation,
            agent=row.agent,
            reply_to=row.reply_to,
            remember=row.remember,
        )
        if moment.next_due <= self.clock.now() and (already := reminders.fired(self.database, new)):
            return already
        return reminders.add(self.database, self.settings, new, of_known=True)

    def list(self) -> list[dict[str, Any]]:
        """The user's schedules, ordered by next due time."""
        return reminders.list_reminders(self.database, self.user)

    def remove(self, schedule_id: UUID) -> None:
        """Remove one of the user's schedules.

        Raises:
            NotFound: the user has no such schedule.
        """
        reminders.remove(self.database, schedule_id, self.user)
