"""`celery -A perdure inspect perdure`: running turns, leaked threads, the intake, and task counts of each worker."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command


@inspect_command(name="perdure")  # type: ignore[untyped-decorator]  # celery carries no types
def inspect_perdure(state: Any) -> dict[str, Any]:
    """Turns that run in this process now, threads that it leaked, whether it takes more, how its tasks ended."""
    lifecycle = state.app.perdure
    process = lifecycle()
    standby = {} if lifecycle.standby is None else lifecycle.standby.report()
    return {
        "turns_running": process.runner.keeper.turns,
        "leaked_threads": process.runtime.leaks.count,
        **standby,
        "tasks": process.metrics.snapshot(),
    }
