"""`perdure approvals`: lists the tool calls that wait for a person. `perdure turns approve` and `deny` decide."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from perdure.cli import connecting
from perdure.cli.display import AsJson, write_json, write_table

commands = typer.Typer(help="Tool calls that wait for a person.", no_args_is_help=True)

_COLUMNS = ("turn_id", "call_id", "tool", "arguments", "approver", "user_id", "agent", "waiting_since", "expires_at")


@commands.callback()
def _approvals() -> None:
    """Make `list` a subcommand: with a single command, typer would omit its name."""


@commands.command("list")
def list_(
    user: Annotated[str | None, typer.Option(help="Only calls of this user.")] = None,
    tenant: connecting.OnlyTenant = None,
    limit: Annotated[int, typer.Option(min=1, help="The most calls to list.")] = 100,
    *,
    as_json: AsJson = False,
) -> None:
    """List the tool calls that wait, longest wait first.

    `perdure turns approve TURN CALL` and `perdure turns deny TURN CALL` decide.
    """
    from perdure.access.tenants import tenant_of
    from perdure.turns.calls.waiting import list_waiting

    key, named = connecting.parse_user(user, tenant)
    with connecting.database() as database:
        found = list_waiting(database, user=key, tenant=named, all_tenants=named is None, limit=limit)
    if as_json:
        write_json([{**call.body, "tenant": tenant_of(call.user)} for call in found])
        return
    rows = [
        {
            **call.body,
            "arguments": json.dumps(call.body["arguments"], ensure_ascii=False),
            "tenant": tenant_of(call.user),
        }
        for call in found
    ]
    columns = (*_COLUMNS, "tenant")
    write_table(columns, [[row[column] for column in columns] for row in rows])
