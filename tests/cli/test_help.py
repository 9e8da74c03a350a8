"""`perdure --help` prints a table of the commands. A command imports only the modules that it needs."""

from __future__ import annotations

import inspect
import resource
import subprocess
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any, get_args
from uuid import uuid4

import pytest
import typer
from rich.text import Text

from perdure.agents import Agents
from perdure.assembly import BUILT_IN_AGENT
from perdure.casebank.plan.policy import Action
from perdure.cli import COMMANDS, load
from perdure.cli.display import write_table
from perdure.cli.inspect import cases, deliveries, memory, turns
from perdure.cli.serve.processes import worker
from perdure.database.tables import DELIVERY_STATUSES, TURN_STATUSES
from perdure.memory.recall import search
from perdure.workers.celery_application import CONCURRENCY
from tests.cli.conftest import Perdure

HELP_CPU_S = 0.3

COMMAND_HELP_CPU_S = 0.6
"""The most CPU seconds for a command's help: over twice the usual time.

The help would exceed the limit if it imported the settings and the database.
"""

LIBRARIES = "import celery.app.amqp, celery.backends.redis, kombu.transport.redis, psycopg2, sqlalchemy"
"""The imports that any program needs which publishes a message and reads a row."""

SEND_BY_LIBRARIES = 2.0
"""The most CPU time of `perdure send`, as a multiple of that of the libraries' imports on the same machine."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `perdure` with these arguments to its end."""
    command = [sys.executable, "-m", "perdure.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def cpu_s() -> float:
    """CPU seconds of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_commands_own_help(name: str) -> None:
    """The text for a command in the table of `perdure --help` is the first line of the command's own help."""
    command = COMMANDS[name]
    found = getattr(import_module(f"perdure.cli.{command.module}"), command.attribute)
    own = found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
    assert own is not None
    assert own.splitlines()[0] == command.help


def test_help_takes_little_time() -> None:
    """`perdure --help` does not import the whole system."""
    assert min(_help_cpu_s() for _ in range(3)) < HELP_CPU_S


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_takes_little_time(name: str) -> None:
    """A command's help takes little time, because a command imports most of perdure only when it runs."""
    assert min(_help_cpu_s(name) for _ in range(2)) < COMMAND_HELP_CPU_S


def _help_cpu_s(*command: str) -> float:
    before = cpu_s()
    assert run(*command, "--help").returncode == 0
    return cpu_s() - before


@pytest.mark.exhaustive
def test_send_takes_little_time(perdure: Perdure) -> None:
    """`perdure send` must take little time, because scripts call it for each message."""

    def used_s(run: Callable[[], subprocess.CompletedProcess[str]]) -> float:
        before = cpu_s()
        assert run().returncode == 0
        return cpu_s() - before

    libraries = [sys.executable, "-P", "-c", LIBRARIES]
    pairs = [
        (
            used_s(partial(perdure, "send", "hello", whole=True)),
            used_s(partial(subprocess.run, libraries, check=False, text=True)),
        )
        for _ in range(3)
    ]
    assert min(sending for sending, _ in pairs) < SEND_BY_LIBRARIES * min(imports for _, imports in pairs)


def test_the_version_is_that_of_the_installed_package() -> None:
    """`perdure --version` needs no settings and no servers."""
    shown = run("--version")
    assert (shown.returncode, shown.stdout) == (0, f"perdure {version('perdure')}\n")


def _commands(name: str, command: Any) -> dict[str, list[str]]:
    """The commands in a group, or the command itself, with their options."""
    if hasattr(command, "commands"):
        return {
            n: options
            for each in command.commands
            for n, options in _commands(f"{name} {each}", command.commands[each]).items()
        }
    return {name: [option for parameter in command.params for option in parameter.opts]}


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.module.startswith("inspect.")])
def test_every_command_about_stored_data_prints_json(name: str) -> None:
    """Each has `--json`, except exports and imports of documents that are JSON themselves."""
    found = _commands(name, typer.main.get_command(load(name)))
    lacking = {command for command, options in found.items() if "--json" not in options}
    assert {each for each in lacking if each.split()[-1] not in {"export", "import"}} == set()


@pytest.mark.parametrize("width", [60, 80, 90, 100, 130, 160, 400])
def test_no_table_breaks_a_word(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids can be copied from a terminal of any width. A narrow terminal shows each row as a block of fields."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    error = "the model's server did not answer within its time limit and was asked again"
    rows = [(str(uuid4()), str(uuid4()), "failed", error, "2026-05-02T09:30:00+00:00", None) for _ in range(3)]
    columns = ("turn_id", "session_id", "status", "error", "accepted_at", "tenant")
    write_table(columns, [dict(zip(columns, row, strict=True)) for row in rows])
    shown = Text.from_ansi(capsys.readouterr().out).plain
    words = shown.split()
    for *ids, status, text, at, _ in rows:
        assert {*ids, status, at, *text.split()} <= set(words)
    assert all(line.rstrip() for line in shown.splitlines()) == (width >= 130)
    assert width < 130 or max(map(len, shown.splitlines())) <= width


def _values(kind: type[StrEnum]) -> list[str]:
    return [each.value for each in kind]


def test_values_repeated_to_avoid_an_import_are_complete() -> None:
    """The CLI repeats some values, to avoid imports. They equal the values in the modules that define them."""
    assert get_args(turns.Status) == TURN_STATUSES
    assert get_args(deliveries.Status) == DELIVERY_STATUSES
    assert list(get_args(cases.ActionName)) == _values(Action)
    assert _values(memory.LayerName) == _values(search.Layer)
    assert memory.MAX_K == search.MAX_K
    assert [agent.name for agent in Agents.from_module("perdure.builtin")] == [BUILT_IN_AGENT]
    assert f"Default: {CONCURRENCY}" in str(inspect.signature(worker).parameters["concurrency"].annotation)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].attribute == "commands"])
def test_the_list_of_subcommands_shows_their_first_sentences_in_full(name: str) -> None:
    """The first sentence of each subcommand's help fits into 80 columns, so that the list does not truncate it."""
    assert [
        line for line in run(name, "--help").stdout.splitlines() if line.startswith("  ") and line.endswith("...")
    ] == []


def test_help_lists_every_command() -> None:
    """The help lists every command in lines that fit a terminal."""
    printed = run("--help").stdout
    assert [name for name in COMMANDS if f"\n  {name} " not in printed] == []
    assert max(map(len, printed.splitlines())) <= 80


def test_without_a_command_the_help_is_shown() -> None:
    """Without a command, `perdure` prints the help and exits with 2."""
    ended = run()
    assert (ended.returncode, ended.stdout) == (2, run("--help").stdout)


def test_a_misspelt_command_is_answered_with_the_likeliest() -> None:
    """For a misspelt command, the error message suggests the closest command. The status is 2."""
    ended = run("sesions")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "perdure: There is no command 'sesions'. Did you mean 'sessions'?\n"
