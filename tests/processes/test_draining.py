"""`perdure drain` of two busy workers."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from perdure.sessions.reading import read_session
from tests.cli.conftest import Perdure
from tests.processes.faults import done, wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

SLOW_TOOL = {"PERDURE_TURN__TOOL_TIMEOUT_S": "60"}

PARKS = "the intake is closed: parks 1 turns"


@pytest.fixture
def perdure(installation: Installation, tmp_path: Path) -> Perdure:
    """Runs `perdure` commands on this installation."""
    return Perdure(installation.environment, tmp_path)


class Draining:
    """A `perdure drain` command that runs in a thread."""

    def __init__(self, perdure: Perdure) -> None:
        self._ended: list[subprocess.CompletedProcess[str]] = []
        self._thread = threading.Thread(target=lambda: self._ended.append(perdure("drain", "--json")))
        self._thread.start()

    def waits(self) -> bool:
        """Whether the command still runs."""
        return self._thread.is_alive()

    def report(self) -> dict[str, Any]:
        """Wait until the command exits with status 0; returns the report that it printed."""
        self._thread.join()
        assert self._ended[0].returncode == 0, self._ended[0].stderr
        report: dict[str, Any] = json.loads(self._ended[0].stdout)
        return report


@pytest.mark.exhaustive
def test_a_fleet_amid_a_model_call_and_a_tool_is_drained(installation: Installation, perdure: Perdure) -> None:
    """In a drain, workers abort a model call, await a tool and begin no turn. After `--resume`, all turns finish."""
    gate = installation.model_server.gate("hello")
    first, second = (installation.worker("--concurrency=1", **SLOW_TOOL) for _ in range(2))
    for worker in (first, second):
        worker.container.ready()
    earlier = installation.accept("earlier", user="earlier")
    installation.settled(earlier.turn_id)
    asking = installation.accept("hello", user="asking")
    gate.wait()
    acting = installation.accept("slow: tool", user="acting")
    wait_until(lambda: installation.faults.effects("slow: tool"), "the tool is called")
    owners = [installation.lease_owner(each.session_id) for each in (asking, acting)]
    assert sorted(owners) == sorted((first.pid, second.pid))

    draining = Draining(perdure)
    wait_until(lambda: _status(installation, asking.turn_id) == "parked", "the model call is aborted")
    assert (draining.waits(), _status(installation, acting.turn_id)) == (True, "running")
    for worker in (first, second):
        wait_until(lambda worker=worker: PARKS in worker.logs(), "each worker has noticed the drain")  # type: ignore[misc]
    late = installation.accept("late", user="late")
    installation.faults.release()
    report = draining.report()

    counts = {name: report[name] for name in report if name.startswith(("turns", "workers"))}
    expected = {"turns_finished": 0, "turns_parked": 2, "turns_running": 0, "turns_waiting": 3}
    assert counts == {**expected, "workers": 2, "workers_unheard": []}
    assert (report["quiet"], report["flushed_sessions"]) == (True, 3)
    ended = perdure("drain", "--end-sessions", "--json")
    assert (ended.returncode, json.loads(ended.stdout)["sessions_held_back"]) == (1, 3)
    assert read_session(installation.database, earlier.session_id)["state"] == "ended"
    assert _status(installation, late.turn_id) == "accepted"

    assert perdure("drain", "--resume").returncode == 0
    turns = installation.settled(asking.turn_id, acting.turn_id, late.turn_id)
    replies = [answer_to("hello"), answer_to("slow: tool", done("slow", "slow: tool")), answer_to("late")]
    assert [turn["reply"]["text"] for turn in turns] == replies
    assert len(installation.faults.effects("slow: tool")) == 1, "the side effect is not repeated"
    for each in (asking, acting, late):
        wait_until(
            lambda each=each: read_session(installation.database, each.session_id)["state"] == "ended",  # type: ignore[misc]
            "the session ends, as requested",
            60,
        )
    assert {worker.container.status for worker in (first, second)} == {"running"}
    installation.check()


def _status(installation: Installation, turn_id: Any) -> str:
    found: str = installation.query("SELECT status FROM turns WHERE turn_id = %(id)s", id=turn_id)[0].status
    return found
