"""`perdure doctor`: checks the settings of PostgreSQL and Redis; see `server_settings`."""

from __future__ import annotations

from dataclasses import asdict

import typer

from perdure.cli import connecting
from perdure.cli.display import AsJson, write_json, write_table, write_text
from perdure.cli.errors import FAILED


def doctor(*, as_json: AsJson = False) -> None:
    """Check the servers that perdure uses for dangerous settings.

    Status 1 if there are any.
    """
    from perdure.cli.inspect.server_settings import findings

    with connecting.opened() as (settings, database):
        found = list(findings(settings, database))
    if as_json:
        write_json({"findings": [asdict(each) for each in found]})
    elif found:
        write_table(
            ("where", "setting", "risk", "fix"), [[each.where, each.setting, each.risk, each.fix] for each in found]
        )
    else:
        write_text("No dangerous setting was found.")
    if found:
        raise typer.Exit(FAILED)
