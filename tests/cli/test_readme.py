"""The commands and files of README.md work as a reader copies them, in their order."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import Environment
from tests.cli.test_up import free_ports, up
from tests.repository.source import ROOT, read

_FENCED = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")
_PORT = "8080"
_BROKER = re.compile(r"redis\+socket://\S+?\.sock")
_ELSEWHERE = (
    "make demo",
    "make install",
    ".venv/bin/perdure chat",
    "PERDURE_MODEL=openai:gpt-5 OPENAI_API_KEY=... make up",
)
"""Commands that other tests run, that the tests' environment stands for, or that need a provider's key."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a console block, and what the document says that it prints."""

    line: str
    printed: str

    def shows(self, output: str) -> bool:
        """Whether the output is what the document says. `...` stands for any text."""
        expected = re.escape(self.printed.strip()).replace(re.escape("..."), ".*?")
        return re.fullmatch(expected, output.strip(), re.DOTALL) is not None or not self.printed.strip()


def steps(name: str) -> Iterator[str | Command]:
    """The files (as their text) and the commands of a document, in their order."""
    for language, body in _FENCED.findall(read(name)):
        if language == "python":
            yield body
            continue
        for each in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            line, _, printed = each.replace("\\\n", " ").partition("\n")
            yield Command(" ".join(line.split()), printed)


class Reader:
    """A reader in a directory, who saves the files and types the commands."""

    def __init__(self, environment: Environment, directory: Path, port: int) -> None:
        self._environment, self._directory, self._port = environment, directory, str(port)
        self._broker = ""
        self._turn_id = ""

    def save(self, text: str) -> None:
        """Save a file that names itself in its first line."""
        if (name := _FILE.match(text)) is not None:
            (self._directory / name[1]).write_text(text, encoding="utf-8")

    def start(self, command: Command, stack: ExitStack) -> None:
        """Run `make up` until the stack is closed."""
        given = dict(each.split("=", 1) for each in shlex.split(command.line)[:-2])
        options = ("--port", self._port, "--no-flower")
        for line in stack.enter_context(up({**self._environment, **given}, self._directory, *options)):
            if (broker := re.match(r" +broker +(\S+)", line)) is not None:
                self._broker = broker[1]

    def type(self, command: Command) -> None:
        """Run a command to its end. It must succeed, and print what the document says."""
        line = command.line.replace(".venv/bin/", f"{shlex.quote(str(Path(sys.executable).parent))}/")
        line = _BROKER.sub(self._broker, line).replace(_PORT, self._port).replace("TURN_ID", self._turn_id)
        ran = subprocess.run(
            ["bash", "-c", line], cwd=self._directory, env=self._environment, capture_output=True, text=True,
            check=False, timeout=90,
        )  # fmt: skip
        assert ran.returncode == 0, (line, ran.stdout, ran.stderr)
        assert command.shows(ran.stdout), (line, ran.stdout, command.printed)
        if line.startswith("curl") and self._turn_id:
            assert json.loads(ran.stdout)["status"] == "done"
        elif line.startswith("curl"):
            self._turn_id = json.loads(ran.stdout)["turn_id"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_readme_runs_as_it_stands(nowhere: Environment, tmp_path: Path) -> None:
    """Each file is saved and each command is run where it stands. The directory is that of the checkout's settings."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    reader, done = Reader(nowhere, tmp_path, free_ports(1)[0]), []
    with ExitStack() as stack:
        for each in steps("README.md"):
            if isinstance(each, str):
                reader.save(each)
            elif each.line in _ELSEWHERE:
                continue
            elif each.line.endswith("make up"):
                stack.close()
                reader.start(each, stack)
            else:
                reader.type(each)
                done.append(each.line)
    assert len(done) >= 5, done  # send, the test, the service, and two requests over HTTP
