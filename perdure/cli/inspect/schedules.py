"""`perdure schedules`: the scheduled entries, their last slots and their next ones."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

import typer

from perdure.cli import connecting
from perdure.cli.display import AsJson, write_json, write_table

commands = typer.Typer(help="Scheduled work.", no_args_is_help=True)

_COLUMNS = ("entry", "schedule", "last_done_slot", "running", "attempts", "error", "next_due")


@commands.callback()
def _commands() -> None:
    """Scheduled work."""


@commands.command("list")
def list_(*, as_json: AsJson = False) -> None:
    """List scheduled entries with their last and next slots."""
    from perdure import schedules
    from perdure.schedule.reading import read_schedules
    from perdure.settings import Settings
    from perdure.workers.application import registered

    found = schedules.entries(registered(), Settings.load())
    with connecting.database() as database:
        standings = [asdict(each) for each in read_schedules(database, found.values())]
    shown = [{name: _plain(value) for name, value in each.items()} for each in standings]
    if as_json:
        write_json(shown)
    else:
        write_table(_COLUMNS, [[each[column] for column in _COLUMNS] for each in shown])


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value
