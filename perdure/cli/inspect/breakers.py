"""`perdure breakers`: the circuit breakers of the fleet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import connecting
from perdure.cli.audited import audited
from perdure.cli.display import AsJson, write_fields, write_json, write_table

if TYPE_CHECKING:
    from perdure.resilience.registry import Switchboard

commands = typer.Typer(help="Circuit breakers of the fleet.", no_args_is_help=True)

_MOMENTS = ("last_failure_time", "opened_at")
_COLUMNS = ("name", "state", "failure_count", "success_count", *_MOMENTS)


@commands.command("list")
def list_(*, as_json: AsJson = False) -> None:
    """List the breakers that were used in the last week."""
    with _breakers() as breakers:
        found = [each.to_dict() for each in breakers.list()]
    if as_json:
        write_json({"breakers": found})
        return
    write_table(_COLUMNS, map(_shown, found))


@commands.command()
@audited("breakers.reset", "name")
def reset(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="As `perdure breakers list` prints it: llm:openai:gpt-5.")
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Close a breaker.

    The breaker admits calls again, and the turns that wait for it resume.
    """
    with _breakers() as breakers:
        closed = breakers.reset(name).to_dict()
    if as_json:
        write_json(closed)
    else:
        write_fields({column: _shown(closed)[column] for column in _COLUMNS})


@contextmanager
def _breakers() -> Iterator[Switchboard]:
    """The fleet's breakers.

    Raises:
        Unavailable: the database or Redis is unavailable.
    """
    from perdure.resilience.registry import Breakers

    with connecting.runtime() as runtime:
        yield runtime.breakers or Breakers(runtime.settings.breaker, runtime.clock)


def _shown(breaker: dict[str, Any]) -> dict[str, Any]:
    """A breaker to print: its times, which are milliseconds since the epoch, become ISO 8601."""
    return {**breaker, **{name: _iso(breaker[name]) for name in _MOMENTS if breaker[name] is not None}}


def _iso(milliseconds: float) -> str:
    return datetime.fromtimestamp(milliseconds / 1_000, UTC).isoformat(timespec="seconds")
