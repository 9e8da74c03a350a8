"""A turn continues after a tool hangs. A worker with too many hanging threads shuts down."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.assembly import Addresses
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.workers.celery_application import make_app
from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to
from tests.processes.nodes import Worker

PATIENCE_S = 60.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.mark.exhaustive
def test_a_worker_with_too_many_hanging_tools_shuts_down(installation: Installation) -> None:
    """Another worker answers the remaining turns, including one that was in a model call at the shutdown."""
    worker = installation.worker(PERDURE_TURN__MAX_LEAKED_THREADS="1")
    worker.ready()
    first = installation.accept("hanging: 1", user="ana")
    (turn,) = installation.settled(first.turn_id, within_s=PATIENCE_S)
    assert turn["reply"]["text"] == answer_to("hanging: 1", UNKNOWN_OUTCOME)
    assert _inspected(installation, worker)["leaked_threads"] == 1
    assert worker.container.status == "running"

    gate = installation.model_server.gate("hello", nth=1)
    bystander = installation.accept("hello", user="bea")
    gate.wait()
    second = installation.accept("hanging: 2", user="cleo")
    wait_until(lambda: "this worker shuts down" in worker.logs(), "the limit is passed", PATIENCE_S)
    installation.worker().ready()
    assert worker.container.wait(PATIENCE_S) == 0
    turns = installation.settled(bystander.turn_id, second.turn_id, within_s=PATIENCE_S)
    gate.opened.set()

    assert [turn["reply"]["text"] for turn in turns] == [answer_to("hello"), answer_to("hanging: 2", UNKNOWN_OUTCOME)]
    assert [effect.note for effect in installation.faults.effects()] == ["hanging: 1", "hanging: 2"], (
        "each tool runs once"
    )
    installation.check()


def _inspected(installation: Installation, worker: Worker) -> dict[str, Any]:
    """A worker's answer to `celery -A perdure inspect perdure`."""
    url = installation.redis.url
    with make_app(installation.runtime.settings, Addresses("postgresql://", url, url)) as app:
        answers = app.control.broadcast("perdure", reply=True, timeout=PATIENCE_S, limit=1)
    [(name, body)] = answers[0].items()
    assert name.startswith(worker.container.name)
    answer: dict[str, Any] = body
    return answer
