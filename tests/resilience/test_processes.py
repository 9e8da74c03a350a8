"""Many processes share one breaker. No failure is lost, and the number of probes is limited.

If a process is killed, the slot of its probe becomes free.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.source import ROOT
from tests.resilience.hammering import CHILDREN, FAILURES, PROBES


@pytest.mark.long
def test_eight_processes_hammer_one_breaker(tmp_path: Path) -> None:
    """Eight concurrent processes lose no update of the shared circuit, and their calls continue without Redis."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.resilience.hammering", str(tmp_path / "redis")],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == {
        "failures": CHILDREN * FAILURES,
        "opened": "open",
        # the numbers of admitted probes: while the circuit is open, after the cooldown, before the leases of the killed
        # children expire, and after these leases expire
        "probes": [0, PROBES, 0, PROBES],
        "closed": "closed",
        "all_continued": True,
        "counted_again": True,
    }
