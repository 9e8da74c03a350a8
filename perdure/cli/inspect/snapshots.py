"""`perdure sessions snapshot`: what an agent is in the middle of, out to a file and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli import connecting
from perdure.cli.errors import Failure
from perdure.cli.files import write_whole
from perdure.errors import InvalidRequest
from perdure.snapshots import exchange
from perdure.snapshots.codec import dump, parse
from perdure.turns.restore_snapshot import Restored, restore

commands = typer.Typer(help="What an agent is in the middle of, as a file.", no_args_is_help=True)

_STDIO = Path("-")
_MOST_BYTES = 64 * 2**20
"""Bytes of a file that is read; a snapshot holds the last turns only and is far smaller."""


@commands.command("export")
def export(
    session_id: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; - or nothing: stdout.")] = _STDIO,
) -> None:
    """Write a session's snapshot, whole or not at all."""
    wanted = connecting.parse_id(session_id, "session")
    with connecting.opened() as (settings, database):
        text = dump(exchange.read(database, wanted, settings.memory.working_turns), indent=2) + "\n"
    if file == _STDIO:
        sys.stdout.write(text)
    else:
        write_whole(file, text)


@commands.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What was exported; -: stdin.")],
    session: Annotated[str | None, typer.Option(help="The session that it must be of.")] = None,
) -> None:
    """Put the working variables and pending messages of a snapshot back into its session.

    Each message is accepted once, by its id, however often the file is imported. The variables are put back only
    while nothing was committed in the session since: at the snapshot's tick. A session that is unknown here is opened
    for its pending messages. The conversation is not touched.
    """
    expected = None if session is None else connecting.parse_id(session, "session")
    snapshot = parse(_read(file), expected)
    with connecting.runtime() as runtime:
        done = restore(runtime, snapshot)
    sys.stderr.write(f"Session {snapshot.agent_id}: {_report(done)}\n")


def _report(done: Restored) -> str:
    variables = "working variables put back."
    if done.variables_left is not None:
        variables = f"working variables left as they are. {done.variables_left}"
    messages = f" Pending messages: {done.accepted} accepted, {done.known} accepted before."
    return variables + (messages if done.accepted or done.known else "")


def _read(file: Path) -> str:
    try:
        with sys.stdin.buffer if file == _STDIO else file.open("rb") as source:
            data = source.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror}.") from error
    if len(data) > _MOST_BYTES:
        raise Failure(f"{file} is no snapshot: it is longer than {_MOST_BYTES:,} bytes.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The snapshot cannot be read: it is not UTF-8 at byte {error.start}.") from error
