"""One breaker for many processes: nothing is lost, no probe too many, and a killed one frees its slot."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.repository.source import ROOT
from tests.resilience.hammering import CHILDREN, FAILURES


def test_eight_processes_hammer_one_breaker(redis_url: str) -> None:
    """What is read and then written by somebody else's side would show here."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.resilience.hammering", redis_url],
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
        # while it is open; one after the cooldown, who is killed; nobody while its lease lasts; one after it
        "probes": [0, 1, 0, 1],
        "closed": "closed",
    }
