"""`perdure deliveries`: lists the deliveries of replies to URLs, chats and Celery tasks, and repeats a delivery."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from perdure.cli import connecting
from perdure.cli.audited import audited
from perdure.cli.display import MOST_LISTED, AsJson, write_json, write_table, write_text
from perdure.cli.errors import WRONG_USAGE, Failure

commands = typer.Typer(help="Replies sent to URLs, chats and tasks.", no_args_is_help=True)

Status = Literal["pending", "delivered", "failed"]
"""Has the values of `perdure.database.tables.DELIVERY_STATUSES`. A test checks this."""

_COLUMNS = ("delivery_id", "turn_id", "user_id", "target", "status", "attempts", "due_at", "last_error", "tenant")


@commands.command("list")
def list_(
    status: Annotated[Status | None, typer.Option(help="Only deliveries with this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST_LISTED, help="The most deliveries to list.")] = 100,
    *,
    as_json: AsJson = False,
) -> None:
    """List deliveries, newest first. A failed delivery is a dead letter.

    With --status pending, those that are due next come first; with --status failed, those that were abandoned last.
    """
    from perdure.turns.outbox import list_deliveries

    with connecting.database() as database:
        found = list_deliveries(database, status=status, limit=limit)
    if as_json:
        write_json(found)
        return
    rows = [{**each, "target": json.dumps(each["target"], ensure_ascii=False)} for each in found]
    write_table(_COLUMNS, rows)


@commands.command()
@audited("deliveries.resend", "delivery_id", ("failed", "to"))
def resend(
    delivery_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="The delivery's id.")] = None,
    *,
    failed: Annotated[bool, typer.Option("--failed", help="All deliveries that have failed.")] = False,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="With --failed, only those to a URL, a task or a CHANNEL:CHAT that matches, such as "
            "'https://shop.example/*'.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --failed, only count them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send a delivery again, or all that failed.

    A new series of attempts begins. A delivery keeps its id, so that a receiver can detect a duplicate.
    """
    from perdure.turns.outbox import resend as resend_delivery

    if (delivery_id is None) != failed:
        raise Failure("Pass either the id of a delivery or --failed.", WRONG_USAGE)
    if delivery_id is None:
        _resend_failed(to, dry_run=dry_run, as_json=as_json)
        return
    if to is not None or dry_run:
        raise Failure("--to and --dry-run go with --failed.", WRONG_USAGE)
    wanted = connecting.parse_id(delivery_id, "delivery")
    with connecting.runtime() as runtime:
        resend_delivery(runtime.database, wanted)
        runtime.wake.delivery(wanted)
    if as_json:
        write_json({"delivery_id": str(wanted), "due": True})
    else:
        write_text(f"delivery {wanted} is due")


def _resend_failed(to: str | None, *, dry_run: bool, as_json: bool) -> None:
    from perdure.turns.outbox import resend_failed

    with connecting.database() as database:
        count = resend_failed(database, to, dry_run=dry_run)
    if as_json:
        write_json({"deliveries": count, "due": not dry_run})
    else:
        write_text(f"{count} failed deliveries {'would be' if dry_run else 'are'} due")
