"""`perdure sessions`: sessions and their transcripts."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from perdure.cli import connecting
from perdure.cli.audited import audited
from perdure.cli.display import MOST_LISTED, AsJson, write_fields, write_json, write_table
from perdure.cli.inspect import snapshots

commands = typer.Typer(help="Conversations and their transcripts.", no_args_is_help=True)
commands.add_typer(snapshots.commands, name="snapshot")

_COLUMNS = (
    "session_id",
    "user_id",
    "agent",
    "state",
    "turn_count",
    "message_count",
    "last_activity_at",
    "channels",
    "summary_kind",
    "consolidation",
    "tenant",
    "conversation",
)


@commands.command("list")
def list_(
    user: Annotated[str | None, typer.Option(help="Only sessions of this user.")] = None,
    tenant: connecting.OnlyTenant = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST_LISTED, help="The most sessions to list.")] = 100,
    *,
    given_up: Annotated[
        bool, typer.Option("--given-up", help="Only sessions whose consolidation was abandoned, with its error.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List sessions, newest first.

    Prints on stderr how many sessions have an abandoned consolidation.
    """
    from perdure.memory.consolidation.consolidate import count_given_up
    from perdure.sessions.reading import list_sessions

    key, named = connecting.parse_user(user, tenant)
    with connecting.database() as database:
        found = list_sessions(database, key, limit, tenant=named, given_up=given_up)
        abandoned = count_given_up(database)
    columns = (*_COLUMNS, "error") if given_up else _COLUMNS
    if as_json:
        write_json(found)
    else:
        shown = [_with_consolidation(session) for session in found]
        write_table(columns, shown)
    if abandoned:
        sys.stderr.write(
            f"The consolidation of {abandoned} sessions was abandoned: `perdure sessions list --given-up` lists them, "
            "`perdure memory consolidate --retry-failed` retries it.\n"
        )


@commands.command()
def show(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="The session's id.")],
    *,
    snapshot: Annotated[
        bool,
        typer.Option("--snapshot", help="Also show the working state: tick, working variables, pending events."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a session and its transcript."""
    from perdure.sessions.reading import read_messages, read_session
    from perdure.snapshots import exchange
    from perdure.snapshots.codec import dump
    from perdure.turns.reading import unsaved_turns

    wanted = connecting.parse_id(session_id, "session")
    with connecting.opened() as (settings, database):
        session = read_session(database, wanted)
        messages = read_messages(database, wanted)
        held = unsaved_turns(database, wanted)
        turns = settings.memory.working_turns
        kept = json.loads(dump(exchange.read(database, wanted, turns))) if snapshot else None
    if as_json:
        write_json({**session, "messages": messages, "held": held} | ({"snapshot": kept} if kept else {}))
        return
    fields = _with_consolidation(session) | (_summary(kept) if kept else {})
    fields["not_answered"] = [f"turn {each['turn_id']}: {each['error']}" for each in held]
    write_fields({name: value for name, value in fields.items() if value not in (None, [])})
    sys.stdout.write("\n")
    write_table(("seq", "role", "content"), [_line(message) for message in messages])


@commands.command()
def export(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="The session's id.")],
    turns: Annotated[int, typer.Option(min=1, max=MOST_LISTED, help="The most turns to export, newest first.")] = 100,
) -> None:
    """Print the settled turns of a session as a bundle for tests.

    `perdure.testing.recorded` replays them. Each turn is as `perdure turns export` prints it.
    """
    from perdure.turns.recording import record_session

    wanted = connecting.parse_id(session_id, "session")
    with connecting.runtime() as runtime:
        write_json(record_session(runtime, wanted, turns))


@commands.command()
@audited("sessions.end", "session_id")
def end(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="The session's id.")],
    reason: Annotated[str, typer.Option(help="The reason to record.")] = "requested on the command line",
    *,
    as_json: AsJson = False,
) -> None:
    """Request the end of a session.

    The session ends once all its turns are settled. Later messages open a new session.
    """
    from perdure.sessions.ending import request_end
    from perdure.turns.inbox.incoming import parse_reason

    wanted = connecting.parse_id(session_id, "session")
    with connecting.runtime() as runtime:
        request_end(runtime.database, wanted, parse_reason(reason)).wake(runtime.wake)
    if as_json:
        write_json({"session_id": str(wanted), "end_requested": True})


@commands.command()
@audited("sessions.fork", "session_id")
def fork(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="The session's id.")],
    tick: Annotated[
        int | None, typer.Option(min=0, help="Copy the turns settled by this tick; default: the current tick.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Copy a session, as it was at a tick, into a new session.

    Prints the new session's id, for `perdure send --session`.
    """
    from perdure.clock import SystemClock
    from perdure.sessions.forking import fork as fork_session

    wanted = connecting.parse_id(session_id, "session")
    with connecting.database() as database:
        made = {"session_id": str(fork_session(database, SystemClock(), wanted, tick))}
    if as_json:
        write_json(made)
    else:
        write_fields(made)


def _with_consolidation(session: dict[str, Any]) -> dict[str, Any]:
    """The session's fields, with the status and the error of its consolidation."""
    consolidation = session["consolidation"] or {"status": None, "error": None}
    return session | {"consolidation": consolidation["status"], "error": consolidation["error"]}


def _line(message: dict[str, Any]) -> dict[str, Any]:
    calls = [f"{call['name']}({call['arguments']})" for call in message.get("tool_calls", ())]
    role = "error" if "error" in message else message["role"]
    return {**message, "role": role, "content": " ".join(filter(None, [message["content"], *calls]))}


def _summary(snapshot: dict[str, Any]) -> dict[str, Any]:
    return {
        "tick_index": snapshot["tick_index"],
        "status": snapshot["status"],
        "working_variables": json.dumps(snapshot["memory"]["working_variables"], ensure_ascii=False),
        "event_queue_backup": [f"{each['source']}: {each['type']}" for each in snapshot["event_queue_backup"]],
    }
