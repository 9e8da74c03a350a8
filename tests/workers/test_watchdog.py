"""The watchdog with small programs as workers, for faults that a real worker cannot be made to produce."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.resilience.kill_reports import LATELY_S, Kills
from perdure.workers.watchdog import kill_report
from perdure.workers.watchdog.process import WITHDRAW
from tests.repository.source import ROOT

HOLDING = """
import ctypes, sys, threading, time
from perdure.workers.watchdog import heartbeat
heartbeat.LEAST_LIMIT_S = 0.6
heartbeat._REPORT = (sys.executable, "-c", "import sys; print('reported', sys.argv[1], file=sys.stderr)")
heartbeat.Heartbeat("first", 0.1, {}).start()
time.sleep(0.3)
print("holds", flush=True)
holding = threading.Thread(target=lambda: ctypes.PyDLL(None).sleep(20))  # not in the main thread: signals interrupt it
holding.start()
holding.join()
"""

RECOVERING = """
import os, signal, subprocess, sys
from perdure.workers.watchdog import process as watchdog
dog = subprocess.Popen(
    watchdog.command(os.getpid(), "first", 0.6, [sys.executable, "-c", os.environ["REPORT"]]),
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
)
print(dog.stdout.readline().split()[-1], flush=True)
dog.stdin.write(b".")
open(os.environ["GATE"], "w").close()
print(dog.stdout.readline().split()[-1], flush=True)
print(dog.stdout.readline().split()[-1], flush=True)
open(os.environ["GATE"], "w").close()
signal.pause()
"""
"""A worker that sends its watchdog one heartbeat while the first report of a kill runs, and no heartbeat afterwards."""

REPORT = """
import os, sys
print(*sys.argv[1:3], *(sys.argv[4:] or ["killed"]), flush=True)
sys.argv[4:] or open(os.environ["GATE"]).close()
"""
"""The program that the watchdog runs to report a kill before the kill, and to withdraw such a report.

When it reports a kill, the program blocks until the FIFO `GATE` is opened for writing. A withdrawal does not block.
"""

WITHIN_S = 15.0
"""Each program's timeout in seconds, less than the 20 s for which `HOLDING` holds the interpreter lock."""


def first_of_a_container(program: str) -> list[str]:
    """The arguments that run a program as process 1 of its own PID namespace."""
    return ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", sys.executable, "-c", program]


def may_unshare() -> bool:
    """Whether this system lets a test create a PID namespace."""
    try:
        return subprocess.run(first_of_a_container("pass"), capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.skipif(not may_unshare(), reason="this system allows no process namespaces")
def test_the_first_process_of_a_container_is_ended_too() -> None:
    """The watchdog ends a worker that is process 1 of a container, although SIGKILL from inside has no effect on it."""
    ended = subprocess.run(
        first_of_a_container(HOLDING), cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )

    assert ended.stdout == "holds\n"
    assert ended.returncode == signal.SIGURG, ended.stderr
    assert "reported first" in ended.stderr, "the report precedes the kill, which ends the whole namespace"
    assert 'File "<string>", line 9 in <lambda>' in ended.stderr


@pytest.mark.long
def test_a_worker_that_recovers_during_the_report_is_not_killed(tmp_path: Path) -> None:
    """If a worker recovers, the report of its kill is withdrawn. If its heartbeats stop again, the worker is killed."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    ended = subprocess.run(
        [sys.executable, "-c", RECOVERING],
        cwd=ROOT,
        env={**os.environ, "REPORT": REPORT, "GATE": str(gate)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )

    assert ended.stdout.splitlines() == ["b'killed'", "b'withdraw'", "b'killed'"], ended.stderr
    assert ended.returncode == -signal.SIGKILL
    assert "first has recovered after" in ended.stderr
    assert ended.stderr.count("is killed: no thread of it has run") == 1


@pytest.mark.long
def test_a_report_that_fails_does_not_prevent_the_kill(tmp_path: Path) -> None:
    """The worker is killed even if the report fails, for example because Redis is down."""
    program = HOLDING.replace("print('reported', sys.argv[1], file=sys.stderr)", "sys.exit(7)")
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )

    assert ended.returncode == -signal.SIGKILL
    assert "first (process" in ended.stderr
    assert "the kill of first was not reported" in ended.stderr


@pytest.mark.exhaustive
def test_a_log_that_is_not_read_does_not_prevent_the_kill() -> None:
    """The worker is killed even if its stderr, to which the watchdog also writes, is a full pipe."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4_096)
    except BlockingIOError:
        os.set_blocking(write, True)
    ended = subprocess.run(
        [sys.executable, "-c", HOLDING], cwd=ROOT, stdout=subprocess.PIPE, stderr=write, timeout=WITHIN_S, check=False
    )
    os.close(read)
    os.close(write)

    assert ended.returncode == -signal.SIGKILL


def test_kills_are_remembered_for_an_hour(redis_url: str) -> None:
    """A kill is listed for one hour. Malformed entries, and kills of another installation, are not listed."""
    kills = Kills(redis_url, "mine:")
    other = Kills(redis_url, "others:")
    kills.add("worker-1@a", 7, 61.5)
    kills.add("worker-2@b", 8, 60.0)
    other.add("worker-3@c", 9, 60.0)

    (first, second) = kills.lately()
    assert (first.worker, first.pid, first.silent_s) == ("worker-1@a", 7, 61.5)
    assert second.worker == "worker-2@b"
    assert 0 < kills._client.ttl("mine:killed-workers") <= LATELY_S
    kills._client.zadd("mine:killed-workers", dict.fromkeys(kills._client.zrange("mine:killed-workers", 0, 0), 0))
    assert [kill.worker for kill in kills.lately()] == ["worker-2@b"]
    kills._client.zadd("mine:killed-workers", {"of another release": kills._now()})
    assert [kill.worker for kill in kills.lately()] == ["worker-2@b"]
    kills.close()
    other.close()


def test_a_kill_that_did_not_happen_is_withdrawn(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A withdrawn kill is not listed, because `/readyz` must not name a live worker. Earlier kills stay listed."""
    monkeypatch.setenv("PERDURE_REDIS_URL", redis_url)
    kills = Kills(redis_url, "perdure:")
    reports = [["worker-1@a", "1", "60.5"], ["worker-1@a", "1", "60.1"], ["worker-2@a", "1", "60.1"]]
    assert [kill_report.main(report) for report in reports] == [0, 0, 0]

    assert kill_report.main(["worker-1@a", "1", "60.1", WITHDRAW]) == 0

    left = [(kill.worker, kill.silent_s) for kill in kills.lately()]
    assert sorted(left) == [("worker-1@a", 60.5), ("worker-2@a", 60.1)]
    entries = kills._client.zrange("perdure:killed-workers", 0, -1)
    (entry,) = [each for each in entries if json.loads(each)["silent_s"] == 60.5]
    kills._client.zadd("perdure:killed-workers", {entry: kills._now() - 31})
    assert kill_report.main([*reports[0], WITHDRAW]) == 0
    assert len(kills.lately()) == 2, "an earlier worker was killed"
    kills.close()


def test_kills_are_unknown_without_redis() -> None:
    """Without Redis the list of kills is empty, so that `/readyz` does not fail."""
    assert Kills("redis://127.0.0.1:1", "perdure:").lately() == []
