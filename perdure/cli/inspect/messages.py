"""`perdure messages`: imports and exports conversations as JSON Lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from perdure.access.tenants import parse_tenant, user_key
from perdure.cli import connecting
from perdure.cli.audited import audited, describe
from perdure.cli.display import AsJson, progress, write_document, write_fields, write_json
from perdure.cli.errors import WRONG_USAGE, Failure
from perdure.cli.files import STDIO, opened, opened_bytes, write_whole

if TYPE_CHECKING:
    from perdure.memory.import_export import Given, ImportResult
    from perdure.runtime import Runtime

commands = typer.Typer(help="Export and import conversations.", no_args_is_help=True)


Origin = Literal["chatgpt", "claude"]


@commands.command("import")
@audited("messages.import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="One message per line, or with --from another chat's export; -: stdin."),
    ],
    *,
    origin: Annotated[
        Origin | None,
        typer.Option("--from", help="The file is an export of this chat: its ZIP file, or conversations.json."),
    ] = None,
    user: Annotated[str, typer.Option(help="The user whose conversations another chat's export has.")] = "local",
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="The tenant of lines without one; default: none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import conversations. They are searchable when the command ends; the workers consolidate them later.

    Importing a file again changes nothing. Valid lines are imported even if others are invalid. Invalid lines are
    reported with their number and reason, and the exit status is then 1.

    Of another chat's conversation, the current branch is imported. The messages of other branches are counted.
    """
    named = parse_tenant(tenant)
    if origin is not None:
        user_key(named, user)
    others: dict[str, int] = {}
    with connecting.runtime() as runtime:
        if origin is None:
            with opened(file) as stream:
                result = _imported(runtime, _lines(stream), named)
        else:
            result = _imported(runtime, _of_another(file, origin, user, others), named)
        _report(result, others, origin, as_json=as_json)


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
            write_document(lines)
        else:
            write_whole(file, lines)


def _report(result: ImportResult, others: dict[str, int], origin: Origin | None, *, as_json: bool) -> None:
    """Print what was imported, also to the operator's record.

    Raises:
        Failure: lines are invalid.
    """
    counts = {"added": result.added, "known": result.known, "refused": result.refused}
    describe(", ".join(f"{number} {what}" for what, number in counts.items()))
    done = {**counts, "sessions": len(result.sessions), **others}
    if as_json:
        write_json({**done, "bad": [{"line": bad.number, "reason": bad.reason} for bad in result.bad]})
    else:
        write_fields(done)
    for bad in result.bad:
        sys.stderr.write(f"{'line' if origin is None else 'message'} {bad.number}: {bad.reason}\n")
    if result.refused > len(result.bad):
        sys.stderr.write(f"... and {result.refused - len(result.bad)} more\n")
    if result.refused:
        what = "lines" if origin is None else "messages"
        raise Failure(f"{result.refused} {what} are invalid and were not imported; the others were.")


def _lines(stream: TextIO) -> Iterator[str]:
    """The lines of a file.

    Raises:
        Failure: the file is an array, as other chats export it.
    """
    from perdure.memory.import_export import bounded_lines

    lines = bounded_lines(stream)
    first = next(lines, "")
    if first.lstrip().startswith("["):
        raise Failure(
            "The file is a JSON array. Pass --from chatgpt or --from claude for an export of these.", WRONG_USAGE
        )
    return chain([first], lines)


def _of_another(file: Path, origin: Origin, user: str, others: dict[str, int]) -> Iterator[Given]:
    """The messages of another chat's export. Sets `others["other_branches"]` to the messages that are left out."""
    from perdure.memory.other_chats import READERS, OtherBranches, unpacked

    left = OtherBranches()
    with opened_bytes(file) as stream, unpacked(stream) as members:
        for member in members:
            yield from READERS[origin](member, user, left)
    others["other_branches"] = left.messages


def _imported(runtime: Runtime, lines: Iterable[Given], tenant: str | None) -> ImportResult:
    """Import the lines and embed their messages."""
    from perdure.memory.embedding import embed_sessions
    from perdure.memory.import_export import ImportResult, import_messages

    result = ImportResult()
    with progress("lines") as (shown, read):
        for result in import_messages(runtime.database, runtime.clock, runtime.agents.default.name, lines, tenant):
            shown.update(read, completed=result.added + result.known + result.refused)
        shown.update(shown.add_task("vectors", total=None))
        days = runtime.settings.retention.vectors_days
        filled = embed_sessions(runtime.database, runtime.embedder, result.sessions, vectors_days=days)
    if filled.error is not None:
        sys.stderr.write(f"Some messages were not embedded ({filled.error}); the workers embed them later.\n")
    return result
