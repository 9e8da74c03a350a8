"""Processes that use one breaker concurrently.

    python -m tests.resilience.hammering DIRECTORY

Eight forked children, each with its own connections to Redis, run the same commands at the same time. First, they fail
calls until one more failure would open the circuit. Then they probe the half-open circuit, and the parent kills the
children that hold the first probes. Finally, they make calls while the parent stops and restarts the Redis in
DIRECTORY. The parent prints the results as JSON.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

from perdure.clock import MovedClock
from perdure.resilience.circuit import Admission, CallOutcome, Policy
from perdure.resilience.redis_circuits import FleetCircuits
from perdure.resilience.registry import Breakers
from perdure.resilience.shared import EXCHANGE_S, PAUSE_S
from perdure.servers import redis
from perdure.settings import BreakerSettings

CHILDREN = 8
FAILURES = 100
PROBES = 3
NAME = "llm:test"
OTHER = "llm:other"
LEASE_MS = 100_000
PATIENCE_S = 30.0
POLICY = Policy(failure_threshold=CHILDREN * FAILURES + 1, cooldown_ms=60_000, half_open_max_probes=PROBES)


class Child:
    """One of the child processes."""

    def __init__(self, url: str, line: Connection) -> None:
        self._line = line
        self._ahead_ms = 0
        self._circuits = FleetCircuits(url, POLICY, lambda: self._ahead_ms, PATIENCE_S)
        self._clock = MovedClock()
        self._breaker = Breakers(BreakerSettings(), self._clock, url).get(OTHER)
        self._admission: Admission | None = None

    def run_commands(self) -> None:
        """Run the parent's commands and answer each with a number, until the parent closes the pipe."""
        commands = {
            "fail": self.fail,
            "probe": self.probe,
            "succeed": self.succeed,
            "call until the next command": self.call_until_command,
            "call once": self.call_once,
        }
        while True:
            what, self._ahead_ms = self._line.recv()
            self._line.send(commands[what]())

    def fail(self) -> int:
        """Make `FAILURES` calls that fail. Returns `FAILURES`."""
        for _ in range(FAILURES):
            taken = self._circuits.admit(NAME, str(uuid4()), LEASE_MS).admission
            assert taken is not None
            self._circuits.settle(NAME, taken, CallOutcome.FAILED)
        return FAILURES

    def probe(self) -> int:
        """Request a probe. Returns 1 if the circuit admits the probe, otherwise 0."""
        self._admission = self._circuits.admit(NAME, str(uuid4()), LEASE_MS).admission
        return int(self._admission is not None)

    def succeed(self) -> int:
        """End this child's probe, if any, with a success. Returns 0."""
        if self._admission is not None:
            self._circuits.settle(NAME, self._admission, CallOutcome.SUCCEEDED)
        return 0

    def call_until_command(self) -> int:
        """Make a call and report it to the parent, then make calls until the next command.

        Returns the number of calls after the first call.
        """
        self._line.send(self._breaker.execute(lambda: 1, 10))
        done = 0
        while not self._line.poll():
            done += self._breaker.execute(lambda: 1, 10)
        self._line.recv()
        return done

    def call_once(self) -> int:
        """Move the clock past the pause that follows a failed request to Redis, then make one call. Returns 1."""
        self._clock.advance(timedelta(seconds=PAUSE_S))
        return self._breaker.execute(lambda: 1, 10)


def hammer(line: Connection, others: Sequence[Connection]) -> None:
    """The main function of a child: wait for Redis' URL, then run commands until the parent closes the pipe."""
    for each in others:
        each.close()
    with contextlib.suppress(EOFError):
        Child(line.recv(), line).run_commands()


class Fleet:
    """The children by process id. They start before Redis does, so that they inherit no file descriptors of Redis."""

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self.lines: dict[int, Connection] = {}
        for _ in range(CHILDREN):
            here, there = fork.Pipe()
            child = fork.Process(target=hammer, args=(there, [here, *self.lines.values()]), daemon=True)
            child.start()
            there.close()
            self.lines[child.pid or 0] = here

    def connect_all(self, url: str) -> None:
        """Send Redis' URL to all children."""
        for line in self.lines.values():
            line.send(url)

    def send_all(self, what: str, ahead_ms: int = 0) -> None:
        """Send a command to all children."""
        for line in self.lines.values():
            line.send((what, ahead_ms))

    def request(self, what: str, ahead_ms: int = 0) -> dict[int, int]:
        """Send a command to all children. Returns their answers, by process id."""
        self.send_all(what, ahead_ms)
        return self.receive_all()

    def receive_all(self) -> dict[int, int]:
        """The children's next answers, by process id."""
        return {pid: line.recv() for pid, line in self.lines.items()}

    def kill(self, pid: int) -> None:
        """Kill a child with SIGKILL, as the kernel does when memory runs out."""
        os.kill(pid, signal.SIGKILL)
        del self.lines[pid]


def probing(fleet: Fleet, circuits: FleetCircuits) -> dict[str, Any]:
    """Open the circuit, let all children probe it, and close it. Returns the observed counts and states.

    This function kills the children that hold the first probes.
    """
    fleet.request("fail")
    seen: dict[str, Any] = {"failures": circuits.read()[NAME].failures, "probes": []}
    last = circuits.admit(NAME, "the last failure", LEASE_MS).admission
    if last is not None:
        circuits.settle(NAME, last, CallOutcome.FAILED)
    seen["opened"] = circuits.read()[NAME].state
    for ahead_ms in (0, 60_000, 60_000 + LEASE_MS // 2, 61_000 + LEASE_MS):
        holders = [pid for pid, admitted in fleet.request("probe", ahead_ms).items() if admitted]
        seen["probes"].append(len(holders))
        if ahead_ms == 60_000:
            for pid in holders:
                fleet.kill(pid)
    fleet.request("succeed", 61_000 + LEASE_MS)
    seen["closed"] = circuits.read()[NAME].state
    return seen


def returning(fleet: Fleet, url: str) -> dict[str, Any]:
    """End the calls that the children made while Redis was stopped and restarted, then make more calls.

    Returns whether each child's calls continued without Redis, and whether the later calls use Redis again.
    """
    fleet.send_all("enough")
    made = fleet.receive_all()
    circuits = FleetCircuits(url, POLICY, timeout_s=PATIENCE_S)
    time.sleep(2 * EXCHANGE_S)  # until the children have reported their successes
    before, requested, counted = circuits.read()[OTHER].successes, 0, 0
    until = time.monotonic() + PATIENCE_S
    while counted < len(fleet.lines) and time.monotonic() < until:
        requested += sum(fleet.request("call once").values())  # on a loaded machine, Redis may time out once more
        counted = circuits.read()[OTHER].successes - before
    circuits.close()
    return {"all_continued": all(made.values()), "counted_again": len(fleet.lines) <= counted <= requested}


def main(directory: Path) -> None:
    """Run `probing` and `returning`, and print their results as JSON."""
    fleet = Fleet()
    with redis.start(directory) as server:
        fleet.connect_all(server.url)
        circuits = FleetCircuits(server.url, POLICY, timeout_s=PATIENCE_S)
        seen = probing(fleet, circuits)
        circuits.close()
        fleet.request("call until the next command")
    with redis.start(directory) as server:
        seen |= returning(fleet, server.url)
    print(json.dumps(seen))  # noqa: T201 (this is what the program is for)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
