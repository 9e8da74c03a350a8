"""`perdure sessions`: conversations and their transcripts."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from perdure.sessions.ending import request_end
from perdure.sessions.reading import list_sessions, read_messages, read_session
from perdure.turns.incoming import parse_reason
from workers.commands import connecting
from workers.commands.display import AsJson, write_fields, write_json, write_table

commands = typer.Typer(help="Conversations and their transcripts.", no_args_is_help=True)

_COLUMNS = ("session_id", "user_id", "agent", "state", "turn_count", "message_count", "last_activity_at", "channels")


@commands.command("list")
def list_(
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    *,
    as_json: AsJson = False,
) -> None:
    """List sessions, newest first."""
    with connecting.database() as database:
        found = list_sessions(database, user, limit)
    if as_json:
        write_json(found)
    else:
        write_table(_COLUMNS, [[session[column] for column in _COLUMNS] for session in found])


@commands.command()
def show(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="The session's id.")], *, as_json: AsJson = False
) -> None:
    """Show a session and its transcript."""
    wanted = connecting.parse_id(session_id, "session")
    with connecting.database() as database:
        session = read_session(database, wanted)
        messages = read_messages(database, wanted)
    if as_json:
        write_json({**session, "messages": messages})
        return
    write_fields({name: value for name, value in session.items() if value not in (None, [])})
    sys.stdout.write("\n")
    write_table(("seq", "role", "content"), [_line(message) for message in messages])


@commands.command()
def end(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="The session's id.")],
    reason: Annotated[str, typer.Option(help="Why; it is kept.")] = "asked for on the command line",
) -> None:
    """Ask for a session to end: its turns are run first, later messages begin the next one."""
    wanted = connecting.parse_id(session_id, "session")
    with connecting.runtime() as runtime:
        if request_end(runtime.database, wanted, parse_reason(reason)):
            runtime.wake.ending(wanted)


def _line(message: dict[str, Any]) -> tuple[int, str, str]:
    calls = [f"{call['name']}({call['arguments']})" for call in message.get("tool_calls", ())]
    return message["seq"], message["role"], " ".join(filter(None, [message["content"], *calls]))
