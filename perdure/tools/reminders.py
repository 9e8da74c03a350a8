"""The built-in tools `remind_me`, `schedules` and `unschedule`, for the schedules of the turn's user."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID
from zoneinfo import ZoneInfo

from pydantic import Field

from perdure.errors import Conflict, InvalidRequest, NotFound, ToolError
from perdure.text.untrusted import cut
from perdure.timetable.cron import LONGEST
from perdure.timetable.user_reminders import UserReminders
from perdure.tools.registry import Effect, ToolContext, tool

MAX_CHARS = 1_000

_MOST_MINUTES = 5_256_000  # ten years

_SHOWN_CHARS = 200
_NONE = "This process has no schedules."


@tool(effect=Effect.IDEMPOTENT)
def remind_me(  # noqa: D417, PLR0917 (the model does not pass the context, and passes the others by name)
    text: Annotated[str, Field(min_length=1, max_length=MAX_CHARS, pattern=r"\S")],
    context: ToolContext,
    at: Annotated[str, Field(max_length=40)] | None = None,
    cron: Annotated[str, Field(max_length=LONGEST)] | None = None,
    in_minutes: Annotated[int, Field(ge=1, le=_MOST_MINUTES)] | None = None,
    timezone: Annotated[str, Field(max_length=64)] | None = None,
) -> str:
    """Send yourself a message for the user at a later time, or repeatedly, and answer it then.

    Use it when the user wants to be reminded, or wants something done later or regularly. Give one of
    `at`, `in_minutes` and `cron`.

    Args:
        text: What is to be done or said then, in one sentence that can be understood alone.
        at: The date and time, such as 2026-05-02T09:30, in the time zone.
        cron: Minute, hour, day of the month, month and day of the week, such as `30 7 * * MON-FRI`.
        in_minutes: The number of minutes from now.
        timezone: The time zone of `at` and `cron`, such as Europe/Paris, if it is not the user's time zone.
    """
    try:
        made = _own(context).add(text.strip(), at, cron, timezone, in_minutes)
    except (InvalidRequest, Conflict) as error:
        raise ToolError(error.message) from None
    if made["next_due"] is None:
        return f"Schedule {made['schedule_id']} was set; it has fired or is paused."
    return f"Schedule {made['schedule_id']} is set; it fires at {_next(made)}."


@tool(effect=Effect.PURE)
def schedules(context: ToolContext) -> str:
    """List what is scheduled for the user."""
    found = _own(context).list()
    lines = [
        f"- {each['schedule_id']}: {each['cron'] or 'once'} ({each['timezone']}), "
        f"{'paused' if each['paused'] else 'next at ' + _next(each)}: {cut(each['text'], _SHOWN_CHARS)}"
        for each in found
    ]
    return "\n".join(lines) or "Nothing is scheduled."


@tool(effect=Effect.IDEMPOTENT)
def unschedule(schedule_id: UUID, context: ToolContext) -> str:  # noqa: D417 (the model does not pass the context)
    """Remove one of the user's schedules.

    Args:
        schedule_id: The schedule's id, as `schedules` gives it.
    """
    try:
        _own(context).remove(schedule_id)
    except NotFound:
        return "There is no such schedule; it may have been removed."
    return "It is removed."


def _next(schedule: Mapping[str, Any]) -> str:
    """When a schedule fires next, in its zone."""
    zone = ZoneInfo(schedule["timezone"])
    return f"{datetime.fromisoformat(schedule['next_due']).astimezone(zone).isoformat()} ({zone.key})"


def _own(context: ToolContext) -> UserReminders:
    if context.reminders is None:
        raise ToolError(_NONE)
    return context.reminders
