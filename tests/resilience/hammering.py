"""Processes that hammer one breaker at once.

    python -m tests.resilience.hammering REDIS_URL

Eight children are forked, each with connections of its own, and do the same at the same moment.
What they counted is printed as JSON: first failures below the threshold, then probes of the
half-open circuit, of which one is killed while it holds its slot.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

from perdure.resilience.circuit import Admission, Outcome, Policy
from perdure.resilience.fleet import FleetCircuits

CHILDREN = 8
FAILURES = 100
NAME = "llm:test"
LEASE_MS = 100_000
POLICY = Policy(failure_threshold=CHILDREN * FAILURES + 1, cooldown_ms=60_000, half_open_max_probes=1)


def hammer(url: str, line: Connection) -> None:
    """A child: does what it is told to, and answers."""
    ahead = [0]
    circuits = FleetCircuits(url, POLICY, lambda: ahead[0])
    admission: Admission | None = None
    while True:
        what, ahead[0] = line.recv()
        match what:
            case "fail":
                for _ in range(FAILURES):
                    taken = circuits.admit(NAME, str(uuid4()), LEASE_MS).admission
                    assert taken is not None
                    circuits.settle(NAME, taken, Outcome.FAILED)
            case "probe":
                admission = circuits.admit(NAME, str(uuid4()), LEASE_MS).admission
            case "succeed" if admission is not None:
                circuits.settle(NAME, admission, Outcome.SUCCEEDED)
        line.send((os.getpid(), admission is not None))


def everybody(lines: list[Connection], what: str, ahead_ms: int = 0) -> list[int]:
    """Have all children do the same; the process ids of those that hold an admission."""
    for line in lines:
        line.send((what, ahead_ms))
    return [pid for pid, admitted in (line.recv() for line in lines) if admitted]


def main(url: str) -> None:
    """Run the scene and print what was seen."""
    fork = multiprocessing.get_context("fork")
    lines: dict[int, Connection] = {}
    for _ in range(CHILDREN):
        here, there = fork.Pipe()
        child = fork.Process(target=hammer, args=(url, there), daemon=True)
        child.start()
        there.close()
        lines[child.pid or 0] = here
    everybody(list(lines.values()), "fail")
    circuits = FleetCircuits(url, POLICY)
    seen: dict[str, Any] = {"failures": circuits.read()[NAME].failures, "probes": []}
    last = circuits.admit(NAME, "the last drop", LEASE_MS).admission
    if last is not None:
        circuits.settle(NAME, last, Outcome.FAILED)
    seen["opened"] = circuits.read()[NAME].state
    for ahead_ms in (0, 60_000, 60_000 + LEASE_MS // 2, 61_000 + LEASE_MS):
        holders = everybody(list(lines.values()), "probe", ahead_ms)
        seen["probes"].append(len(holders))
        if ahead_ms == 60_000:
            for pid in holders:
                os.kill(pid, signal.SIGKILL)
                del lines[pid]
    everybody(list(lines.values()), "succeed", 61_000 + LEASE_MS)
    seen["closed"] = circuits.read()[NAME].state
    print(json.dumps(seen))  # noqa: T201 (this is what the program is for)


if __name__ == "__main__":
    main(sys.argv[1])
