"""`perdure memory`: searches, lists, corrects, consolidates, decays, exports and erases memories and messages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from perdure.access.tenants import UserKey, parse_tenant, user_key
from perdure.cli import connecting
from perdure.cli.audited import audited
from perdure.cli.display import AsJson, progress, write_document, write_fields, write_json, write_table, write_text
from perdure.cli.errors import WRONG_USAGE, Failure
from perdure.cli.files import write_whole
from perdure.errors import NotFound

if TYPE_CHECKING:
    from perdure.database.engine import Database
    from perdure.memory.consolidation.consolidate import Consolidator, Progress
    from perdure.runtime import Runtime

commands = typer.Typer(help="Memories and messages of users.", no_args_is_help=True)

User = Annotated[str, typer.Option(help="The id of the user.")]

MAX_K = 100

_STDOUT = Path("-")
_LOCAL = "local"
MAX_MEMORIES = 1_000
_COLUMNS = ("layer", "score", "occurred_at", "valid_until", "content", "id")
_LISTED = ("id", "type", "subject", "attribute", "valid_from", "valid_until", "content")
_IDS = ("session_id", "turn_id")
_OF_USE = ("at", "turn_id", "conversation")
_OF_SOURCE = ("said_at", "role", "channel", "conversation", "text", "message_id")

MemoryId = Annotated[str, typer.Argument(metavar="ID", help="The memory's id, as `perdure memory list` prints it.")]


class LayerName(StrEnum):
    """Has the values of `perdure.memory.recall.search.Layer`. A test checks this."""

    EPISODIC = "episodic"
    SEMANTIC = "semantic"


@commands.command()
def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The text to search for.")],
    user: User = _LOCAL,
    tenant: connecting.Tenant = None,
    k: Annotated[int, typer.Option("-k", min=1, max=MAX_K, help="The most results.")] = 10,
    layer: Annotated[list[LayerName] | None, typer.Option(help="Only this layer; repeatable.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Search the memories and messages of a user."""
    from perdure.memory.recall.search import Layer

    layers = tuple(map(Layer, layer or Layer))
    key = user_key(parse_tenant(tenant), user)
    with connecting.runtime() as runtime:
        found = runtime.recall.search(key, query, k, layers, record=False)
    results = [each.as_json() for each in found]
    if as_json:
        write_json({"results": results})
    else:
        write_table(_COLUMNS, [{**each, "score": f"{each['score']:.3f}"} for each in results])


