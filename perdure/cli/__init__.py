"""The command line: `perdure`.

    up.py          everything on this machine, with its servers
    processes.py   migrate, gateway, worker, beat, flower: one process each
    drain.py       the whole fleet takes nothing in, and lets go of what it has
    talking.py     send, chat; prompt.py is the terminal's side of chat
    sessions.py, snapshots.py, turns.py, schedules.py, messages.py, memory.py, cases.py    what is kept
    breakers.py    what is not called for a while
    doctor.py      dangerous settings of the servers

    connecting.py  what a command needs of the system
    listening.py   an address to listen on; serving.py, the gateway's web server
    display.py     tables, JSON, text that is safe on a terminal
    files.py       files, whole or not at all
    failing.py     errors as a sentence and an exit status

Commands start in about a second, so what takes long to import is imported by those that need it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from perdure.cli.errors import explained
from perdure.cli.inspect import breakers, cases, doctor, memory, messages, schedules, sessions, turns
from perdure.cli.serve import drain, processes, up
from perdure.cli.talk import commands

app = typer.Typer(
    name="perdure",
    help="Durable LLM agents on Celery, Redis and PostgreSQL.",
    epilog="Exit status: 0 done, 1 failed, 2 wrong usage (a wrong setting too), 3 a needed service is unavailable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(up.up)
app.command()(processes.migrate)
app.command()(processes.gateway)
app.command()(processes.worker)
app.command()(processes.beat)
app.command()(processes.flower)
app.command()(doctor.doctor)
app.command()(drain.drain)
app.command()(commands.chat)
app.command()(commands.send)
app.add_typer(sessions.commands, name="sessions")
app.add_typer(turns.commands, name="turns")
app.add_typer(messages.commands, name="messages")
app.add_typer(memory.commands, name="memory")
app.add_typer(cases.commands, name="cases")
app.add_typer(schedules.commands, name="schedules")
app.add_typer(breakers.commands, name="breakers")


def main() -> None:
    """Run the command that the process's arguments name, and exit with its status."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # where the module that PERDURE_AGENTS names may be; last, so that it hides nothing
    with explained():
        app(prog_name="perdure")
