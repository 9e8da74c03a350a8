"""The schedules of the user of one tool call.

A `UserReminders` is bound to one call, so it reaches no other user's schedules. A new schedule has the id of the call's
effect, so that a call that is repeated after a crash does not store a second schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.errors import InvalidRequest
from perdure.schedule import reminder_queries as queries
from perdure.schedule import reminders
from perdure.settings import Settings


@dataclass(frozen=True, slots=True)
class UserReminders:
    """The schedules of the user of one tool call. `user` is the user's key."""

    database: Database
    clock: Clock
    settings: Settings
    user: str
    turn_id: UUID
    effect_id: UUID

    def add(self, text: str, at: str | None, cron: str | None, timezone: str | None) -> dict[str, Any]:
        """Add a schedule whose replies go to the receiver of this turn's reply; returns it.

        Raises:
            InvalidRequest: the time is invalid or in the past, or the user was erased.
            Conflict: the user has too many schedules.
            Unavailable: the database cannot be reached.
        """
        if stored := reminders.find(self.database, self.effect_id):  # this call stored it before a crash
            return stored
        rows = self.database.run(queries.PLACE, {"turn_id": self.turn_id, "user_id": self.user})
        if not rows:
            raise InvalidRequest("The user was erased.")
        [row] = rows
        moment = reminders.parse_moment(self.settings, self.clock.now(), at, cron, timezone)
        new = reminders.NewReminder(
            self.effect_id,
            self.user,
            text,
            moment,
            row.channel,
            conversation=row.conversation,
            agent=row.agent,
            reply_to=row.reply_to,
        )
        return reminders.add(self.database, self.settings, new, of_known=True)

    def list(self) -> list[dict[str, Any]]:
        """The user's schedules, ordered by the time at which each is due next."""
        return reminders.list_reminders(self.database, self.user)

    def remove(self, schedule_id: UUID) -> None:
        """Remove one of the user's schedules.

        Raises:
            NotFound: the user has no such schedule.
        """
        reminders.remove(self.database, schedule_id, self.user)
