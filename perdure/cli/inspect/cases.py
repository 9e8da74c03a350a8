"""`perdure cases`: imports, exports, searches, prunes and restores the cases of the CaseBank."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO
from uuid import UUID

import typer

from perdure.access.tenants import parse_tenant, user_key
from perdure.cli import connecting
from perdure.cli.audited import audited, describe
from perdure.cli.display import MOST_LISTED, AsJson, progress, write_document, write_fields, write_json, write_table
from perdure.cli.errors import WRONG_USAGE, Failure
from perdure.cli.files import STDIO, opened, write_whole
from perdure.errors import PerdureError, Unavailable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from perdure.casebank.plan.policy import Action
    from perdure.casebank.runs.prune import RunContext
    from perdure.casebank.runs.state import RunPhase
    from perdure.casebank.transfer import Imported
    from perdure.database.engine import Database
    from perdure.runtime import Runtime

commands = typer.Typer(help="The CaseBank: answered questions.", no_args_is_help=True)
of_runs = typer.Typer(help="Runs of the weekly pruning policy, newest first.", invoke_without_command=True)
commands.add_typer(of_runs, name="runs")

MAX_K = 100
_ACTOR = "the command line"
_READERS = ("bank", "user_id", "shared_at")
_COLUMNS = ("case_id", *_READERS, "status", "usage_count", "success_rate", "last_accessed_at", "query", "tenant")
_FOUND = ("similarity", "case_id", *_READERS, "status", "usage_count", "success_rate", "query", "tenant")
_RUNS = ("run_id", "phase", "done", "total", "started_at", "finished_at", "error", "dry_run")
_COUNTS = ("removed_cases", "merged_cases", "archived_cases")

CaseId = Annotated[str, typer.Argument(metavar="CASE_ID", help="The case's id, as `perdure cases list` prints it.")]
OfBank = Annotated[str | None, typer.Option(help="Only cases of this bank.")]
RunId = Annotated[str, typer.Argument(metavar="RUN_ID", help="The run's id, as `perdure cases runs` prints it.")]
ActionName = Literal["remove", "merge", "archive", "spare"]
"""Has the values of `perdure.casebank.plan.policy.Action`. A test checks this."""


@commands.command("import")
@audited("cases.import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One case per line; -: stdin.")],
    *,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="The tenant of lines without one; default: none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import cases, and embed those without a vector. Importing a file again changes nothing.

    Valid lines are imported even if others are invalid. Invalid lines are reported with their number and reason, and
    the exit status is then 1.
    """
    named = parse_tenant(tenant)
    with connecting.runtime() as runtime, opened(file) as lines:
        result = _imported(runtime, lines, named)
        _embed_and_index(runtime)
        done = {"added": result.added, "unchanged": result.unchanged, "refused": len(result.bad)}
        describe(", ".join(f"{number} {what}" for what, number in done.items()))
        if as_json:
            write_json({**done, "bad": [{"line": number, "reason": reason} for number, reason in result.bad]})
        else:
            write_fields(done)
        for number, reason in result.bad:
            sys.stderr.write(f"line {number}: {reason}\n")
        if result.bad:
            raise Failure(f"{len(result.bad)} lines are invalid and were not imported; the others were.")


@commands.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; default, or -: stdout.")] = STDIO,
    tenant: connecting.OnlyTenant = None,
    bank: OfBank = None,
) -> None:
    """Export all cases.

    Writes one case per line, archived ones included, for `perdure cases import`.
    """
    from perdure.casebank.transfer import export_lines

    named = parse_tenant(tenant)
    with connecting.database() as database:
        exported = export_lines(database, tenant=named, bank=bank)
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in exported)
        if file == STDIO:
            write_document(lines)
        else:
            write_whole(file, lines)


