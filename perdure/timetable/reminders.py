"""Users' schedules: each sends a text as a message from the user, once or repeatedly.

`POST /v1/schedules`, the tools of `perdure.tools.reminders` and `perdure schedules` call this module. The sweeper of
every worker fires due schedules (`turns.inbox.fire_schedules`). A schedule stores the channel and the conversation of
its messages, and the receiver of the replies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from sqlalchemy import Row

from perdure.access.tenants import UserKey, tenant_of, user_of
from perdure.clock import Clock
from perdure.database.engine import Database, Executor, as_json
from perdure.errors import Conflict, InvalidRequest, NotFound
from perdure.settings import Settings
from perdure.text.zones import find_zone
from perdure.timetable import reminder_queries as queries
from perdure.timetable.cadence import instant, next_runs
from perdure.timetable.cron import Cron
from perdure.timetable.quiet import QuietHours

MAX_LISTED = 1_000

DUE_NOW = "[Due now, as the user scheduled it on {date}] "
"""The prefix of a schedule's message. It shows the model that the user wrote the text earlier."""

_MARK_CHARS = len(DUE_NOW.format(date="2026-05-02"))
_FURTHEST = timedelta(days=36_525)

_UNKNOWN = "There is no such schedule."


@dataclass(frozen=True, slots=True)
class Moment:
    """When a schedule fires: at the slots of `cron`, or only at `next_due` if `cron` is `None`.

    `next_due` is timezone-aware and in UTC.
    """

    cron: str | None
    timezone: str
    next_due: datetime


@dataclass(frozen=True, slots=True)
class NewReminder:
    """A schedule to add.

    `user` is the user's key. `reply_to` is the receiver of the replies, in the form of a turn's `reply_to`. With
    `remember` false, nothing of its messages and of their replies may be remembered.
    """

    schedule_id: UUID
    user: UserKey
    text: str
    moment: Moment
    channel: str
    conversation: str | None = None
    agent: str | None = None
    reply_to: dict[str, Any] | None = None
    remember: bool = True


def parse_moment(settings: Settings, now: datetime, at: str | None, cron: str | None, timezone: str | None) -> Moment:
    """Parse the time or the cron expression of a new schedule.

    Give either `at` or `cron`. `at` is an ISO 8601 time. A cron expression, or an `at` without an offset, is in the
    zone `timezone`. The default of `timezone` is the installation's zone.

    Raises:
        InvalidRequest: an argument is invalid, or the time is in the past.
    """
    zone = _zone(timezone or settings.timezone)
    if (at is None) == (cron is None):
        raise InvalidRequest("Give either at or cron.")
    if cron is not None:
        try:
            first = Cron(cron, zone).next(now)
        except ValueError as error:
            raise InvalidRequest(f"cron: {error}.") from None
        return Moment(cron, zone.key, _quiet_over(settings, first, zone))
    moment = _parse_at(at or "", zone)
    if moment > now + _FURTHEST:
        raise InvalidRequest("at: is more than a hundred years from now.")
    if moment <= now:
        raise InvalidRequest(f"at: {moment.isoformat()} is in the past; it is {now.isoformat(timespec='seconds')}.")
    return Moment(None, zone.key, _quiet_over(settings, moment, zone))


def add(database: Database, settings: Settings, new: NewReminder, *, of_known: bool = False) -> dict[str, Any]:
    """Store a schedule and return it.

    If a schedule with this id exists, changes nothing and returns the existing schedule. If `of_known` is true, the
    user must exist.

    Raises:
        InvalidRequest: the text or the conversation is blank, the text is too long, or the user does not exist.
        Conflict: the user already has `PERDURE_SCHEDULE__USER_LIMIT` schedules.
    """
    longest, limit = max(1, settings.guard.max_chars - _MARK_CHARS), settings.schedule.user_limit
    if not new.text.strip() or len(new.text) > longest:
        raise InvalidRequest(f"text: must have 1 to {longest} characters.")
    if new.conversation is not None and not new.conversation.strip():
        raise InvalidRequest("conversation: is empty.")
    wanted = {"schedule_id": new.schedule_id}
    with database.transaction("reminders.add") as transaction:
        transaction.run(queries.QUEUE_UP, {"user_id": new.user})
        if not transaction.run(queries.LOCK_USER, {"user_id": new.user}) and of_known:
            raise InvalidRequest("The user was erased.")
        there = transaction.run(queries.READ, wanted)
        if not there:
            if transaction.run(queries.COUNT, {"user_id": new.user})[0].n >= limit:
                raise Conflict(f"The user has {limit} schedules, and PERDURE_SCHEDULE__USER_LIMIT allows no more.")
            transaction.run(queries.ADD, _parameters(new))
            there = transaction.run(queries.READ, wanted)
    return _shown(there[0])


def _parameters(new: NewReminder) -> dict[str, Any]:
    return {
        "schedule_id": new.schedule_id,
        "user_id": new.user,
        "text": new.text,
        "cron": new.moment.cron,
        "timezone": new.moment.timezone,
        "next_due": new.moment.next_due,
        "channel": new.channel,
        "conversation": new.conversation,
        "agent": new.agent,
        "reply_to": None if new.reply_to is None else as_json(new.reply_to),
        "remember": new.remember,
    }


