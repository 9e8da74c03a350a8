"""Calls that wait for a Celery task or a moment: the turn is parked, nothing is held, and each way on is one commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from perdure import celery_tool, sleep_until, tool
from perdure.tools.awaited.port import Sent, TaskCall, TaskEnded, TaskRuns
from perdure.turns.calls.awaited import finish
from perdure.turns.lease.claim import NotNeeded
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

TIMEOUT_S = 3_600

export = celery_tool("reports.export", effect="idempotent", timeout_s=TIMEOUT_S)
charge = celery_tool("shop.charge", timeout_s=TIMEOUT_S / 2, queue="money", name="charge")
refund = celery_tool("shop.refund", timeout_s=TIMEOUT_S, name="refund", requires_approval=True)


@tool(effect="pure")
def look() -> str:
    """Look."""
    return "seen"


class Broker:
    """A task queue in memory: what was sent and revoked, and what the result backend answers."""

    def __init__(self) -> None:
        self.sent: list[TaskCall] = []
        self.revoked: list[UUID] = []
        self.states: dict[UUID, TaskEnded | TaskRuns] = {}
        self.outcome = Sent.YES

    def send(self, call: TaskCall) -> Sent:
        """Keep the task unless the broker is unavailable."""
        if self.outcome is not Sent.NO:
            self.sent.append(call)
        return self.outcome

    def ask(self, task_id: UUID) -> TaskEnded | TaskRuns | None:
        """What a test has set."""
        return self.states.get(task_id)

    def revoke(self, task_ids: Sequence[UUID]) -> None:
        """Keep the ids."""
        self.revoked += task_ids


@pytest.fixture
def broker(harness: Harness) -> Broker:
    """An agent with tools of each kind, and a task queue."""
    made = Broker()
    harness.calls = made
    harness.equip(export, charge, refund, look, sleep_until)
    return made


def _asked(harness: Harness, *wanted: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """A turn that waits for these calls."""
    harness.script(calls(*(wanted or (("reports_export", {"year": 2025}),))), says("done"))
    turn = harness.ask()
    assert turn["status"] == "parked"
    return turn


def _go_on(harness: Harness, turn: dict[str, Any]) -> dict[str, Any]:
    harness.run(UUID(turn["session_id"]))
    return harness.turn(UUID(turn["turn_id"]))


def _results(harness: Harness, turn: dict[str, Any]) -> list[str]:
    return [text for role, text in harness.lines(UUID(turn["session_id"])) if role == "tool"]


def _ends(harness: Harness, task: TaskCall, value: Any = "made", *, failed: bool = False) -> bool:
    return finish(harness.runtime, task.task_id, TaskEnded(failed=failed, value=value))


def _effects(harness: Harness) -> list[tuple[str, str | None]]:
    return [tuple(row) for row in harness.sql("SELECT status, result FROM tool_effects ORDER BY message_seq, position")]


def test_the_turn_waits_without_a_worker_and_its_result_resumes_it(harness: Harness, broker: Broker) -> None:
    """No lease, no strike, no claim, no attempt; the task has the effect's id; its result is the tool's."""
    turn = _asked(harness)
    [sent] = broker.sent
    [effect] = harness.sql("SELECT effect_id, sent_at IS NOT NULL AS sent FROM tool_effects")
    assert (sent.task_id, effect.sent) == (effect.effect_id, True)
    assert (sent.task, sent.arguments, sent.queue, sent.expires_s) == (
        "reports.export",
        {"year": 2025},
        None,
        TIMEOUT_S,
    )
    waiting = turn["waiting_for"]
    assert (waiting["kind"], waiting["name"], waiting["progress"]) == ("task", "reports_export", None)
    row = harness.session(UUID(turn["session_id"]))
    assert (row.state, row.lease_until, row.strikes, row.claims, turn["attempts"]) == ("active", None, 0, 0, 1)
    assert isinstance(harness.run(row.session_id), NotNeeded)
    harness.move(harness.settings.turn.sweep_s * 100)
    swept = sweep(harness.runtime)
    assert swept is not None
    assert swept.sessions == 0

    harness.waker.sessions.clear()
    assert _ends(harness, sent, {"rows": 12}) is True
    assert harness.waker.sessions == [row.session_id]
    done = _go_on(harness, turn)
    assert (done["status"], done["attempts"], done["waiting_for"]) == ("done", 1, None)
    assert _results(harness, turn) == ['{"rows": 12}']
    assert len(broker.sent) == 1
