"""Tests of the watchdog, a process that kills a worker in which no Python thread runs any more."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx2
import psutil
import pytest

from perdure.resilience.kill_reports import Kills
from perdure.turns.cancel import cancel
from tests.cli.conftest import Perdure
from tests.processes.faults import SILENCE_S, wait_until
from tests.processes.gateway import serving
from tests.processes.installation import LEASE_S, Installation
from tests.processes.nodes import Worker, has_ended

LIMIT_S = 2 * LEASE_S
SLACK_S = 15.0
"""Seconds that a report and a kill may take on a busy machine."""

PREFIX = "perdure:"


def watched(installation: Installation, *options: str) -> Worker:
    """Start a worker whose watchdog has a short limit. Wait until the worker consumes and the watchdog runs."""
    worker = installation.worker(*options, **{SILENCE_S: "0"})
    worker.container.ready()
    watchdog(worker.pid)
    return worker


def watchdog(pid: int) -> psutil.Process:
    """Wait until the watchdog of the process `pid` is ready, that is, until it ignores SIGTERM."""
    return wait_until(
        lambda: next((each for each in watchdogs(pid) if ignores_sigterm(each)), None), "the watchdog is ready"
    )


def ignores_sigterm(process: psutil.Process) -> bool:
    """Whether the process ignores SIGTERM, according to the kernel."""
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (ignored,) = [line.split()[1] for line in status if line.startswith("SigIgn:")]
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


def watchdogs(pid: int) -> list[psutil.Process]:
    """The watchdogs that are children of the process `pid`."""
    return [each for each in psutil.Process(pid).children() if "watchdog/process.py" in " ".join(arguments(each))]


def arguments(process: psutil.Process) -> list[str]:
    """The arguments of a process; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def kills(installation: Installation) -> list[str]:
    """The names of the workers that `/readyz` shows as killed."""
    found = Kills(installation.redis.url, PREFIX)
    try:
        return [kill.worker for kill in found.lately()]
    finally:
        found.close()


@pytest.mark.long
def test_a_worker_whose_interpreter_is_held_is_killed_and_its_turns_continue(installation: Installation) -> None:
    """The watchdog kills a worker whose interpreter lock is held by C code. Another worker continues the turns."""
    worker = watched(installation)
    dog = watchdog(worker.pid)
    gate = installation.model_server.gate("hello")
    bystander = installation.accept("hello", user="bystander")
    gate.wait()
    culprit = installation.accept("frozen: solid", user="culprit")
    wait_until(lambda: installation.faults.effects("frozen: solid"), "the tool holds the lock")
    held_at = time.monotonic()

    assert worker.container.wait(timeout_s=LIMIT_S + SLACK_S) == -signal.SIGKILL
    assert time.monotonic() - held_at > LIMIT_S / 2

    log = worker.logs()
    assert f"worker-1@{os.uname().nodename} (process {worker.pid}) is killed: no thread of it has run for" in log
    assert "in frozen\n" in log, "the stack names the call"
    assert kills(installation) == [f"worker-1@{os.uname().nodename}"]
    wait_until(lambda: has_ended(dog), "its watchdog has ended with it")
    gate.opened.set()
    cancel(installation.runtime, culprit.turn_id)  # otherwise the turn would block the next worker
    installation.worker().container.ready()
    turns = installation.settled(bystander.turn_id, culprit.turn_id)
    assert [turn["status"] for turn in turns] == ["done", "cancelled"]
    installation.check()


@pytest.mark.exhaustive
def test_a_worker_that_is_shutting_down_is_still_watched(installation: Installation) -> None:
    """The watchdog kills a worker whose interpreter is blocked during the worker's shutdown."""
    worker = watched(installation)
    gate = installation.model_server.gate("frozen: late")
    installation.accept("frozen: late")
    gate.wait()
    worker.container.signal(signal.SIGTERM)
    wait_until(lambda: "shutdown: 1 turns run" in worker.logs(), "the shutdown has begun")
    gate.opened.set()

    assert worker.container.wait(timeout_s=LIMIT_S + SLACK_S) == -signal.SIGKILL
    assert "is killed: no thread of it has run" in worker.logs()


