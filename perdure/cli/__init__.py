"""The command line: `perdure`.

    serve/      commands that run processes: up, migrate, gateway, worker, beat, flower, channels; and drain
    demo/       demo: a worker is killed, and its answer arrives
    talk/       send, chat and link
    inspect/    commands that show and change stored data, and doctor

    connecting.py   connects commands to the database and the workers of an installation
    streams.py      makes stdin, stdout and stderr usable if one is closed or lacks characters
    display.py      prints tables, JSON, progress, and text that is safe on a terminal
    files.py        reads files that may contain invalid UTF-8, and writes files atomically
    errors.py       reports errors as a message and an exit status
    collection.py   defers garbage collection while a command starts
    completion.py   prints completion scripts for shells

`perdure --help` prints the table `COMMANDS`. A command's module is imported when the command runs or prints its help.
The module imports the rest of perdure only when the command runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from perdure.cli import streams
from perdure.cli.errors import WRONG_USAGE, Failure, reported

if TYPE_CHECKING:
    import typer

_WIDTH = 80
_ABOUT = "Durable LLM agents on Celery, Redis and PostgreSQL."
_STATUS = "Exit status: 0 done, 1 failed, 2 wrong usage (a wrong setting too), 3 a needed service is unavailable."


@dataclass(frozen=True, slots=True)
class Command:
    """A command or a group of commands: its module, its name in the module, and the first line of its help."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "up": Command("serve.up", "up", "Run everything on this machine: servers, gateway, two workers, beat, Flower."),
    "demo": Command("demo.command", "demo", "Kill a worker in the middle of an answer, and see the answer arrive."),
    "migrate": Command(
        "serve.processes",
        "migrate",
        "Create or upgrade the database's tables for this release, and print what was done.",
    ),
    "gateway": Command("serve.processes", "gateway", "Serve the HTTP gateway."),
    "worker": Command("serve.processes", "worker", "Run turns and all other queued tasks."),
    "beat": Command("serve.processes", "beat", "Publish scheduled tasks when they are due."),
    "flower": Command("serve.processes", "flower", "Show workers and tasks on web pages."),
    "channels": Command(
        "serve.channels",
        "channels",
        "Listen on chats: Discord's gateway, Slack's Socket Mode, Telegram's long polling.",
    ),
    "doctor": Command(
        "inspect.doctor",
        "doctor",
        "Find dangerous settings, with --app those of your own Celery application.",
    ),
    "status": Command("inspect.status", "status", "Show what works and what does not."),
    "certify": Command(
        "inspect.certify", "certify", "Kill workers at each boundary of your own tools, and check what they declare."
    ),
    "drain": Command("serve.drain", "drain", "Refuse new work, finish or park running turns, and flush."),
    "pause": Command("inspect.pauses", "pause", "Accept messages of a tenant, user or agent, and let them wait."),
    "resume": Command("inspect.pauses", "resume", "End a pause: what has waited runs."),
    "chat": Command("talk.chat", "chat", "Talk to an agent."),
    "send": Command("talk.send", "send", "Send a message."),
    "link": Command("talk.link", "link", "Link another channel to a user with a one-time code."),
    "sessions": Command("inspect.sessions", "commands", "Conversations and their transcripts."),
    "turns": Command("inspect.turns", "commands", "Turns and their results."),
    "approvals": Command("inspect.turns", "approvals", "Tool calls that wait for a person."),
    "deliveries": Command("inspect.deliveries", "commands", "Replies sent to URLs, chats and tasks."),
    "usage": Command("inspect.usage", "usage", "Show the tokens that turns used, and their cost in US dollars."),
    "messages": Command("inspect.messages", "commands", "Export and import conversations."),
    "memory": Command("inspect.memory", "commands", "Memories and messages of users."),
    "cases": Command("inspect.cases", "commands", "The CaseBank: answered questions."),
    "schedules": Command("inspect.schedules", "commands", "Scheduled work."),
    "breakers": Command("inspect.breakers", "commands", "Circuit breakers of the fleet."),
    "completion": Command("completion", "completion", "Print a script that completes commands in a shell."),
}


def main() -> None:
    """Run the command in `sys.argv` and exit with its status."""
    streams.prepare()
    with reported():
        _run()


def _run() -> None:
    _add_working_directory()
    name, *arguments = sys.argv[1:] or [""]
    if name in {"", "--help", "-h"}:
        sys.stdout.write(_help())
        sys.exit(WRONG_USAGE if not name else 0)
    if name == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"perdure {version('perdure')}\n")
        sys.exit(0)
    load(name)([name, *arguments], prog_name="perdure")


def _add_working_directory() -> None:
    """Add the working directory, which may contain the module of `PERDURE_AGENTS`, to the end of `sys.path`.

    If perdure is imported from a checkout, the working directory is inserted before the checkout instead. At the end
    of `sys.path`, an application's module `tasks` would be hidden by the checkout's `tasks`.
    """
    try:
        here = str(Path.cwd())
    except FileNotFoundError:
        raise Failure("The working directory does not exist any more. Change to another one.") from None
    if here in sys.path:
        return
    root = Path(__file__).resolve().parents[2]
    is_checkout = (root / "pyproject.toml").exists()
    checkouts = [at for at, entry in enumerate(sys.path) if is_checkout and entry and Path(entry).resolve() == root]
    sys.path.insert(checkouts[0] if checkouts else len(sys.path), here)


def load(name: str) -> typer.Typer:
    """A Typer application that contains only the command, or the group of commands, `name`.

    Raises:
        Failure: the command does not exist.
    """
    if name not in COMMANDS:
        similar = get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {similar[0]!r}?" if similar else " `perdure --help` lists the commands."
        raise Failure(f"There is no command {name!r}.{hint}", WRONG_USAGE)
    import typer

    command = COMMANDS[name]
    found = getattr(import_module(f"perdure.cli.{command.module}"), command.attribute)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(lambda: None)  # otherwise typer makes a single command the application itself
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
    else:
        app.command(name)(found)
    return app


def _help() -> str:
    width = max(map(len, COMMANDS))
    indent = " " * (width + 4)
    listed = "\n".join(
        fill(f"  {name:{width}}  {command.help}", _WIDTH, subsequent_indent=indent)
        for name, command in COMMANDS.items()
    )
    usage = "Usage: perdure COMMAND [ARGS]...\n       perdure --version"
    return f"{usage}\n\n  {_ABOUT}\n\nCommands:\n{listed}\n\n{fill(_STATUS, _WIDTH)}\n"
