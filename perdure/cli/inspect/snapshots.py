"""`perdure sessions snapshot`: exports a session's working state to a file, and imports it from a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import connecting
from perdure.cli.audited import audited
from perdure.cli.display import write_document
from perdure.cli.errors import Failure
from perdure.cli.files import write_whole
from perdure.errors import InvalidRequest

if TYPE_CHECKING:
    from perdure.turns.restore_snapshot import Restored

commands = typer.Typer(help="Export and import the working state of a session.", no_args_is_help=True)

_STDIO = Path("-")
_MOST_BYTES = 64 * 2**20
"""The most bytes read from a file. A snapshot contains only the last turns and is far smaller."""


@commands.command("export")
def export(
    session_id: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; default, or -: stdout.")] = _STDIO,
) -> None:
    """Export a session's snapshot. The file is written atomically."""
    from perdure.snapshots import exchange
    from perdure.snapshots.codec import dump

    wanted = connecting.parse_id(session_id, "session")
    with connecting.opened() as (settings, database):
        text = dump(exchange.read(database, wanted, settings.memory.working_turns), indent=2) + "\n"
    if file == _STDIO:
        write_document([text])
    else:
        write_whole(file, text)


@commands.command("import")
@audited("snapshots.import", "session")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The exported file; -: stdin.")],
    session: Annotated[str | None, typer.Option(help="Refuse a snapshot of any other session.")] = None,
) -> None:
    """Restore a snapshot into its session.

    Restores the working variables and accepts the pending messages. A message whose id was accepted before is not
    accepted again, so the file may be imported twice. The variables are restored only if the session is still at the
    snapshot's tick. If this database does not have the session, it is created for the pending messages. The
    transcript is unchanged.
    """
    from perdure.snapshots.codec import parse
    from perdure.turns.restore_snapshot import restore

    expected = None if session is None else connecting.parse_id(session, "session")
    snapshot = parse(_read(file), expected)
    with connecting.runtime() as runtime:
        done = restore(runtime, snapshot)
    sys.stderr.write(f"Session {snapshot.agent_id}: {_report(done)}\n")


def _report(done: Restored) -> str:
    variables = "working variables restored."
    if done.variables_left is not None:
        variables = f"working variables unchanged. {done.variables_left}"
    messages = f" Pending messages: {done.accepted} accepted, {done.known} accepted before."
    return variables + (messages if done.accepted or done.known else "")


def _read(file: Path) -> str:
    try:
        with sys.stdin.buffer if file == _STDIO else file.open("rb") as source:
            data = source.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror}.") from error
    if len(data) > _MOST_BYTES:
        raise Failure(f"{file} is not a snapshot: it is longer than {_MOST_BYTES:,} bytes.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The snapshot cannot be read: it is not UTF-8 at byte {error.start}.") from error