def list_reminders(executor: Executor, user: UserKey | None = None) -> list[dict[str, Any]]:
    """The schedules of one user or of all users, ordered by next due time.

    `user` is the user's key; `None` means all users.
    """
    statement = queries.LIST if user is None else queries.LIST_OF_USER
    return [_shown(row) for row in executor.run(statement, {"user_id": user, "limit": MAX_LISTED})]


def runs_of(settings: Settings, shown: Mapping[str, Any], now: datetime, most: int) -> list[datetime]:
    """The next runs of a schedule in its zone, at most `most`. `shown` is the schedule, as `list_reminders` returns it.

    A run during the quiet hours is at their end. A paused schedule has none.
    """
    if shown["next_due"] is None:
        return []
    first, zone = datetime.fromisoformat(shown["next_due"]), _zone(shown["timezone"])
    if shown["cron"] is None:
        return [first.astimezone(zone)]
    cron = Cron(shown["cron"], zone)
    runs = next_runs(first, lambda at: _quiet_over(settings, cron.next(at), zone), now, most)
    return [run.astimezone(zone) for run in runs]


def message_id(schedule_id: UUID, slot: datetime) -> str:
    """The id of the message that the schedule sends at `slot`."""
    return f"schedule:{schedule_id}:{slot.astimezone(UTC).isoformat()}"


def fired(executor: Executor, new: NewReminder) -> dict[str, Any] | None:
    """`new` without a next due time, if it fired once at its time, and was deleted then."""
    slot = new.moment.next_due
    sent = {"user_id": new.user, "channel": new.channel, "message_id": message_id(new.schedule_id, slot)}
    if new.moment.cron is not None or not executor.run(queries.IS_ACCEPTED, sent)[0].is_accepted:
        return None
    return {
        "schedule_id": str(new.schedule_id),
        "timezone": new.moment.timezone,
        "next_due": None,
        "last_slot": _instant(slot),
    }


def find(executor: Executor, schedule_id: UUID) -> dict[str, Any] | None:
    rows = executor.run(queries.READ, {"schedule_id": schedule_id})
    return _shown(rows[0]) if rows else None


def owner(executor: Executor, schedule_id: UUID) -> UserKey:
    """The key of the schedule's user.

    Raises:
        NotFound: there is no such schedule.
    """
    return UserKey(_read(executor, schedule_id).user_id)


def pause(database: Database, clock: Clock, settings: Settings, schedule_id: UUID, *, paused: bool) -> dict[str, Any]:
    """Pause or resume a schedule, and return it. Slots during the pause are skipped.

    Raises:
        NotFound: there is no such schedule.
        Conflict: a schedule that fires once cannot be resumed after its time.
    """
    row = _read(database, schedule_id)
    if row.paused == paused:
        return _shown(row)
    due: datetime | None = None
    if not paused:
        now, zone = clock.now(), _zone(row.timezone)
        if row.cron is not None:
            due = _quiet_over(settings, Cron(row.cron, zone).next(now), zone)
        elif row.once is None or row.once <= now:
            raise Conflict("The schedule's only time passed while it was paused: remove it.")
        else:
            due = row.once
    changed = {"schedule_id": schedule_id, "paused": paused, "next_due": due}
    rows = database.run(queries.CHANGE, changed)
    if not rows:
        raise NotFound(_UNKNOWN)
    return _shown(rows[0])


def remove(executor: Executor, schedule_id: UUID, user: UserKey) -> None:
    """Remove a schedule of the user with the key `user`.

    Raises:
        NotFound: the user has no such schedule.
    """
    if not executor.run(queries.REMOVE, {"schedule_id": schedule_id, "user_id": user}):
        raise NotFound(_UNKNOWN)


def _read(executor: Executor, schedule_id: UUID) -> Row[Any]:
    rows = executor.run(queries.READ, {"schedule_id": schedule_id})
    if not rows:
        raise NotFound(_UNKNOWN)
    return rows[0]


def _zone(name: str) -> ZoneInfo:
    found = find_zone(name)
    if found is None:
        raise InvalidRequest("timezone: must be a name of the IANA time zone database, such as Europe/Paris.")
    return found


def _parse_at(at: str, zone: ZoneInfo) -> datetime:
    try:
        given = datetime.fromisoformat(at)
        return instant(given.replace(microsecond=0), zone) if given.tzinfo is None else given.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest("at: must be a time such as 2026-05-02T09:30 or 2026-05-02T09:30:00+02:00.") from None


def _quiet_over(settings: Settings, at: datetime, zone: ZoneInfo) -> datetime:
    quiet = QuietHours.of(settings.schedule)
    return at if quiet is None else quiet.over(at, zone)


def _shown(row: Row[Any]) -> dict[str, Any]:
    return {
        "schedule_id": str(row.schedule_id),
        "tenant": tenant_of(row.user_id),
        "user_id": user_of(row.user_id),
        "text": row.text,
        "at": _instant(row.once),
        "cron": row.cron,
        "timezone": row.timezone,
        "conversation": row.conversation,
        "agent": row.agent,
        "channel": row.channel,
        "paused": row.paused,
        "next_due": _instant(row.next_due),
        "last_slot": _instant(row.last_slot),
        "last_turn_id": None if row.last_turn_id is None else str(row.last_turn_id),
        "error": row.error,
        "created_at": _instant(row.created_at),
    }


def _instant(value: datetime | None) -> str | None:
    return None if value is None else value.astimezone(UTC).isoformat()
