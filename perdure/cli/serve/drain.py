"""`perdure drain`: all workers finish or park their turns, and start no turns until `perdure drain --resume`.

The command closes the intake with a row in PostgreSQL. The intake stays closed after the command ends, and across
restarts. The command then polls PostgreSQL for running turns and the workers' reports, and asks the workers themselves.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from perdure.cli import connecting
from perdure.cli.audited import audited
from perdure.cli.display import AsJson, write_fields, write_json
from perdure.cli.errors import WRONG_USAGE, Failure
from perdure.cli.finite import finite


@audited("drain", notes=("end_sessions", "resume"))
def drain(
    *,
    end_sessions: Annotated[bool, typer.Option("--end-sessions", help="Also end every session.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Open the intake again.")] = False,
    within: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Seconds to wait for quiet; default: computed from the settings."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Refuse new work, finish or park running turns, and flush.

    The intake stays closed, also across restarts, until --resume. The exit status is 1 if work is still running at
    the time limit, if a worker has not said that it is quiet, or if sessions cannot end because they have turns that
    have not run.
    """
    from perdure.cli.serve.drain_watch import Drain, budget_s
    from perdure.turns import drain as fleet
    from perdure.turns.drain import DrainPhase

    if resume and end_sessions:
        raise Failure("--resume cannot be combined with --end-sessions.", WRONG_USAGE)
    with connecting.runtime() as runtime:
        if resume:
            fleet.end(runtime.database)
            _write(
                {"intake": DrainPhase.OPEN.value, "turns_waiting": fleet.unfinished(runtime.database).waiting},
                as_json=as_json,
            )
            return
        watched = Drain(runtime, end_sessions=end_sessions)
        limit_s = budget_s(runtime.settings, end_sessions=end_sessions) if within is None else within
        watched.wait(limit_s)
        _write(watched.report(), as_json=as_json)
        if not watched.quiet:
            what = "Work is still running"
            if watched.unheard and not watched.left.running:
                what = f"No word that they are quiet from: {', '.join(watched.unheard)}"
            if watched.unrequested:
                what = "Not every session has been asked to end"
            raise Failure(f"{what} after {limit_s:g} s. The intake stays closed; run `perdure drain` again to wait.")
        if end_sessions and watched.left.held_back:
            raise Failure(
                f"{watched.left.held_back} sessions still have turns to run; they end after `perdure drain --resume`."
            )


def _write(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_json(report)
    else:
        write_fields(report)