@commands.command("list")
def list_(
    user: User = _LOCAL,
    tenant: connecting.Tenant = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_MEMORIES, help="The most memories.")] = 100,
    after: Annotated[
        str | None, typer.Option(metavar="ID", help="Only memories that follow this one in the list.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List the memories of a user, newest first.

    The list includes superseded memories.
    """
    from perdure.memory.owned import list_memories

    key, previous = (
        user_key(parse_tenant(tenant), user),
        None if after is None else connecting.parse_id(after, "memory"),
    )
    with connecting.database() as database:
        found = [_shown(each) for each in list_memories(database, key, limit, previous)]
    if as_json:
        write_json(found)
    else:
        write_table(_LISTED, found)


@commands.command()
def show(
    memory_id: MemoryId, user: User = _LOCAL, tenant: connecting.Tenant = None, *, as_json: AsJson = False
) -> None:
    """Show one memory, with its messages and its uses."""
    from perdure.memory.owned import read_with_sources

    key = user_key(parse_tenant(tenant), user)
    with connecting.database() as database:
        found = _shown(read_with_sources(database, _memory_of(database, key, user, memory_id)))
    if as_json:
        write_json(found)
        return
    sources, uses = found.pop("sources"), found.pop("used_in")
    write_fields({**found, "message_ids": ", ".join(found["message_ids"])})
    write_table(_OF_SOURCE, sources)
    if uses:
        write_text("\nIn the prompts of these turns (`perdure turns prompt` shows each):")
        write_table(_OF_USE, uses)


@commands.command()
@audited("memories.correct", "memory_id")
def correct(
    memory_id: MemoryId,
    content: Annotated[str, typer.Argument(metavar="CONTENT", help="The right words, up to 1,000 characters.")],
    user: User = _LOCAL,
    tenant: connecting.Tenant = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Correct a memory of a user.

    Prints the new memory, which supersedes the wrong one.
    """
    from perdure.memory.consolidation.candidates import MAX_CONTENT_CHARS
    from perdure.memory.owned import correct as correct_memory
    from perdure.text.untrusted import storable

    if not content.strip() or len(content) > MAX_CONTENT_CHARS:
        raise Failure(f"CONTENT must have 1 to {MAX_CONTENT_CHARS:,} characters.", WRONG_USAGE)
    key = user_key(parse_tenant(tenant), user)
    with connecting.runtime() as runtime:
        wrong = _memory_of(runtime.database, key, user, memory_id)
        right = _shown(correct_memory(runtime.database, runtime.clock, key, wrong, storable(content)))
    if as_json:
        write_json(right)
    else:
        write_fields({**right, "message_ids": ", ".join(right["message_ids"])})


def _memory_of(database: Database, key: UserKey, user: str, memory_id: str) -> UUID:
    """The id of the memory, which must be one of the user's."""
    from perdure.memory.owned import owner

    parsed = connecting.parse_id(memory_id, "memory")
    try:
        owned = owner(database, parsed) == key
    except NotFound:
        owned = False
    if not owned:
        raise Failure(f"{user!r} has no memory {memory_id}.")
    return parsed


def _shown(memory: dict[str, Any]) -> dict[str, Any]:
    """A memory as JSON shows it."""
    lists: dict[str, Any] = {
        name: [{**each, **{key: str(each[key]) for key in _IDS if key in each}} for each in memory[name]]
        for name in ("sources", "used_in")
        if name in memory
    }
    return {**memory, "id": str(memory["id"]), **lists}


@commands.command()
@audited("memories.consolidate", "session", ("retry_failed",))
def consolidate(
    session: Annotated[
        str | None, typer.Option(help="Consolidate only this ended session, even if it was abandoned.")
    ] = None,
    *,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="First retry abandoned sessions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Consolidate a batch of ended sessions into memories.

    If a consolidation fails, its error is stored, and the exit status is 1. Workers retry it until it is abandoned.
    """
    from perdure.memory.consolidation.consolidate import backlog

    wanted = None if session is None else connecting.parse_id(session, "session")
    with connecting.runtime() as runtime, _consolidator(runtime) as consolidator:
        if wanted is not None or retry_failed:
            _retry_abandoned(runtime, wanted)
        result = _batch(consolidator) if wanted is None else _one(consolidator, wanted)
        left = backlog(runtime.database, runtime.settings.consolidation)
        (write_json if as_json else write_fields)(result)
        if left.waiting:
            sys.stderr.write(f"{left.waiting} sessions still wait for consolidation.\n")
        if left.given_up:
            sys.stderr.write(f"{left.given_up} sessions are abandoned; --retry-failed retries them.\n")
        if result["failed"]:
            raise Failure(f"{result['failed']} sessions could not be consolidated; they are retried later.")


def _retry_abandoned(runtime: Runtime, session_id: UUID | None) -> None:
    """Make the abandoned session `session_id` due again; `None`: all abandoned sessions."""
    from perdure.memory.consolidation.consolidate import retry_abandoned

    chosen = None if session_id is None else [session_id]
    retried = retry_abandoned(runtime.database, runtime.settings.consolidation, runtime.settings.turn.lease_s, chosen)
    if retried:
        sys.stderr.write(f"{retried} abandoned sessions are due again.\n")


def _batch(consolidator: Consolidator) -> dict[str, int]:
    with progress("sessions") as (shown, task):

        def show(made: Progress) -> None:
            shown.update(task, completed=made.done, total=made.total)

        return consolidator.batch(show).as_result()


def _one(consolidator: Consolidator, session_id: UUID) -> dict[str, int]:
    from perdure.memory.consolidation.consolidate import (
        Consolidated,
        ConsolidationCounts,
        ConsolidationFailed,
        ConsolidationNotDue,
        Skipped,
    )

    outcome = consolidator.consolidate(session_id)
    match outcome:
        case ConsolidationNotDue():
            raise Failure("Nothing to do: the session is live, is consolidated, or is being consolidated.")
        case ConsolidationFailed(error):
            sys.stderr.write(f"{error}\n")
        case Consolidated() | Skipped():
            pass
    return ConsolidationCounts().including(outcome).as_result()


@contextmanager
def _consolidator(runtime: Runtime) -> Iterator[Consolidator]:
    """A consolidator for this process. A `Runner` renews its leases, as in a worker."""
    from perdure.tasks.memory import consolidator
    from perdure.tasks.process import Process
    from perdure.turns.run.loop import Runner

    runner = Runner(runtime, owner=f"command-{os.getpid()}")
    runner.start()
    try:
        yield consolidator(Process(runtime, runner, {}, lambda _: None))
    finally:
        runner.close()


@commands.command()
def decay(*, as_json: AsJson = False) -> None:
    """Update the value of every memory, and archive old ones."""
    from perdure.memory.decay import decay as decay_all

    with connecting.database() as database, progress("memories") as (shown, task):
        done = decay_all(database, lambda processed: shown.update(task, completed=processed))
    (write_json if as_json else write_fields)(asdict(done))


@commands.command()
def export(
    user: User,
    tenant: connecting.Tenant = None,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; default, or -: stdout.")] = _STDOUT,
) -> None:
    """Export everything that is stored about a user.

    Writes one JSON document, atomically.
    """
    from perdure.users.export import export_user

    key = user_key(parse_tenant(tenant), user)
    with connecting.runtime() as runtime:
        document = export_user(runtime.database, runtime.clock, runtime.redis_memory, key)
    text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
    if file == _STDOUT:
        write_document([text])
    else:
        write_whole(file, text)


@commands.command()
@audited("memories.forget", "memory_id", ("everything",), names_user=lambda given: not given["everything"])
def forget(
    memory_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The id of a memory, as `list` or `search` prints it.")
    ] = None,
    user: Annotated[str, typer.Option(help="The id of the user. Required.")] = "",
    tenant: connecting.Tenant = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Everything stored about the user, messages included.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Erase one memory of a user, or with --all everything.

    This cannot be undone. --all also erases the user's data in Redis, and prints the number of erased rows of each
    table. A worker erases the data in Redis again after the duration of a turn's lease.
    """
    from perdure.memory.recall.agent_memory import forget as forget_memory
    from perdure.users.tables import USER_TABLES

    if not user:
        raise Failure("--user is required: data is erased for one user at a time.", WRONG_USAGE)
    if everything == (memory_id is not None):
        raise Failure("Pass either the id of a memory or --all.", WRONG_USAGE)
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
        sys.stderr.write("Redis or the snapshots are unavailable; a worker erases the user there later.\n")
