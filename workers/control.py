"""What `celery -A workers inspect perdure` answers: turns that run here, and the tasks' tallies."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command


@inspect_command(name="perdure")  # type: ignore[untyped-decorator]  # celery carries no types
def inspect_perdure(state: Any) -> dict[str, Any]:
    """Turns that run in this process now, and how its tasks ended so far."""
    process = state.app.perdure()
    return {"turns_running": process.runner.keeper.running, "tasks": process.metrics.snapshot()}
