"""A program that adds users' schedules: some fire once, some each minute."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID, uuid4

from perdure.access.tenants import UserKey
from perdure.errors import NotFound
from perdure.timetable import reminders
from perdure.timetable.reminders import Moment, NewReminder
from tests.processes.chaos.actor import Actor, insist
from tests.processes.installation import Installation

MINUTELY = 6
"""The number of schedules that fire each minute."""

EVERY_S = 1.0
SOON_S = 8.0
"""A schedule that fires once is due within `SOON_S` seconds."""


@dataclass(frozen=True)
class Plan:
    """A schedule, and when it was removed: `None` if it fires once, which removes it."""

    schedule_id: UUID
    moment: Moment
    removed_at: datetime | None = None


class Planner(Actor):
    """Adds schedules; `plans` lists them. At the end, it removes those that fire each minute."""

    def __init__(self, installation: Installation, drawn: random.Random) -> None:
        super().__init__()
        self.plans: list[Plan] = []
        self._installation = installation
        self._drawn = drawn

    def act(self) -> None:
        minutely = [self._add(number, "* * * * *") for number in range(MINUTELY)]
        for number in itertools.count(MINUTELY):
            new = self._add(number, None)
            self.plans.append(Plan(new.schedule_id, new.moment))
            if self.over.wait(EVERY_S):
                break
        for new in minutely:
            with suppress(NotFound):  # an earlier attempt removed it
                insist(partial(reminders.remove, self._installation.database, new.schedule_id, new.user))
            self.plans.append(Plan(new.schedule_id, new.moment, datetime.now(UTC)))

    def _add(self, number: int, cron: str | None) -> NewReminder:
        now, settings = datetime.now(UTC), self._installation.runtime.settings
        at = None if cron else (now + timedelta(seconds=self._drawn.uniform(1, SOON_S))).isoformat()
        moment = reminders.parse_moment(settings, now, at, cron, "UTC")
        new = NewReminder(uuid4(), UserKey(f"planner {number % MINUTELY}"), f"plan {number}", moment, "http")
        insist(partial(reminders.add, self._installation.database, settings, new))
        return new
