"""`.ci/again`: tests that fail on a busy machine run again, alone, and are named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

AGAIN = Path(__file__).resolve().parents[2] / ".ci" / "again"

FAILING = """
from pathlib import Path

def test_fails_at_first():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError

def test_passes():
    pass
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "status", "named"),
    [
        ("", 0, True),
        ("def test_fails(): raise AssertionError", 1, False),
        ("import a_module_that_is_missing", 2, False),
    ],
    ids=["flaky", "failing", "uncollected"],
)
def test_only_what_passes_alone_passes(tmp_path: Path, more: str, status: int, *, named: bool) -> None:
    """A test that fails twice, or that cannot be collected, is a failure."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(AGAIN, tmp_path / ".ci")
    (tmp_path / "test_it.py").write_text(FAILING + more)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), "-p", "xdist", "-q"]
    run = subprocess.run(
        [tmp_path / ".ci" / "again", *command],
        cwd=tmp_path,
        env=dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == status, run.stdout + run.stderr
    assert ("passed only when run again" in run.stdout) is named
    assert run.stdout.rstrip().endswith("test_it.py::test_fails_at_first") is named
