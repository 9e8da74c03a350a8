"""`perdure drain` makes all workers finish or park their turns, and start no turns until `--resume`."""

from __future__ import annotations

import json
import subprocess
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from tests.cli.conftest import Environment, Perdure


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


def test_resuming_and_ending_sessions_exclude_each_other(perdure: Perdure) -> None:
    """`--resume` with `--end-sessions` is wrong usage."""
    assert perdure("drain", "--resume", "--end-sessions").returncode == 2
