"""`perdure usage`: what models were used for, and what that cost."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from perdure.cli import connecting
from perdure.cli.display import AsJson, write_json, write_table
from perdure.cli.errors import WRONG_USAGE, Failure

if TYPE_CHECKING:
    from perdure.turns.costs import Used

By = Literal["user", "tenant", "agent", "model", "day"]
"""Has the values of `perdure.turns.costs.BY`. A test checks this."""

_DIGITS = 7
_UNITS_S = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def usage(
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Turns accepted since: a duration such as 12h, 1d or 4w.")
    ] = "1d",
    by: Annotated[By, typer.Option(help="What to add up by.")] = "agent",
    *,
    as_json: AsJson = False,
) -> None:
    """Show the tokens that turns used, and their cost in US dollars.

    The cost leaves out replies of models without a known price, which the column `unpriced` counts. Summaries and
    extraction belong to no turn, and are not counted.
    """
    from perdure.clock import SystemClock
    from perdure.turns.costs import usage as usage_of

    try:
        begin = SystemClock().now() - _duration(since)
    except OverflowError:
        message = f"--since {since!r} is longer than the calendar: give a shorter duration, such as 52w."
        raise Failure(message, WRONG_USAGE) from None
    with connecting.opened() as (settings, database):
        found = usage_of(database, settings, connecting.load_agents(settings), since=begin, by=by)
    rows = [_row(by, *key, used) for key, used in found.items()]
    rows.sort(key=lambda row: row["day"] if by == "day" else (-row["_cost"], -(row["input_tokens"] or 0)))
    for row in rows:
        del row["_cost"]
    if as_json:
        write_json(rows)
    elif rows:
        write_table([*rows[0]], rows)
    else:
        sys.stderr.write("No turn has used a model since then.\n")


def _row(by: str, value: str | None, tenant: str | None, used: Used) -> dict[str, Any]:
    named = {} if by == "tenant" else {by: value}
    return {
        **named,
        **({"tenant": tenant} if by in {"user", "tenant"} else {}),
        "replies": used.replies,
        "input_tokens": used.input_tokens,
        "cached_tokens": used.cached_tokens,
        "output_tokens": used.output_tokens,
        "cost_usd": None if used.unpriced == used.replies else f"{used.cost.normalize():f}",
        "unpriced": used.unpriced,
        "_cost": used.cost,
    }


def _duration(text: str) -> timedelta:
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit() and unit in _UNITS_S and len(number) < _DIGITS):
        raise Failure(f"--since {text!r} is no duration: a whole number with m, h, d or w, such as 1d.", WRONG_USAGE)
    return timedelta(seconds=int(number) * _UNITS_S[unit])