@pytest.mark.exhaustive
def test_a_paused_worker_is_killed(installation: Installation) -> None:
    """If a worker, but not its watchdog, is paused for longer than the limit, the watchdog kills the worker."""
    worker = watched(installation)
    os.kill(worker.pid, signal.SIGSTOP)

    assert worker.container.wait(timeout_s=LIMIT_S + SLACK_S) == -signal.SIGKILL


@pytest.mark.exhaustive
def test_readyz_names_a_worker_that_was_killed(installation: Installation, perdure: Perdure) -> None:
    """`/readyz` names a killed worker in its body. The status stays 200, because the gateway itself is ready."""
    worker = watched(installation)
    with serving(perdure) as url:
        assert httpx2.get(f"{url}/readyz").json() == {"status": "ready"}
        os.kill(worker.pid, signal.SIGSTOP)
        worker.container.wait(timeout_s=LIMIT_S + SLACK_S)
        answer = httpx2.get(f"{url}/readyz")

    assert answer.status_code == 200
    (killed,) = answer.json()["killed_workers"]
    assert (killed["worker"], killed["pid"]) == (f"worker-1@{os.uname().nodename}", worker.pid)
    assert killed["silent_s"] >= LIMIT_S


@pytest.mark.exhaustive
def test_a_paused_process_tree_is_not_killed(installation: Installation) -> None:
    """Ctrl-Z or a suspended machine pauses worker and watchdog. On resuming, the watchdog restarts its time limit."""
    worker = watched(installation)
    dog = watchdog(worker.pid)
    os.kill(worker.pid, signal.SIGSTOP)
    dog.suspend()
    stopped_at = time.monotonic()
    wait_until(lambda: time.monotonic() - stopped_at > LIMIT_S * 1.5, "more than the limit has passed")
    dog.resume()
    wait_until(lambda: "was paused for" in worker.logs(), "the watchdog has noticed")
    os.kill(worker.pid, signal.SIGCONT)

    (turn,) = installation.settled(installation.accept("hello").turn_id)
    assert turn["status"] == "done"
    assert worker.container.status == "running"
    assert not kills(installation)


@pytest.mark.exhaustive
def test_an_unresponsive_redis_kills_no_worker(installation: Installation) -> None:
    """If Redis is unresponsive, the watchdog kills no worker, because the worker's Python threads still run."""
    worker = watched(installation)
    installation.redis.kill("SIGSTOP")
    stopped_at = time.monotonic()
    wait_until(lambda: time.monotonic() - stopped_at > LIMIT_S * 2, "more than the limit has passed")
    installation.redis.kill("SIGCONT")

    assert worker.container.status == "running"
    assert "is killed" not in worker.logs()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_the_watchdog_ends_with_its_worker(installation: Installation, number: signal.Signals) -> None:
    """A watchdog ends with its worker. Otherwise it might kill a new process with the worker's process id."""
    worker = watched(installation)
    dog = watchdog(worker.pid)
    for meant_for_the_worker in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        dog.send_signal(meant_for_the_worker)
    assert dog.is_running(), "a Ctrl-C reaches the whole group, and the worker's shutdown may take long"
    worker.container.signal(number)
    worker.container.wait()
    wait_until(lambda: has_ended(dog), "the watchdog has ended")
    assert "is killed" not in worker.logs()


@pytest.mark.long
def test_a_watchdog_that_ends_is_replaced(installation: Installation) -> None:
    """A worker whose watchdog has ended starts another watchdog."""
    worker = watched(installation)
    first = watchdog(worker.pid)
    first.kill()
    wait_until(lambda: [each for each in watchdogs(worker.pid) if each.pid != first.pid], "another one runs")
    assert worker.container.status == "running"
