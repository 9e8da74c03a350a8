"""`perdure deliveries`: lists the deliveries of replies to URLs, chats and Celery tasks, and repeats a delivery."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from perdure.cli import connecting
from perdure.cli.display import AsJson, write_json, write_table, write_text

commands = typer.Typer(help="Replies sent to URLs, chats and tasks.", no_args_is_help=True)

Status = Literal["pending", "delivered", "failed"]
"""Has the values of `perdure.database.tables.DELIVERY_STATUSES`. A test checks this."""

_COLUMNS = ("delivery_id", "turn_id", "user_id", "target", "status", "attempts", "due_at", "last_error", "tenant")


@commands.command("list")
def list_(
    status: Annotated[Status | None, typer.Option(help="Only deliveries with this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="The most deliveries to list.")] = 100,
    *,
    as_json: AsJson = False,
) -> None:
    """List deliveries, newest first. A failed delivery is a dead letter."""
    from perdure.turns.outbox import list_deliveries

    with connecting.database() as database:
        found = list_deliveries(database, status=status, limit=limit)
    if as_json:
        write_json(found)
        return
    rows = [{**each, "target": json.dumps(each["target"], ensure_ascii=False)} for each in found]
    write_table(_COLUMNS, [[row[column] for column in _COLUMNS] for row in rows])


@commands.command()
def resend(delivery_id: Annotated[str, typer.Argument(metavar="ID", help="The delivery's id.")]) -> None:
    """Send a delivery again, in a new series of attempts.

    The delivery keeps its id, so that a receiver can detect a duplicate.
    """
    from perdure.turns.outbox import resend as resend_delivery

    wanted = connecting.parse_id(delivery_id, "delivery")
    with connecting.runtime() as runtime:
        resend_delivery(runtime.database, wanted)
        runtime.wake.delivery(wanted)
    write_text(f"delivery {wanted} is due")
