"""One breaker for many processes: no failure is lost, no excess probe is admitted, and a killed one frees its slot."""

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
    """Eight processes show lost updates of the shared circuit, and calls that cannot continue without Redis."""
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
        # while open; after the cooldown, whose holders are killed; during their leases; after them
        "probes": [0, PROBES, 0, PROBES],
        "closed": "closed",
        "all_went_on": True,
        "counted_again": True,
    }
