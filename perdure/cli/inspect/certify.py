"""`perdure certify`: kills workers at each boundary of a module's tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.display import AsJson, prints_on_stderr, progress, write_json, write_table, write_text
from perdure.cli.errors import FAILED
from perdure.cli.finite import finite

if TYPE_CHECKING:
    from perdure.certify.certificate import Certificate

_COLUMNS = ("tool", "agent", "declared", "calls", "ran", "repeated", "unknown", "verdict")


def certify(
    module: Annotated[str, typer.Argument(help="The module of your agents, as in PERDURE_AGENTS.")],
    tool: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Certify this tool only; repeatable.")] = None,
    tool_timeout: Annotated[
        float, typer.Option(min=0.1, callback=finite, metavar="SECONDS", help="The time limit of a call in this test.")
    ] = 1.5,
    lanes: Annotated[int, typer.Option(min=1, max=32, help="Installations that play schedules at once.")] = 1,
    *,
    as_json: AsJson = False,
) -> None:
    """Kill workers at each boundary of your own tools, and check what they declare.

    Runs the tools for real, many times, on a throw-away installation. The exit status is 1 if a declaration is false,
    or if it is stopped before the end; it then shows what was found so far.
    """
    from perdure.certify.run import CertificationInterrupted
    from perdure.certify.run import certify as run

    try:
        with progress("Playing schedules") as (shown, task), prints_on_stderr():
            found = run(
                module,
                tools=tool or (),
                tool_timeout_s=tool_timeout,
                lanes=lanes,
                progress=lambda done, of: shown.update(task, completed=done, total=of),
            )
    except CertificationInterrupted as interrupted:
        found = interrupted.certificate
    if as_json:
        write_json(found.to_dict())
    else:
        _write(found)
    if not found.ok:
        raise typer.Exit(FAILED)


def _write(found: Certificate) -> None:
    if found.tools:
        rows = [_row(found, each.agent, each.tool) for each in found.tools]
        write_table(_COLUMNS, [dict(zip(_COLUMNS, row, strict=True)) for row in rows])
    for report in found.tools:
        for note in report.notes:
            write_text(f"{report.tool} of {report.agent}: {note.removesuffix('.')}.")
    for (agent, tool), reason in found.left_out.items():
        write_text(f"{tool} of {agent} is left out: {reason}.")
    for finding in found.findings:
        write_text(f"\n{finding}")
    played = found.played
    nothing = "no declaration is false." if found.complete else "nothing found so far."
    write_text(
        ("" if found.complete else "\nStopped before the end.")
        + f"\n{played['schedules']} schedules with {played['kills']} kills and {played['flushes']} flushes of Redis: "
        + (f"{len(found.findings)} found." if found.findings else nothing)
    )


def _row(found: Certificate, agent: str, tool: str) -> list[str | int]:
    report = next(each for each in found.tools if (each.agent, each.tool) == (agent, tool))
    wrong = ", ".join(each.kind.value for each in found.findings_of(agent, tool))
    counted = [report.calls, report.ran, report.repeated, report.unknown]
    return [tool, agent, report.effect, *counted, wrong or "nothing found"]
