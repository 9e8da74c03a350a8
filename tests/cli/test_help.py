"""`perdure --help` is a table of its own, and a command imports no more than it needs."""

from __future__ import annotations

import inspect
import resource
import subprocess
import sys
from importlib import import_module

import pytest
import typer

from perdure.cli import COMMANDS

HELP_CPU_S = 0.3


def perdure(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A finished `perdure` with these arguments."""
    command = [sys.executable, "-m", "perdure.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def cpu_s() -> float:
    """CPU seconds of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_commands_own_help(name: str) -> None:
    """A second text drifts from the first."""
    command = COMMANDS[name]
    found = getattr(import_module(f"perdure.cli.{command.module}"), command.attribute)
    own = found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
    assert own is not None
    assert own.splitlines()[0] == command.help


def test_help_takes_little_time() -> None:
    """Someone who looks up an option should not wait for the whole system to be imported."""
    used = []
    for _ in range(3):
        before = cpu_s()
        assert perdure("--help").returncode == 0
        used.append(cpu_s() - before)
    assert min(used) < HELP_CPU_S


def test_help_lists_every_command() -> None:
    """In lines that fit a terminal."""
    printed = perdure("--help").stdout
    assert [name for name in COMMANDS if f"\n  {name} " not in printed] == []
    assert max(map(len, printed.splitlines())) <= 80


def test_without_a_command_the_help_is_shown() -> None:
    """With the status of wrong usage."""
    ended = perdure()
    assert (ended.returncode, ended.stdout) == (2, perdure("--help").stdout)


def test_a_misspelt_command_is_answered_with_the_likeliest() -> None:
    """On stderr, with status 2."""
    ended = perdure("sesions")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "perdure: There is no command 'sesions'. Did you mean 'sessions'?\n"
