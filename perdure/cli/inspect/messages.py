"""`perdure messages`: conversations from and into files, one JSON object a line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import Progress

from perdure.access.tenants import parse_tenant
from perdure.cli import connecting
from perdure.cli.display import AsJson, write_fields, write_json
from perdure.cli.errors import Failure
from perdure.cli.files import STDIO, opened, write_whole
from perdure.memory.embedding import embed_sessions
from perdure.memory.import_export import ImportResult, export_messages, import_messages
from perdure.runtime import Runtime

commands = typer.Typer(help="Export and import conversations.", no_args_is_help=True)


@commands.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One message a line; -: stdin.")],
    *,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="The tenant of the lines that name none; default none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import conversations: searchable when this returns, and consolidated like others.

    Importing a file twice changes nothing. Bad lines are told with their number and reason, the good ones are kept;
    then the status is 1.
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
        raise Failure(f"{result.refused} lines were not imported; the good ones were.")


@commands.command()
def export(
    user: Annotated[str | None, typer.Option(help="Only what was said by and to this user.")] = None,
    tenant: connecting.OnlyTenant = None,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; - or nothing: stdout.")] = STDIO,
) -> None:
    """Export conversations, one message a line, as they can be imported elsewhere."""
    key, named = connecting.parse_user(user, tenant)
    with connecting.database() as database:
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in export_messages(database, key, named))
        if file == STDIO:
            sys.stdout.writelines(lines)
        else:
            write_whole(file, lines)


def _imported(runtime: Runtime, lines: TextIO, tenant: str | None) -> ImportResult:
    """What became of the lines, once what they say can be found: by words, and where there are vectors by meaning."""
    result = ImportResult()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        read = shown.add_task("lines", total=None)
        for result in import_messages(runtime.database, runtime.clock, runtime.agents.default.name, lines, tenant):
            shown.update(read, completed=result.added + result.known + result.refused)
        shown.update(shown.add_task("vectors", total=None))
        filled = embed_sessions(runtime.database, runtime.embedder, result.sessions)
    if filled.error is not None:
        sys.stderr.write(f"Not all vectors could be made now ({filled.error}); the workers make them later.\n")
    return result
