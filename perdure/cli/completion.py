"""`perdure completion`: completion of commands, subcommands and options in a shell.

The script contains all names, so completion does not start Python. Print the script again after an upgrade.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.main import get_command

from perdure.cli import COMMANDS, load


class Shell(StrEnum):
    """The shells for which there is a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_BASH = """\
# Completion of perdure for bash. Load it with: source <(perdure completion bash)
_perdure() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} typed= word  # zsh ties `path` to PATH
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
        case "$typed $word" in
{paths}
        esac
    done
    case "$typed" in
{words}
    esac
}}
complete -o default -F _perdure perdure
"""

_ZSH = """\
# Completion of perdure for zsh. Load it with: source <(perdure completion zsh)
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
autoload -Uz +X bashcompinit && bashcompinit
"""


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print a script that completes commands in a shell."""
    names = {"": ["--help", *COMMANDS], **dict(_names())}
    match shell:
        case Shell.BASH:
            sys.stdout.write(_bash(names))
        case Shell.ZSH:
            sys.stdout.write(_ZSH + _bash(names))
        case Shell.FISH:
            sys.stdout.write(_fish(names))


def _names() -> Iterator[tuple[str, list[str]]]:
    """Each command and subcommand, as typed, with the words that may follow it."""
    for name in COMMANDS:
        application: Any = get_command(load(name))
        yield from _following(name, application.commands[name])


def _following(path: str, command: Any) -> Iterator[tuple[str, list[str]]]:
    options = [option for each in command.params for option in each.opts if option.startswith("--")]
    within = getattr(command, "commands", {})
    yield path, [*within, *options, "--help"]
    for name, each in within.items():
        yield from _following(f"{path} {name}", each)


def _bash(names: dict[str, list[str]]) -> str:
    # A pattern is the path so far, a space and the next word. For a top-level command the path is empty.
    paths = "\n".join(
        f'            "{path if " " in path else f" {path}"}") typed="{path}" ;;' for path in names if path
    )
    words = "\n".join(
        f'        "{path}") COMPREPLY=($(compgen -W \'{" ".join(words)}\' -- "$current")) ;;'
        for path, words in names.items()
    )
    return _BASH.format(paths=paths, words=words)


def _fish(names: dict[str, list[str]]) -> str:
    lines = [
        "# Completion of perdure for fish. Load it with: perdure completion fish | source",
        "complete -c perdure -n __fish_use_subcommand -f",
    ]
    for path, words in names.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {part}" for part in path.split()) or "__fish_use_subcommand"
        for word in words:
            named = f"-l {word.removeprefix('--')}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c perdure -n '{seen}' {named}")
    return "\n".join(lines) + "\n"
