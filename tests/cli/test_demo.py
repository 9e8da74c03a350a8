"""`perdure demo` kills a real worker in the middle of an answer, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from perdure.cli.demo.slow_model import ANSWER
from tests.cli.conftest import COMMAND, Environment
from tests.cli.test_up import free_ports

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture
def directories() -> Iterator[Path]:
    """A directory for temporary ones. Its path is short, as that of a Unix socket must be."""
    with tempfile.TemporaryDirectory(prefix="d-") as name:
        yield Path(name)


@pytest.fixture
def demo(nowhere: Environment, tmp_path: Path, directories: Path) -> subprocess.Popen[str]:
    """The running command, with settings in its environment and in `.env` that would keep it from working."""
    (tmp_path / ".env").write_text("PERDURE_API_KEYS=a-key-of-sixteen-characters\n")
    given = {**nowhere, "PERDURE_MODEL": "openai:none", "TMPDIR": str(directories)}
    command = [*COMMAND, "demo", "--port", str(free_ports(1)[0])]
    return subprocess.Popen(
        command, env=given, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def left_in(directory: Path) -> list[str]:
    """The files in the directory, and the processes whose working directory is in it."""
    found = [str(each) for each in directory.rglob("*")]
    for each in psutil.process_iter():
        try:
            where = each.cwd()
        except (psutil.Error, OSError):
            continue
        found += [f"{each.pid} {each.name()}"] if Path(where).is_relative_to(directory) else []
    return found


@pytest.mark.exhaustive
def test_the_answer_arrives_from_the_other_worker(demo: subprocess.Popen[str], directories: Path) -> None:
    """A worker is killed after it has begun the answer. The other one gives it, and the order is placed once."""
    printed = " ".join(demo.communicate(timeout=240)[0].split())
    assert demo.returncode == 0, printed
    killed = re.search(r"kill -9: (worker\d) \(process (\d+)\) is dead", printed)
    resumed = re.search(r"(worker\d) \(process (\d+)\) goes on from the last commit, ([\d.]+) s after", printed)
    assert killed, printed
    assert resumed, printed
    assert killed[2] != resumed[2]
    assert not psutil.pid_exists(int(killed[2]))
    order = [killed.start(), resumed.start(), printed.index(f"Answered: {ANSWER}"), printed.index("placed once")]
    assert order == sorted(order), printed
    assert "tool `order`" in printed[: killed.start()]
    assert "for step 1" not in printed[killed.start() :]
    assert left_in(directories) == []


@pytest.mark.exhaustive
def test_a_signal_ends_everything(demo: subprocess.Popen[str], directories: Path) -> None:
    """Ctrl-C in the middle stops all processes and removes the directory."""
    assert demo.stdout is not None
    for line in demo.stdout:
        if "asks the model for step 1" in line:
            break
    os.kill(demo.pid, signal.SIGINT)
    rest = demo.communicate(timeout=120)[0]
    assert demo.returncode == 1, rest
    assert "Stopped before the end." in rest
    assert left_in(directories) == []
