"""A rolling deploy that adds an agent: workers of both deployments run at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.agents import Agent, Agents
from perdure.runtime import Runtime
from tests.processes.installation import ROOT, Installation

TURNS = 10
WITHIN_S = 20.0
LACKS = "this one lacks the agent 'billing'"


def _deployment(directory: Path, name: str, *agents: str) -> dict[str, str]:
    """Write an agents module; returns the environment of its workers."""
    lines = [f"{agent} = Agent({agent!r}, 'You help.')" for agent in agents]
    (directory / f"{name}.py").write_text("\n".join(["from perdure import Agent", *lines, ""]))
    return {"PERDURE_AGENTS": name, "PYTHONPATH": f"{ROOT}:{directory}"}


@pytest.mark.exhaustive
def test_new_workers_answer_for_a_new_agent(installation: Installation) -> None:
    """Turns of the new agent are answered in seconds, although two of three workers are old. No attempt is charged."""
    directory = installation.directory
    old = [installation.worker(**_deployment(directory, "before", "tester")) for _ in range(2)]
    new = installation.worker(**_deployment(directory, "after", "tester", "billing"))
    for worker in (*old, new):
        worker.container.ready()
    installation.runtime = _knowing(installation.runtime, "tester", "billing")
    sent = [
        installation.accept(f"hello {number}", user=f"user {number}", agent="billing" if number % 2 else "tester")
        for number in range(2 * TURNS)
    ]
    turns = installation.settled(*(each.turn_id for each in sent), within_s=WITHIN_S)
    assert [turn["status"] for turn in turns] == ["done"] * 2 * TURNS
    assert [turn["attempts"] for turn in turns] == [1] * 2 * TURNS
    assert sum(worker.logs().count(LACKS) for worker in old), "a wake-up reached an old worker"
    installation.check()


@pytest.mark.exhaustive
def test_turns_wait_for_the_first_new_worker(installation: Installation) -> None:
    """While only an old worker runs, it does not spin on the turns. The first new worker soon answers them."""
    directory = installation.directory
    old = installation.worker(PERDURE_TURN__SWEEP_S="1", **_deployment(directory, "before", "tester"))
    installation.runtime = _knowing(installation.runtime, "tester", "billing")
    sent = [installation.accept(f"hello {number}", user=f"user {number}", agent="billing") for number in range(TURNS)]
    known = installation.accept("hello", user="another")
    assert installation.settled(known.turn_id)[0]["status"] == "done"
    assert old.logs().count(LACKS) <= 20 * TURNS
    installation.worker(PERDURE_TURN__SWEEP_S="1", **_deployment(directory, "after", "tester", "billing"))
    turns = installation.settled(*(each.turn_id for each in sent), within_s=WITHIN_S)
    assert [turn["status"] for turn in turns] == ["done"] * TURNS
    installation.check()


def _knowing(runtime: Runtime, *agents: str) -> Runtime:
    """The accepting process of the new deployment."""
    known = Agents([Agent(name, "Runs in the workers only.") for name in agents])
    return Runtime(
        runtime.settings, runtime.clock, runtime.database, known, runtime.models, runtime.wake, runtime.snapshots
    )
