"""`perdure drain` makes all workers finish or park their turns, and start no turns until `--resume`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.observe.presence import WORKER, Presence, read_processes
from tests.cli.conftest import Environment, Perdure
from tests.turns.harness import until


@pytest.fixture
def environment(environment: Environment) -> Environment:
    """An environment with a short sweep interval and a short drain, so that the tests are quick."""
    return {**environment, "PERDURE_TURN__SWEEP_S": "0.3", "PERDURE_SHUTDOWN__DRAIN_S": "1"}


def _report(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(finished.stdout)
    return report


@pytest.mark.exhaustive
def test_a_drained_fleet_is_quiet_until_it_is_resumed(perdure: Perdure, working: BaseProcess) -> None:
    """A message that is accepted during a drain waits for `--resume`. Its session does not end before `--resume`."""
    assert perdure("send", "what is 12*7+5?", "--wait", "30").returncode == 0

    drained = perdure("drain", "--json")
    assert drained.returncode == 0, drained.stderr
    report = _report(drained)
    assert (report["quiet"], report["workers"], report["turns_running"]) == (True, 1, 0)
    assert report["flushed_sessions"] == 1

    question = ("send", "what is 6*7?", "--message-id", "m1", "--user", "ann")
    assert perdure(*question, "--wait", "1").returncode == 1
    ended = perdure("drain", "--end-sessions", "--json")
    assert ended.returncode == 1
    assert "1 sessions still have turns to run" in ended.stderr
    assert _report(ended)["sessions_asked_to_end"] == 2
    states = {each["user_id"]: each["state"] for each in json.loads(perdure("sessions", "list", "--json").stdout)}
    assert states == {"local": "ended", "ann": "active"}

    resumed = perdure("drain", "--resume", "--json")
    assert _report(resumed) == {"intake": "open", "turns_waiting": 1}
    assert "42" in perdure(*question, "--wait", "30").stdout
    assert working.is_alive()


@pytest.mark.long
def test_a_drain_that_is_late_is_reported(perdure: Perdure) -> None:
    """If the drain is not complete in time, the command exits with 1, and workers still start no turns."""
    drained = perdure("drain", "--within", "0", "--json")

    assert (drained.returncode, _report(drained)["quiet"]) == (1, False)
    assert "The intake stays closed" in drained.stderr


@pytest.mark.long
def test_a_drain_that_is_late_leaves_sessions_for_the_next_one(perdure: Perdure) -> None:
    """The time limit holds for the requests, too. The message tells that some sessions have not been asked."""
    assert perdure("send", "hello").returncode == 0
    late = perdure("drain", "--end-sessions", "--within", "0", "--json")

    assert (late.returncode, _report(late)["sessions_asked_to_end"]) == (1, 0)
    assert "Not every session has been asked to end after 0 s" in late.stderr


@pytest.fixture
def reporting(database_url: str) -> Iterator[Callable[..., Presence]]:
    """Reports a worker to PostgreSQL that answers no question, as one does that is suspended, or without a broker."""
    database = Database(database_url)

    def report(name: str = "w@h", **given: Any) -> Presence:
        made = Presence(database, SystemClock(), WORKER, name, lambda: ["turns"], **given)
        made.report()
        return made

    yield report
    database.close()


@pytest.mark.parametrize("broker_url", [None, "redis://127.0.0.1:1/0", "amqp://guest:guest@127.0.0.1:1//"])
def test_a_worker_that_says_nothing_is_not_quiet(
    perdure: Perdure, environment: Environment, reporting: Callable[..., Presence], broker_url: str | None
) -> None:
    """A live worker that does not answer may run turns, whether it is suspended or the broker is down."""
    reporting()
    where = {} if broker_url is None else {"PERDURE_BROKER_URL": broker_url}
    drained = perdure("drain", "--within", "3", "--json", env={**environment, **where})

    report = _report(drained)
    assert (drained.returncode, report["quiet"], report["workers"]) == (1, False, 0)
    assert report["workers_unheard"] == ["w@h"]
    assert "No word that they are quiet from: w@h" in drained.stderr


def test_a_worker_may_say_in_postgresql_that_it_is_quiet(
    perdure: Perdure, environment: Environment, reporting: Callable[..., Presence]
) -> None:
    """The command needs no broker. A worker that has stopped is quiet, too."""
    reporting("quiet@h", quiet=lambda: True)
    stopped = reporting("stopped@h")
    stopped.start()
    stopped.stop()
    drained = perdure("drain", "--json", env={**environment, "PERDURE_BROKER_URL": "redis://127.0.0.1:1/0"})

    assert drained.returncode == 0, drained.stderr
    assert (_report(drained)["quiet"], _report(drained)["workers_unheard"]) == (True, [])


@pytest.mark.long
def test_a_suspended_worker_is_not_quiet(perdure: Perdure, working: BaseProcess, database_url: str) -> None:
    """A worker that is stopped by a signal answers nothing. When it goes on, the drain completes."""
    database = Database(database_url)
    assert perdure("send", "hello", "--wait", "30").returncode == 0
    until(lambda: bool(read_processes(database)), "the worker reports")
    assert working.pid is not None
    os.kill(working.pid, signal.SIGSTOP)
    try:
        drained = perdure("drain", "--within", "3", "--json")
    finally:
        os.kill(working.pid, signal.SIGCONT)
    again = perdure("drain", "--json")
    database.close()

    assert (drained.returncode, _report(drained)["quiet"]) == (1, False)
    assert (again.returncode, _report(again)["quiet"]) == (0, True)


def test_resuming_and_ending_sessions_exclude_each_other(perdure: Perdure) -> None:
    """`--resume` with `--end-sessions` is wrong usage."""
    assert perdure("drain", "--resume", "--end-sessions").returncode == 2
