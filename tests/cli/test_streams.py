"""Commands whose standard streams are closed, full, or in an encoding that lacks characters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Environment

TEXT = "안녕 ünï 😀"
LEGACY = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


def _run(environment: Environment, command: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run `command` in a shell, in which `perdure` is the command line; `arguments` are "$1" and so on."""
    program = f'perdure() {{ exec "{sys.executable}" -P -m perdure.cli "$@"; }}; {command}'
    return subprocess.run(
        ["sh", "-c", program, "sh", *arguments], env=environment, capture_output=True, check=False, timeout=60
    )


@pytest.mark.long
def test_a_message_is_sent_once_with_all_streams_closed(environment: Environment) -> None:
    """A command without streams, as some daemons start it, succeeds: its caller must not send the message again."""
    assert _run(environment, 'perdure send "$1" <&- >&- 2>&-', TEXT).returncode == 0

    unread = _run(environment, "perdure send <&-")
    assert (unread.returncode, unread.stderr) == (2, b"perdure: There is nothing to send: TEXT is empty.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize("command", ["perdure --help", "perdure completion bash"])
def test_a_full_disk_is_reported(environment: Environment, command: str) -> None:
    """Output that cannot be written is an error with a message, without a traceback."""
    ran = _run(environment, f"{command} >/dev/full")

    assert (ran.returncode, ran.stderr) == (1, b"perdure: The output cannot be written: No space left on device.\n")


def test_a_removed_directory_is_reported(environment: Environment, tmp_path: Path) -> None:
    """A command in a directory that was removed says so."""
    gone = tmp_path / "gone"
    gone.mkdir()
    ran = _run(environment, 'cd "$1" && rmdir "$1" && perdure --help', str(gone))

    assert (ran.returncode, ran.stderr) == (
        1, b"perdure: The working directory does not exist any more. Change to another one.\n",
    )  # fmt: skip


@pytest.mark.long
def test_documents_are_utf_8_and_tables_are_escaped_in_an_encoding_without_the_characters(
    environment: Environment,
) -> None:
    """In a locale without UTF-8, JSON is still UTF-8, as `import` reads it, and a table shows escapes."""
    assert _run(environment, 'perdure send "$1" --conversation "$1"', TEXT).returncode == 0
    environment = {**environment, **LEGACY}
    listed, table = (_run(environment, f"perdure sessions list {option}") for option in ("--json", ""))

    assert (listed.returncode, table.returncode) == (0, 0), listed.stderr + table.stderr
    assert [each["conversation"] for each in json.loads(listed.stdout)] == [TEXT]
    assert TEXT.encode("ascii", "backslashreplace") in table.stdout
