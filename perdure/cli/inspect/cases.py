"""`perdure cases`: questions answered before: in and out of files, searched, pruned, restored."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO
from uuid import UUID

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from perdure.access.tenants import parse_tenant, user_key
from perdure.casebank import archive, reflection, sharing, transfer
from perdure.casebank import cases as stored
from perdure.casebank.embedding import embed_cases
from perdure.casebank.plan.policy import Action
from perdure.casebank.runs import state
from perdure.casebank.search import EVERYBODY, Within, build_indexes
from perdure.cli import connecting
from perdure.cli.display import AsJson, write_fields, write_json, write_table
from perdure.cli.errors import WRONG_USAGE, Failure
from perdure.cli.files import STDIO, opened, write_whole
from perdure.cli.inspect.case_report import write_report
from perdure.database.engine import Database
from perdure.errors import PerdureError, Unavailable
from perdure.runtime import Runtime

if TYPE_CHECKING:
    from perdure.casebank.runs.prune import RunContext

commands = typer.Typer(help="The CaseBank: answered questions.", no_args_is_help=True)
of_runs = typer.Typer(help="Runs of the weekly policy, newest first.", invoke_without_command=True)
commands.add_typer(of_runs, name="runs")

MAX_K = 100
_WHO = "the command line"
_READERS = ("bank", "user_id", "shared_at")
_COLUMNS = ("case_id", *_READERS, "status", "usage_count", "success_rate", "last_accessed_at", "query", "tenant")
_FOUND = ("similarity", "case_id", *_READERS, "status", "usage_count", "success_rate", "query", "tenant")
_RUNS = ("run_id", "phase", "done", "total", "started_at", "finished_at", "error", "dry_run")
_COUNTS = ("removed_cases", "merged_cases", "archived_cases")

CaseId = Annotated[str, typer.Argument(metavar="CASE_ID", help="As `perdure cases list` has it.")]
OfBank = Annotated[str | None, typer.Option(help="Only cases of this bank.")]
RunId = Annotated[str, typer.Argument(metavar="RUN_ID", help="As `perdure cases runs` has it.")]


@commands.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One case a line; -: stdin.")],
    *,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="The tenant of the lines that name none; default none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import cases. Those without a vector get one; importing a file twice changes nothing.

    Bad lines are told with their number and reason, the good ones are kept; then the status is 1.
    """
    named = parse_tenant(tenant)
    with connecting.runtime() as runtime, opened(file) as lines:
        result = _imported(runtime, lines, named)
        _make_findable(runtime)
    done = {"added": result.added, "unchanged": result.unchanged, "refused": len(result.bad)}
    if as_json:
        write_json({**done, "bad": [{"line": number, "reason": reason} for number, reason in result.bad]})
    else:
        write_fields(done)
    for number, reason in result.bad:
        sys.stderr.write(f"line {number}: {reason}\n")
    if result.bad:
        raise Failure(f"{len(result.bad)} lines were not imported; the good ones were.")


@commands.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; - or nothing: stdout.")] = STDIO,
    tenant: connecting.OnlyTenant = None,
    bank: OfBank = None,
) -> None:
    """Export every case, archived ones included, one a line, as they can be imported elsewhere."""
    named = parse_tenant(tenant)
    with connecting.database() as database:
        given = transfer.export_lines(database, tenant=named, bank=bank)
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in given)
        if file == STDIO:
            sys.stdout.writelines(lines)
        else:
            write_whole(file, lines)


