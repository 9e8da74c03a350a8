"""`perdure messages`: imports and exports conversations as JSON Lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from perdure.access.tenants import parse_tenant
from perdure.cli import connecting
from perdure.cli.display import AsJson, progress, write_fields, write_json
from perdure.cli.errors import Failure
from perdure.cli.files import STDIO, opened, write_whole

if TYPE_CHECKING:
    from perdure.memory.import_export import ImportResult
    from perdure.runtime import Runtime

commands = typer.Typer(help="Export and import conversations.", no_args_is_help=True)


@commands.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One message per line; -: stdin.")],
    *,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="The tenant of lines without one; default: none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import conversations. They are searchable when the command ends; the workers consolidate them later.

    Importing a file again changes nothing. Valid lines are imported even if others are invalid. Invalid lines are
    reported with their number and reason, and the exit status is then 1.
    """
    named = parse_tenant(tenant)
    with connecting.runtime() as runtime, opened(file) as lines:
        result = _imported(runtime, lines, named)
    done = {"added": result.added, "known": result.known, "refused": result.refused, "sessions": len(result.sessions)}
    if as_json:
        write_json({**done, "bad": [{"line": bad.number, "reason": bad.reason} for bad in result.bad]})
    else:
        write_fields(done)
    for bad in result.bad:
        sys.stderr.write(f"line {bad.number}: {bad.reason}\n")
    if result.refused > len(result.bad):
        sys.stderr.write(f"... and {result.refused - len(result.bad)} more\n")
    if result.refused:
        raise Failure(f"{result.refused} lines are invalid and were not imported; the others were.")


@commands.command()
def export(
    user: Annotated[str | None, typer.Option(help="Only the conversations of this user.")] = None,
    tenant: connecting.OnlyTenant = None,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; default, or -: stdout.")] = STDIO,
) -> None:
    """Export conversations.

    Writes one message per line, for `perdure messages import`.
    """
    from perdure.memory.import_export import export_messages

    key, named = connecting.parse_user(user, tenant)
    with connecting.database() as database:
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in export_messages(database, key, named))
        if file == STDIO:
            sys.stdout.writelines(lines)
        else:
            write_whole(file, lines)


def _imported(runtime: Runtime, lines: TextIO, tenant: str | None) -> ImportResult:
    """Import the lines and embed their messages."""
    from perdure.memory.embedding import embed_sessions
    from perdure.memory.import_export import ImportResult, import_messages

    result = ImportResult()
    with progress("lines") as (shown, read):
        for result in import_messages(runtime.database, runtime.clock, runtime.agents.default.name, lines, tenant):
            shown.update(read, completed=result.added + result.known + result.refused)
        shown.update(shown.add_task("vectors", total=None))
        filled = embed_sessions(runtime.database, runtime.embedder, result.sessions)
    if filled.error is not None:
        sys.stderr.write(f"Some messages were not embedded ({filled.error}); the workers embed them later.\n")
    return result
