"""`perdure schedules`: lists perdure's periodic tasks; lists, adds, pauses and removes users' schedules."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import typer

from perdure.access.tenants import parse_tenant, user_key
from perdure.cli import connecting
from perdure.cli.audited import audited, describe
from perdure.cli.display import AsJson, write_json, write_table

commands = typer.Typer(help="Scheduled work.", no_args_is_help=True)

_COLUMNS = ("entry", "schedule", "last_done_slot", "running", "attempts", "error", "next_due")


@commands.callback()
def _commands() -> None:
    """Scheduled work."""


@commands.command("list")
def list_(
    *,
    runs: Annotated[
        int, typer.Option("--next", metavar="N", min=0, max=1_000, help="List the next N runs of each instead.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """List perdure's own periodic tasks and users' schedules.

    With `--next`, times are local to each schedule, with their offset.
    """
    from perdure.clock import SystemClock
    from perdure.schedules.entries import active_entries
    from perdure.settings import Settings
    from perdure.timetable.cadence import next_runs
    from perdure.timetable.reading import read_schedules
    from perdure.timetable.reminders import list_reminders, runs_of
    from perdure.workers.celery_application import registered

    settings, now = Settings.load(), SystemClock().now()
    zone, found = ZoneInfo(settings.timezone), active_entries(registered(), settings)
    shown: list[dict[str, Any]] = []
    with connecting.database() as database:
        for each in read_schedules(database, found.values()):
            coming = next_runs(each.next_due, found[each.entry].cadence.next, now, runs)
            shown.append({**asdict(each), "runs": [run.astimezone(zone) for run in coming]})
        reminders = list_reminders(database)
    shown += [{**_of_user(each), "runs": runs_of(settings, each, now, runs)} for each in reminders]
    shown = [{name: _plain(value) for name, value in each.items() if runs or name != "runs"} for each in shown]
    if as_json:
        write_json(shown)
    elif runs:
        write_table(("entry", "schedule", "run"), [{**each, "run": run} for each in shown for run in each["runs"]])
    else:
        write_table(_COLUMNS, shown)


@commands.command("add")
@audited("schedules.add")
def add(
    text: Annotated[str, typer.Argument(help="The text to send to the agent.")],
    *,
    user: Annotated[str, typer.Option(metavar="USER", help="The user whose message it is.")] = "local",
    at: Annotated[str | None, typer.Option(metavar="TIME", help="Once, such as 2026-05-02T09:30.")] = None,
    cron: Annotated[str | None, typer.Option(metavar="EXPRESSION", help="Repeat, such as '30 7 * * MON-FRI'.")] = None,
    timezone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="Such as Europe/Paris; default: PERDURE_TIMEZONE.")
    ] = None,
    conversation: Annotated[
        str | None, typer.Option(metavar="KEY", help="The conversation that it is sent to.")
    ] = None,
    tenant: connecting.Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Schedule a message of a user, once or repeatedly."""
    from perdure.clock import SystemClock
    from perdure.ids import new_id
    from perdure.timetable import reminders

    key = user_key(parse_tenant(tenant), user)
    clock = SystemClock()
    with connecting.opened() as (settings, database):
        moment = reminders.parse_moment(settings, clock.now(), at, cron, timezone)
        new = reminders.NewReminder(new_id(clock), key, text, moment, "cli", conversation=conversation)
        made = reminders.add(database, settings, new)
        describe(made["schedule_id"])
    if as_json:
        write_json(made)
    else:
        typer.echo(f"{made['schedule_id']} fires at {made['next_due']}")


@commands.command("pause")
@audited("schedules.pause", "schedule_id", ("resume",))
def pause(
    schedule_id: Annotated[str, typer.Argument(help="The id of a user's schedule.")],
    *,
    resume: Annotated[bool, typer.Option("--resume", help="End the pause.")] = False,
    as_json: AsJson = False,
) -> None:
    """Pause a user's schedule, or resume it."""
    from perdure.clock import SystemClock
    from perdure.timetable import reminders

    wanted = connecting.parse_id(schedule_id, "schedule")
    with connecting.opened() as (settings, database):
        changed = reminders.pause(database, SystemClock(), settings, wanted, paused=not resume)
    if as_json:
        write_json(changed)
    else:
        typer.echo("paused" if changed["paused"] else f"fires at {changed['next_due']}")


@commands.command("remove")
@audited("schedules.remove", "schedule_id")
def remove(
    schedule_id: Annotated[str, typer.Argument(help="The id of a user's schedule.")], *, as_json: AsJson = False
) -> None:
    """Remove a user's schedule."""
    from perdure.timetable import reminders

    wanted = connecting.parse_id(schedule_id, "schedule")
    with connecting.database() as database:
        reminders.remove(database, wanted, reminders.owner(database, wanted))
    if as_json:
        write_json({"schedule_id": str(wanted), "removed": True})
    else:
        typer.echo("removed")


def _of_user(found: dict[str, Any]) -> dict[str, Any]:
    return {
        **found,
        "entry": found["schedule_id"],
        "task": None,
        "schedule": "paused" if found["paused"] else f"{found['cron'] or 'once'} {found['timezone']}",
        "since": found["created_at"],
        "last_done_slot": found["last_slot"],
        "last_done_at": None,
        "running": False,
        "attempts": 0,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, datetime) else value