@commands.command("list")
def list_(
    after: Annotated[str, typer.Option(help="Only cases behind this id.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    tenant: connecting.OnlyTenant = None,
    bank: OfBank = None,
    *,
    flagged: Annotated[bool, typer.Option("--flagged", help="Only those that fail more often than not.")] = False,
    archived: Annotated[bool, typer.Option("--archived", help="Archived ones instead of active ones.")] = False,
    as_json: AsJson = False,
) -> None:
    """List cases, in the order of their ids."""
    status = "archived" if archived else "active"
    named = parse_tenant(tenant)
    with connecting.database() as database:
        found = stored.list_cases(
            database, after=after, most=limit, status=status, flagged=flagged, tenant=named, bank=bank
        )
    if as_json:
        write_json(found)
    else:
        write_table(_COLUMNS, [[each[column] for column in _COLUMNS] for each in found])


@commands.command()
def show(case_id: CaseId, *, as_json: AsJson = False) -> None:
    """Show a case, what reflection found wrong with it, and its history."""
    with connecting.database() as database:
        found = stored.read(database, case_id)
    if as_json:
        write_json(found)
        return
    history = found.pop("history")
    review = found.pop("review") or {}
    write_fields({**found, **{f"review: {name}": value for name, value in review.items()}})
    columns = ("at", "event", "reason", "run_id")
    write_table(columns, [[each[column] for column in columns] for each in history])


@commands.command()
def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What is asked.")],
    k: Annotated[int, typer.Option("-k", min=1, max=MAX_K, help="How many.")] = 10,
    tenant: connecting.OnlyTenant = None,
    user: Annotated[str | None, typer.Option(help="Only cases that this user's prompts could have.")] = None,
    bank: OfBank = None,
    *,
    include_archived: Annotated[bool, typer.Option("--include-archived", help="Archived ones, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Search the cases of all users whose questions are nearest, nearest first; user_id is a case's author."""
    if not query.strip():
        raise Failure("Say what to look for.", WRONG_USAGE)
    if include_archived and user is not None:
        raise Failure("Archived cases enter no prompt: leave out --user.", WRONG_USAGE)
    named = parse_tenant(tenant)
    with connecting.runtime() as runtime:
        if user is not None:
            near = runtime.cases.visible_to(user_key(named, user), query, k, bank=bank)
        else:
            within = EVERYBODY if tenant is None else Within(named)
            near = runtime.cases.nearest(query, k, within, bank=bank, include_archived=include_archived)
    found = [each.record() for each in near]
    if as_json:
        write_json({"results": found})
    else:
        shown = [{**each, "similarity": f"{each['similarity']:.4f}"} for each in found]
        write_table(_FOUND, [[each[column] for column in _FOUND] for each in shown])


@commands.command("prune")
def prune_(
    *,
    apply: Annotated[bool, typer.Option("--apply", help="Have the plan applied; without it nothing changes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what the weekly policy would take now, and why what is spared is spared; with --apply, do it.

    Where runs need approval, --apply only makes the plan. A run that was broken off is gone on with.
    """
    from perdure.casebank.runs import prune  # noqa: PLC0415 (with its arithmetic, it takes a while)

    with connecting.runtime() as runtime, _told_bank(runtime) as bank:
        told = prune.run(bank) if apply else prune.dry_run(bank)
    if as_json:
        write_json(told)
        return
    _write_told(told)
    if told.get("phase") == state.Phase.WAITING_APPROVAL:
        sys.stderr.write(f"The plan waits: `perdure cases approve {told['run_id']}`, or reject.\n")


@of_runs.callback()
def list_runs(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    *,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first; `perdure cases runs show RUN_ID` tells all of one."""
    if context.invoked_subcommand is not None:
        return
    with connecting.database() as database:
        found = state.list_runs(database, limit)
    if as_json:
        write_json(found)
    else:
        write_table(_RUNS, [[each[column] for column in _RUNS] for each in found])


@of_runs.command("show")
def show_run(
    run_id: RunId,
    only: Annotated[Action | None, typer.Option(help="Only these lines of its plan.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show a run: counts, then case by case what goes and what is spared, why, and duplicates side by side."""
    wanted = connecting.parse_id(run_id, "run")
    with connecting.database() as database:
        found = state.read_run(database, wanted)
        if as_json:
            write_json(found)
            return
        write_report(found, _reported(database, wanted, only))


@commands.command()
def approve(run_id: RunId, *, as_json: AsJson = False) -> None:
    """Approve the plan of a run that waits for it, and have it applied here and now."""
    from perdure.casebank.runs import prune  # noqa: PLC0415 (with its arithmetic, it takes a while)

    wanted = connecting.parse_id(run_id, "run")
    with connecting.runtime() as runtime, _told_bank(runtime) as bank:
        state.approve(runtime.database, wanted, _WHO)
        prune.advance(bank)
        told = state.result(runtime.database, wanted)
    (write_json if as_json else _write_told)(told)


@commands.command()
def reject(run_id: RunId, *, as_json: AsJson = False) -> None:
    """Reject the plan of a run that waits for approval: nothing of it is applied."""
    wanted = connecting.parse_id(run_id, "run")
    with connecting.database() as database:
        state.reject(database, wanted, _WHO)
    if as_json:
        write_json({"run_id": str(wanted), "phase": state.Phase.REJECTED.value})


@commands.command()
def restore(case_id: CaseId, *, as_json: AsJson = False) -> None:
    """Make an archived case active again, as it was; it is spared for some days."""
    with connecting.database() as database:
        archive.restore(database, case_id)
    if as_json:
        write_json({"case_id": case_id, "status": "restored"})


@commands.command()
def share(case_id: CaseId, *, as_json: AsJson = False) -> None:
    """Let a case that was made from one user's words enter the prompts of all users of its bank."""
    with connecting.database() as database:
        shared_at = sharing.share(database, case_id, _WHO).isoformat()
    if as_json:
        write_json({"case_id": case_id, "shared_at": shared_at})


@commands.command()
def unshare(case_id: CaseId, *, as_json: AsJson = False) -> None:
    """Let a case enter its author's prompts only."""
    with connecting.database() as database:
        sharing.unshare(database, case_id, _WHO)
    if as_json:
        write_json({"case_id": case_id, "shared_at": None})


@commands.command()
def reflect(
    *,
    others: Annotated[
        bool, typer.Option("--embed-anew", help="Give new vectors to cases that another embedder's are kept of.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Set the rates of cases from what came of their newest uses, flag those that fail, give vectors where none are."""
    with connecting.runtime() as runtime:
        done = reflection.reflect(runtime.database)
        _make_findable(runtime, others=others)
    if as_json:
        write_json({"rated": done.rated, "flagged": done.flagged})
    else:
        write_fields({"rated": done.rated, "flagged": done.flagged})


@contextmanager
def _told_bank(runtime: Runtime) -> Iterator[RunContext]:
    """The CaseBank, whose work moves a progress bar."""
    from perdure.channels.notices import bank_of  # noqa: PLC0415 (it imports the arithmetic, too)

    with _progress("cases") as (shown, task):

        def tell(phase: state.Phase, done: int, total: int) -> None:
            shown.update(task, description=phase.value, completed=done, total=total)

        yield replace(bank_of(runtime), on_progress=tell)


def _imported(runtime: Runtime, lines: TextIO, tenant: str | None) -> transfer.Imported:
    embedder = runtime.embedder

    def dimensions(name: str) -> int | None:
        return embedder.dimensions if name == embedder.name else None

    with _progress("lines") as (shown, task):
        counted = _counted(lines, shown, task)
        now = runtime.clock.now()
        return transfer.import_lines(runtime.database, counted, now=now, dimensions=dimensions, tenant=tenant)


def _counted(lines: TextIO, shown: Progress, task: TaskID) -> Iterator[str]:
    for line in lines:
        yield line
        shown.advance(task)


def _make_findable(runtime: Runtime, *, others: bool = False) -> None:
    """Vectors for cases that lack one, and the index that a large bank is searched by."""
    with _progress("vectors") as (shown, task):
        try:
            for looked in embed_cases(runtime.database, runtime.embedder, reembed=others):
                shown.update(task, completed=looked)
        except Unavailable:
            raise
        except PerdureError as error:
            sys.stderr.write(f"Not all vectors could be made now ({error.message}); a worker makes them later.\n")
        shown.update(shown.add_task("index", total=None))
        build_indexes(runtime.database)


def _write_told(told: dict[str, Any]) -> None:
    """A plan or what came of it: counts, then a line a case."""
    details = told["details"]
    write_fields({name: told[name] for name in (*_COUNTS, "run_id", "phase") if told.get(name) is not None})
    rows: list[list[Any]] = [["removed", case_id, None, None] for case_id in details["removed"]]
    rows += [
        ["merged", each["removed"], f"into {each['keeper']}", f"{each['similarity']:.4f}"] for each in details["merged"]
    ]
    rows += [["archived", case_id, None, None] for case_id in details["archived"]]
    rows += [["spared", each["case_id"], each["rule"], each["reason"]] for each in details["spared"]]
    write_table(("what", "case_id", "rule", "why"), rows)


def _reported(database: Database, run_id: UUID, only: Action | None) -> Iterator[dict[str, Any]]:
    """The lines of a run's plan, a page at a time."""
    after = -1
    while lines := state.read_report(database, run_id, action=only, after=after):
        yield from lines
        after = lines[-1]["position"]


@contextmanager
def _progress(what: str) -> Iterator[tuple[Progress, TaskID]]:
    """A bar on a terminal's stderr; nothing elsewhere."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        yield shown, shown.add_task(what, total=None)