@commands.command("list")
def list_(
    after: Annotated[str, typer.Option(help="Only cases whose id is greater.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=MOST_LISTED, help="The most cases to list.")] = 100,
    tenant: connecting.OnlyTenant = None,
    bank: OfBank = None,
    *,
    flagged: Annotated[
        bool, typer.Option("--flagged", help="Only cases that fail more often than they succeed.")
    ] = False,
    archived: Annotated[bool, typer.Option("--archived", help="Archived cases instead of active ones.")] = False,
    as_json: AsJson = False,
) -> None:
    """List cases, in the order of their ids."""
    from perdure.casebank.cases import list_cases

    status = "archived" if archived else "active"
    named = parse_tenant(tenant)
    with connecting.database() as database:
        found = list_cases(database, after=after, most=limit, status=status, flagged=flagged, tenant=named, bank=bank)
    if as_json:
        write_json(found)
    else:
        write_table(_COLUMNS, found)


@commands.command()
def show(case_id: CaseId, *, as_json: AsJson = False) -> None:
    """Show a case, its review and its history.

    A case that fails more often than it succeeds has a review, which lists the errors.
    """
    from perdure.casebank.cases import read

    with connecting.database() as database:
        found = read(database, case_id)
    if as_json:
        write_json(found)
        return
    history = found.pop("history")
    review = found.pop("review") or {}
    write_fields({**found, **{f"review: {name}": value for name, value in review.items()}})
    columns = ("at", "event", "reason", "run_id")
    write_table(columns, history)


@commands.command()
def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The question to search for.")],
    k: Annotated[int, typer.Option("-k", min=1, max=MAX_K, help="The most results.")] = 10,
    tenant: connecting.OnlyTenant = None,
    user: Annotated[str | None, typer.Option(help="Only cases that can enter the prompts of this user.")] = None,
    bank: OfBank = None,
    *,
    include_archived: Annotated[bool, typer.Option("--include-archived", help="Search archived cases, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Search the cases of all users by their questions.

    Prints the nearest cases first. The column user_id is the case's author.
    """
    from perdure.casebank.search import EVERYBODY, Within

    if not query.strip():
        raise Failure("QUERY is empty.", WRONG_USAGE)
    if include_archived and user is not None:
        raise Failure("--include-archived cannot be combined with --user: archived cases enter no prompt.", WRONG_USAGE)
    named = parse_tenant(tenant)
    with connecting.runtime() as runtime:
        if user is not None:
            near = runtime.cases.visible_to(user_key(named, user), query, k, bank=bank)
        else:
            within = EVERYBODY if tenant is None else Within(named)
            near = runtime.cases.nearest(query, k, within, bank=bank, include_archived=include_archived)
    found = [each.to_dict() for each in near]
    if as_json:
        write_json({"results": found})
    else:
        shown = [{**each, "similarity": f"{each['similarity']:.4f}"} for each in found]
        write_table(_FOUND, shown)


@commands.command("prune")
@audited("cases.prune", when=lambda given: bool(given["apply"]))
def prune_(
    *,
    apply: Annotated[bool, typer.Option("--apply", help="Apply the plan; without it nothing changes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the pruning policy's plan, or apply it with --apply.

    The plan contains the reason for each spared case. If runs need approval, --apply only makes the plan. If a run was
    interrupted, --apply continues it.
    """
    from perdure.casebank.runs import prune
    from perdure.casebank.runs.state import RunPhase

    with connecting.runtime() as runtime, _run_context(runtime) as bank:
        result = prune.run(bank) if apply else prune.dry_run(bank)
    if as_json:
        write_json(result)
        return
    _write_result(result)
    if result.get("phase") == RunPhase.WAITING_APPROVAL:
        run_id = result["run_id"]
        sys.stderr.write(
            f"The plan waits for approval: `perdure cases approve {run_id}` or `perdure cases reject {run_id}`.\n"
        )


@of_runs.callback()
def list_runs(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=MOST_LISTED, help="The most runs to list.")] = 20,
    *,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first; `perdure cases runs show RUN_ID` shows one."""
    from perdure.casebank.runs.state import list_runs as read_runs

    if context.invoked_subcommand is not None:
        return
    with connecting.database() as database:
        found = read_runs(database, limit)
    if as_json:
        write_json(found)
    else:
        write_table(_RUNS, found)


@of_runs.command("show")
def show_run(
    run_id: RunId,
    only: Annotated[ActionName | None, typer.Option(help="Only the cases with this action.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show a run.

    Prints its counts, then the action and the reason for each case, with duplicates next to each other.
    """
    from perdure.casebank.plan.policy import Action
    from perdure.casebank.runs.state import read_run
    from perdure.cli.inspect.case_report import write_report

    wanted = connecting.parse_id(run_id, "run")
    action = None if only is None else Action(only)
    with connecting.database() as database:
        found = read_run(database, wanted)
        if as_json:
            write_json(found)
            return
        write_report(found, _read_plan(database, wanted, action))


@commands.command()
@audited("cases.approve", "run_id")
def approve(run_id: RunId, *, as_json: AsJson = False) -> None:
    """Approve the plan of a run, and apply it.

    The plan is applied in this process.
    """
    from perdure.casebank.runs import prune, state

    wanted = connecting.parse_id(run_id, "run")
    with connecting.runtime() as runtime, _run_context(runtime) as bank:
        state.approve(runtime.database, wanted, _ACTOR)
        prune.advance(bank)
        result = state.result(runtime.database, wanted)
    (write_json if as_json else _write_result)(result)


@commands.command()
@audited("cases.reject", "run_id")
def reject(run_id: RunId, *, as_json: AsJson = False) -> None:
    """Reject the plan of a run. No part of the plan is applied."""
    from perdure.casebank.runs import state

    wanted = connecting.parse_id(run_id, "run")
    with connecting.database() as database:
        state.reject(database, wanted, _ACTOR)
    if as_json:
        write_json({"run_id": str(wanted), "phase": state.RunPhase.REJECTED.value})


@commands.command()
@audited("cases.restore", "case_id")
def restore(case_id: CaseId, *, as_json: AsJson = False) -> None:
    """Make an archived case active again. The pruning policy then spares it for some days."""
    from perdure.casebank import archive

    with connecting.runtime() as runtime:
        archive.restore(runtime.database, case_id, runtime.embedder)
    if as_json:
        write_json({"case_id": case_id, "status": "restored"})


@commands.command()
@audited("cases.share", "case_id")
def share(case_id: CaseId, *, as_json: AsJson = False) -> None:
    """Let a case enter the prompts of all users of its bank.

    A case that was made from one user's messages enters only that user's prompts until it is shared.
    """
    from perdure.casebank import sharing

    with connecting.database() as database:
        shared_at = sharing.share(database, case_id, _ACTOR).isoformat()
    if as_json:
        write_json({"case_id": case_id, "shared_at": shared_at})


@commands.command()
@audited("cases.unshare", "case_id")
def unshare(case_id: CaseId, *, as_json: AsJson = False) -> None:
    """Let a case enter only its author's prompts."""
    from perdure.casebank import sharing

    with connecting.database() as database:
        sharing.unshare(database, case_id, _ACTOR)
    if as_json:
        write_json({"case_id": case_id, "shared_at": None})


@commands.command()
def reflect(
    *,
    others: Annotated[bool, typer.Option("--embed-anew", help="Replace the vectors of other embedders.")] = False,
    as_json: AsJson = False,
) -> None:
    """Update success rates, flag failing cases, embed new ones.

    A rate is computed from the latest uses of a case. Cases without a vector of the embedder are embedded.
    """
    from perdure.casebank import reflection

    with connecting.runtime() as runtime:
        done = reflection.reflect(runtime.database)
        _embed_and_index(runtime, others=others)
    if as_json:
        write_json({"rated": done.rated, "flagged": done.flagged})
    else:
        write_fields({"rated": done.rated, "flagged": done.flagged})


@contextmanager
def _run_context(runtime: Runtime) -> Iterator[RunContext]:
    """A run's context, which shows the run's progress as a bar."""
    from perdure.channels.notices import bank_of

    with progress("cases") as (shown, task):

        def show(phase: RunPhase, done: int, total: int) -> None:
            shown.update(task, description=phase.value, completed=done, total=total)

        yield replace(bank_of(runtime), on_progress=show)


def _imported(runtime: Runtime, lines: TextIO, tenant: str | None) -> Imported:
    from perdure.casebank.transfer import import_lines

    embedder = runtime.embedder

    def dimensions(name: str) -> int | None:
        return embedder.dimensions if name == embedder.name else None

    with progress("lines") as (shown, task):
        counted = _counted(lines, shown, task)
        now = runtime.clock.now()
        own = embedder.name
        return import_lines(runtime.database, counted, now=now, dimensions=dimensions, tenant=tenant, own_embedder=own)


def _counted(lines: TextIO, shown: Progress, task: TaskID) -> Iterator[str]:
    for line in lines:
        yield line
        shown.advance(task)


def _embed_and_index(runtime: Runtime, *, others: bool = False) -> None:
    """Embed the cases without a vector of the embedder, then build missing indexes.

    With `others`, also replace imported vectors of other embedders.
    """
    from perdure.casebank.embedding import embed_cases
    from perdure.casebank.search import build_indexes

    with progress("vectors") as (shown, task):
        try:
            for processed in embed_cases(runtime.database, runtime.embedder, reembed=others):
                shown.update(task, completed=processed)
        except Unavailable:
            raise
        except PerdureError as error:
            sys.stderr.write(f"Some cases were not embedded ({error.message}); a worker embeds them later.\n")
        shown.update(shown.add_task("index", total=None))
        build_indexes(runtime.database)


def _write_result(result: dict[str, Any]) -> None:
    """Print a plan or its outcome: counts, then one line per case."""
    details = result["details"]
    write_fields({name: result[name] for name in (*_COUNTS, "run_id", "phase") if result.get(name) is not None})
    rows: list[list[Any]] = [["removed", case_id, None, None] for case_id in details["removed"]]
    rows += [
        ["merged", each["removed"], f"into {each['keeper']}", f"{each['similarity']:.4f}"] for each in details["merged"]
    ]
    rows += [["archived", case_id, None, None] for case_id in details["archived"]]
    rows += [["spared", each["case_id"], each["rule"], each["reason"]] for each in details["spared"]]
    columns = ("what", "case_id", "rule", "why")
    write_table(columns, [dict(zip(columns, row, strict=True)) for row in rows])


def _read_plan(database: Database, run_id: UUID, action: Action | None) -> Iterator[dict[str, Any]]:
    """The lines of a run's plan, read page by page."""
    from perdure.casebank.runs.state import read_report

    after = -1
    while lines := read_report(database, run_id, action=action, after=after):
        yield from lines
        after = lines[-1]["position"]
