"""`perdure doctor`: checks the settings of a Celery application, or those of an installation.

The latter are the settings of PostgreSQL and Redis (`server_settings`), the budgets of the agents' tools
(`left_out_tools`), and the agents whose replies may exceed a budget of money (`unbounded_replies`).
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli import connecting
from perdure.cli.display import AsJson, prints_on_stderr, write_json, write_table, write_text
from perdure.cli.errors import FAILED
from perdure.errors import Unavailable


def doctor(
    app: Annotated[
        str | None, typer.Option(help="The module of your own Celery application, as `celery -A` takes it.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Find dangerous settings, with --app those of your own Celery application.

    Without --app, the settings of PostgreSQL and Redis are checked, whether each agent's tools fit its prompts, and
    whether budgets are kept. The exit status is 1 if any setting is dangerous. It is 3 if a server cannot be reached;
    what was found without it is shown.
    """
    with prints_on_stderr():
        found, failure = _of_servers() if app is None else (_of_application(app), None)
    if failure is not None and not found:
        raise failure
    if as_json:
        write_json({"findings": [asdict(each) for each in found]})
    elif found:
        write_table(("where", "setting", "risk", "fix"), [asdict(each) for each in found])
    else:
        write_text("No dangerous setting was found.")
    if failure is not None:
        raise failure
    if found:
        raise typer.Exit(FAILED)


def _of_servers() -> tuple[list[Any], Unavailable | None]:
    """What is dangerous, as far as the servers can be reached, and the error of the first that cannot."""
    from perdure.assembly import check
    from perdure.cli.inspect import left_out_tools, server_settings, unbounded_replies

    with connecting.opened() as (settings, database):
        check(settings, asks_models=False, asks_embedder=False, signs=False)
        found: list[Any] = [*left_out_tools.findings(settings), *unbounded_replies.findings(settings)]
        try:
            found.extend(server_settings.findings(settings, database))
        except Unavailable as error:
            return found, error
        return found, None


def _of_application(module: str) -> list[Any]:
    from perdure.application.dangers import application, dangers

    sys.path.insert(0, str(Path.cwd()))  # as `celery -A` does
    return list(dangers(application(module)))
