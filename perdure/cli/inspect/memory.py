"""`perdure memory`: what is known of users, and what was said; to search, keep up, take along and erase."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from perdure.access.tenants import parse_tenant, user_key
from perdure.cli import connecting
from perdure.cli.display import AsJson, write_fields, write_json, write_table
from perdure.cli.errors import WRONG_USAGE, Failure
from perdure.cli.files import write_whole
from perdure.memory.consolidation.consolidate import (
    Consolidated,
    ConsolidationCounts,
    Consolidator,
    Failed,
    NotDue,
    Skipped,
    backlog,
    retry_abandoned,
)
from perdure.memory.consolidation.consolidate import Progress as Looked
from perdure.memory.decay import decay as decay_all
from perdure.memory.recall.agent_memory import forget as forget_memory
from perdure.memory.recall.search import MAX_K, Layer
from perdure.runtime import Runtime
from perdure.turns.run.runner import Runner
from perdure.users.export import export_user
from perdure.users.tables import USER_TABLES

commands = typer.Typer(help="Memories and messages of users.", no_args_is_help=True)

User = Annotated[str, typer.Option(help="Whose.")]

_STDOUT = Path("-")
_LOCAL = "local"
_COLUMNS = ("layer", "score", "occurred_at", "content", "id")


@commands.command()
def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to look for.")],
    user: User = _LOCAL,
    tenant: connecting.Tenant = None,
    k: Annotated[int, typer.Option("-k", min=1, max=MAX_K, help="How many.")] = 10,
    layer: Annotated[list[Layer] | None, typer.Option(help="Only this layer; may be given twice.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Search what is known of a user and what was said, as their agent does."""
    key = user_key(parse_tenant(tenant), user)
    with connecting.runtime() as runtime:
        found = runtime.recall.search(key, query, k, layer or tuple(Layer), record=False)
    results = [each.as_json() for each in found]
    if as_json:
        write_json({"results": results})
    else:
        write_table(_COLUMNS, [[_cell(each, column) for column in _COLUMNS] for each in results])


@commands.command()
def consolidate(
    session: Annotated[
        str | None, typer.Option(help="Only this session, which has ended; also if it was given up.")
    ] = None,
    *,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="First make the sessions due again that were given up.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Draw memories from a batch of the ended sessions that wait for it, here and now.

    Status 1 if a session failed: it keeps its error and is tried again later.
    """
    wanted = None if session is None else connecting.parse_id(session, "session")
    with connecting.runtime() as runtime, _consolidator(runtime) as consolidator:
        if wanted is not None or retry_failed:
            _try_again(runtime, wanted)
        result = _batch(consolidator) if wanted is None else _one(consolidator, wanted)
        left = backlog(runtime.database, runtime.settings.consolidation)
    (write_json if as_json else write_fields)(result)
    if left.waiting:
        sys.stderr.write(f"{left.waiting} sessions still wait.\n")
    if left.given_up:
        sys.stderr.write(f"{left.given_up} sessions were given up; --retry-failed tries them again.\n")
    if result["failed"]:
        raise Failure(f"{result['failed']} sessions could not be consolidated; they are tried again later.")


def _try_again(runtime: Runtime, session_id: UUID | None) -> None:
    """Make sessions due again that were given up: this one, or all."""
    chosen = None if session_id is None else [session_id]
    retried = retry_abandoned(runtime.database, runtime.settings.consolidation, runtime.settings.turn.lease_s, chosen)
    if retried:
        sys.stderr.write(f"{retried} sessions that were given up are due again.\n")


def _batch(consolidator: Consolidator) -> dict[str, int]:
    with _progress("sessions") as (shown, task):

        def tell(looked: Looked) -> None:
            shown.update(task, completed=looked.done, total=looked.total)

        return consolidator.batch(tell).as_result()


def _one(consolidator: Consolidator, session_id: UUID) -> dict[str, int]:
    outcome = consolidator.consolidate(session_id)
    match outcome:
        case NotDue():
            raise Failure(
                "Nothing to do: the session has not ended, is consolidated already, or is being consolidated."
            )
        case Failed(error):
            sys.stderr.write(f"{error}\n")
        case Consolidated() | Skipped():
            pass
    return ConsolidationCounts().including(outcome).as_result()


@contextmanager
def _consolidator(runtime: Runtime) -> Iterator[Consolidator]:
    """One that keeps its leases as a worker does."""
    from perdure.tasks.memory import consolidator  # noqa: PLC0415 (with Celery behind it, it takes a while)
    from perdure.tasks.process import Process  # noqa: PLC0415 (the same)

    runner = Runner(runtime, owner=f"command-{os.getpid()}")
    runner.start()
    try:
        yield consolidator(Process(runtime, runner, {}, lambda _: False))
    finally:
        runner.close()


@commands.command()
def decay(*, as_json: AsJson = False) -> None:
    """Bring the value of every memory up to now; put away what has faded."""
    with connecting.database() as database, _progress("memories") as (shown, task):
        done = decay_all(database, lambda looked_at: shown.update(task, completed=looked_at))
    (write_json if as_json else write_fields)(asdict(done))


@commands.command()
def export(
    user: User,
    tenant: connecting.Tenant = None,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; - or nothing: stdout.")] = _STDOUT,
) -> None:
    """Write everything that is held about a user as one JSON document, whole or not at all."""
    key = user_key(parse_tenant(tenant), user)
    with connecting.runtime() as runtime:
        document = export_user(runtime.database, runtime.clock, runtime.redis_memory, key)
    text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
    if file == _STDOUT:
        sys.stdout.write(text)
    else:
        write_whole(file, text)


@commands.command()
def forget(
    memory_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One memory, as `search` shows its id.")
    ] = None,
    user: Annotated[str, typer.Option(help="Whose; has to be named.")] = "",
    tenant: connecting.Tenant = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="The user altogether: what they said, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget one memory of a user, or with --all the user: there is no way back.

    Prints how many rows went, by table. What is in Redis goes with them, and once more after one lease.
    """
    if not user:
        raise Failure("Say whose: --user U. Nothing is ever forgotten of all users at once.", WRONG_USAGE)
    if everything == (memory_id is not None):
        raise Failure("Give either the id of a memory or --all.", WRONG_USAGE)
    key = user_key(parse_tenant(tenant), user)
    with connecting.runtime() as runtime:
        if memory_id is not None:
            if not forget_memory(runtime.database, key, connecting.parse_id(memory_id, "memory")):
                raise Failure(f"{user!r} has no memory {memory_id}.")
            return
        erased = runtime.eraser.erase(key)
    if as_json:
        write_json({"user_id": user, **asdict(erased)})
    else:
        write_fields({user_table.table: erased.rows[user_table.table] for user_table in reversed(USER_TABLES)})
    if not erased.everywhere:
        sys.stderr.write("Redis or the snapshots could not be cleaned now; a worker does it as soon as it can.\n")


@contextmanager
def _progress(what: str, total: int | None = None) -> Iterator[tuple[Progress, TaskID]]:
    """A bar on a terminal's stderr; nothing elsewhere."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        yield shown, shown.add_task(what, total=total)


def _cell(result: dict[str, Any], column: str) -> Any:
    value = result[column]
    return f"{value:.3f}" if column == "score" else value
