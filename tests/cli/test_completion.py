"""`perdure completion` prints scripts with which shells complete perdure's commands and options."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from perdure.cli import COMMANDS
from tests.cli.conftest import COMMAND, Perdure

_ASK = """
source /dev/stdin
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_perdure
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script() -> str:
    """The completion script for bash."""
    return subprocess.run([*COMMAND, "completion", "bash"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("perdure ''", ["--help", *COMMANDS]),
        ("perdure ses", ["sessions"]),
        ("perdure send --wa", ["--wait"]),
        ("perdure cases pru", ["prune"]),
        ("perdure cases prune --app", ["--apply"]),
        ("perdure sessions snapshot ex", ["export"]),
        ("perdure send --user ana --j", ["--json"]),
    ],
)
def test_bash_completes_commands_and_options(script: str, words: str, expected: list[str]) -> None:
    """Bash completes commands, subcommands and options, even after another option's value."""
    invocation = ["bash", "--norc", "-c", _ASK.format(words=words)]
    found = subprocess.run(invocation, input=script, capture_output=True, text=True, check=True).stdout
    assert found.split() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_get_the_same_names(perdure: Perdure, shell: str) -> None:
    """The scripts for zsh and fish contain the commands' names.

    If the shell is installed, it parses the script without errors.
    """
    printed = perdure("completion", shell).stdout
    assert all(name in printed for name in (*COMMANDS, "wait", "prune"))
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=printed, text=True, check=True)
