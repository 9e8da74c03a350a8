"""The start of a worker, and of the process of a turn that runs in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.turns.inbox.accept import Accepted
from perdure.turns.lease.queries import ISOLATE_FROM_CLAIM
from tests.cli.conftest import Perdure
from tests.cli.test_setting_up import DJANGO
from tests.processes.installation import ADAPTED, MODULES, NATIVE, ROOT, Installation
from tests.processes.model_server import answer_to
from tests.processes.nodes import Worker, WorkerContainer

WITHIN_S = 60.0
QUEUES = "turns,ingress,deliveries,sessions,memory,maintenance"

FAILURES = {
    "an error": 'raise RuntimeError("the registry is not ready")',
    "an exit": "sys.exit(0)",
    "a crash": "os._exit(7)",
    "a hang": "time.sleep(600)",
}
REPORTED = {
    "an error": "the registry is not ready",
    "an exit": "SystemExit: 0",
    "a crash": "ended with status 7",
    "a hang": "ended with status -9",
}


def _agents(directory: Path, failure: str) -> dict[str, str]:
    """Write an agents module that cannot be imported in a child process; returns the worker's environment."""
    (directory / "unready.py").write_text(
        "import os\nimport sys\nimport time\n\nfrom perdure import Agent\n\n"
        f'if "isolated" in sys.argv[0] or "isolated" in " ".join(sys.orig_argv):\n    {failure}\n'
        'tester = Agent("tester", "You are under test.")\n'
    )
    return {"PERDURE_AGENTS": "unready", "PYTHONPATH": f"{ROOT}:{directory}"}


def _isolated(installation: Installation, text: str = "hello") -> Accepted:
    """Accept a message whose turn must run in a process of its own."""
    accepted = installation.accept(text)
    installation.query("UPDATE sessions SET claims = %(claims)s RETURNING 1", claims=ISOLATE_FROM_CLAIM)
    return accepted


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_process_that_cannot_start_uses_an_attempt(installation: Installation, tmp_path: Path, failure: str) -> None:
    """The turn fails after its last attempt, or at its time limit, and `perdure turns show` prints the reason."""
    accepted = _isolated(installation)
    limit = {"PERDURE_TURN__TIMEOUT_S": "20"} if failure == "a hang" else {}
    worker = installation.worker(
        PERDURE_TURN__MAX_ATTEMPTS="2", **limit, **_agents(installation.directory, FAILURES[failure])
    )
    (turn,) = installation.settled(accepted.turn_id, within_s=WITHIN_S)

    assert (turn["status"], turn["error"]["code"]) == ("failed", "TIMEOUT" if limit else "BUDGET_EXHAUSTED")
    assert REPORTED[failure] in turn["error"]["message"]
    assert REPORTED[failure] not in turn["reply"]["text"]
    assert turn["attempts"] <= 3
    shown = Perdure(installation.environment, tmp_path)("turns", "show", str(accepted.turn_id))
    assert REPORTED[failure] in shown.stdout
    assert worker.container.status == "running"
    later = installation.accept("hello again")
    assert [each["status"] for each in installation.settled(later.turn_id)] == ["done"]
    installation.check()


def _application(installation: Installation, directory: Path) -> Worker:
    """Start a worker of a Django application whose agents use its models."""
    for name, text in DJANGO.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace('"assistant"', '"tester"'))
    environment: dict[str, Any] = {
        **installation.environment,
        "PERDURE_AGENTS": "shop.agents",
        "PYTHONPATH": f"{ROOT}:{directory}",
    }
    del environment["PERDURE_BROKER_URL"]
    options = ("-P", "threads", "-c", "8", "-Q", QUEUES)
    container = WorkerContainer("shop", environment, directory, options, "shop")
    installation.workers.append(Worker(container, app=None))
    container.start()
    return installation.workers[-1]


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
def test_the_process_sets_its_application_up(installation: Installation, tmp_path: Path) -> None:
    """A turn in a process of its own is answered, although the agents' module needs Django's models."""
    accepted = _isolated(installation)
    worker = _application(installation, tmp_path / "installed")
    (turn,) = installation.settled(accepted.turn_id, within_s=WITHIN_S)
    assert turn["reply"]["text"] == answer_to("hello")
    assert "must run in a child process" in worker.logs()
    installation.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("agent", [NATIVE, ADAPTED])
def test_a_worker_imports_no_optional_library_that_it_does_not_need(
    installation: Installation, tmp_path: Path, agent: str
) -> None:
    """pydantic-ai takes a second to import, and 70 MiB. A worker without an agent of it runs without it.

    Turns of both kinds need no driver of PostgreSQL but psycopg2.
    """
    log, accepted = tmp_path / "worker.log", installation.accept("hello", agent=agent)
    command = [sys.executable, "-X", "importtime", "-m", "celery", "-A", "perdure", "worker", "-n", "alone@%h"]
    with log.open("wb") as errors:
        worker = subprocess.Popen(
            command,
            env={**installation.environment, "PERDURE_AGENTS": MODULES[agent]},
            cwd=installation.directory,
            stdout=errors,
            stderr=errors,
        )
        try:
            (turn,) = installation.settled(accepted.turn_id)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(30)
    assert turn["status"] == "done"
    lines = [
        line.rpartition("|")[2].strip() for line in log.read_text().splitlines() if line.startswith("import time:")
    ]
    imported = {each.partition(".")[0] for each in lines}
    assert {"celery", "perdure", "sqlalchemy", "psycopg2"} <= imported
    assert not imported & {"asyncpg", "psycopg", "fastapi", "uvicorn"}
    assert agent == ADAPTED or not imported & {"pydantic_ai", "openai", "anthropic", "numpy"}
