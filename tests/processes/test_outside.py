"""A call that a client runs survives the kills of the worker that waits for it, and of the process that ends it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from perdure.turns.reading import read_turn
from tests.cli.conftest import Perdure
from tests.processes.faults import Place, wait_until
from tests.processes.installation import ADAPTED, NATIVE, Installation
from tests.processes.model_server import OUTSIDE, ModelServer, answer_to
from tests.processes.nodes import RedisContainer

PATIENCE_S = 60.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.mark.parametrize("agent", [NATIVE, ADAPTED])
def test_a_result_is_used_once_over_every_kill(
    database_url: str, redis_server: RedisContainer, model_server: ModelServer, tmp_path: Path, agent: str
) -> None:
    """The turn waits while no worker lives. The process that commits the result is killed before or after it."""
    installation = Installation(database_url, redis_server, model_server, tmp_path, agent=agent)
    perdure = Perdure(installation.environment, tmp_path)
    text = f"{OUTSIDE}: a"
    try:
        worker = installation.worker()
        worker.ready()
        installation.faults.arm(Place("after", "turns.wait_calls"), signal.SIGKILL)
        turn_id = installation.accept(text).turn_id
        wait_until(installation.faults.fired, "the turn waits", PATIENCE_S)
        worker.container.wait()
        [pending] = read_turn(installation.database, turn_id)["pending_calls"]
        brought = []
        for moment in ("before", "after"):
            installation.faults.arm(Place(moment, "turns.finish_task"), signal.SIGKILL)
            brought.append(perdure("turns", "answer", str(turn_id), pending["call_id"], moment).returncode)
        brought.append(perdure("turns", "answer", str(turn_id), pending["call_id"], "repeated").returncode)
        assert brought == [-signal.SIGKILL, -signal.SIGKILL, 0]
        worker.container.start()
        [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
        assert (turn["status"], turn["attempts"], turn["reply"]["text"]) == ("done", 1, answer_to(text, "after"))
        assert len(installation.faults.effects(text)) == (0 if agent == NATIVE else 1)
        installation.check()
    finally:
        installation.close()
