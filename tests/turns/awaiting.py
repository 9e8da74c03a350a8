"""Celery tools, and helpers for turns that wait for a Celery task or a point in time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from perdure import celery_tool, tool
from perdure.tools.awaited.port import TaskCall, TaskEnded
from perdure.turns.calls.awaited import finish, probe_due
from perdure.turns.cancel import cancel
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

TIMEOUT_S = 3_600

export = celery_tool("reports.export", effect="idempotent", timeout_s=TIMEOUT_S)

charge = celery_tool("shop.charge", timeout_s=TIMEOUT_S / 2, queue="money", name="charge")

refund = celery_tool("shop.refund", timeout_s=TIMEOUT_S, name="refund", requires_approval=True)


@tool(effect="pure")
def look() -> str:
    """Return `seen`."""
    return "seen"


def ask_and_wait(harness: Harness, *wanted: tuple[str, dict[str, Any]], **given: Any) -> dict[str, Any]:
    """Run a turn in which the model makes the calls `wanted`, until the turn waits for results."""
    harness.script(calls(*(wanted or (("reports_export", {"year": 2025}),))), says("done"))
    turn = harness.ask(**given)
    assert turn["status"] == "parked"
    return turn


def end_task(harness: Harness, task: TaskCall, value: Any = "made", *, failed: bool = False) -> bool:
    """Report the end of a task; returns False if its call already has a result."""
    return finish(harness.runtime, task.task_id, TaskEnded(failed=failed, value=value))


def sweep_again(harness: Harness) -> None:
    """Run the sweeper's next round, one interval later, and probe the tasks of tools as each worker does."""
    harness.move(harness.settings.turn.sweep_s + 1)
    assert sweep(harness.runtime) is not None
    probe_due(harness.runtime, cancel)


def moment_after(harness: Harness, seconds: float) -> str:
    """The harness's present time plus `seconds`, in ISO 8601 format."""
    return (harness.clock.now() + timedelta(seconds=seconds)).isoformat()
