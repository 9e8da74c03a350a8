"""`perdure turns`: what became of a message."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from perdure.turns.cancelling import cancel as cancel_turn
from perdure.turns.reading import read_turn
from workers.commands import connecting
from workers.commands.display import AsJson, write_fields, write_json

commands = typer.Typer(help="What became of a message.", no_args_is_help=True)

TurnId = Annotated[str, typer.Argument(metavar="ID", help="The turn's id, as `perdure send` prints it.")]


@commands.command()
def show(turn_id: TurnId, *, as_json: AsJson = False) -> None:
    """Show a turn."""
    wanted = connecting.parse_id(turn_id, "turn")
    with connecting.database() as database:
        turn = read_turn(database, wanted)
    if as_json:
        write_json(turn)
        return
    flat = {
        **turn,
        "reply": turn["reply"] and turn["reply"]["text"],
        "error": turn["error"] and f"{turn['error']['code']}: {turn['error']['message']}",
        "usage": turn["usage"] and [f"{count} {name}" for name, count in turn["usage"].items()],
    }
    write_fields({name: value for name, value in flat.items() if value not in (None, [])})


@commands.command()
def cancel(turn_id: TurnId) -> None:
    """Cancel a turn: at once if it has not begun, else at its next safe point."""
    wanted = connecting.parse_id(turn_id, "turn")
    with connecting.runtime() as runtime:
        cancel_turn(runtime, wanted)
        status = read_turn(runtime.database, wanted)["status"]
    sys.stderr.write(f"Asked for. The turn is {status}.\n")
