"""The remote-control command `celery -A perdure inspect perdure`."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from perdure.workers.lifecycle import Lifecycle


@inspect_command(name="perdure")  # type: ignore[untyped-decorator]  # celery carries no types
def inspect_perdure(state: Any) -> dict[str, Any]:
    """The worker's counts of running turns, leaked threads and tasks, and the phase of its intake."""
    lifecycle = getattr(state.app, "perdure", None)
    if not isinstance(lifecycle, Lifecycle):
        return {}  # the worker consumes none of perdure's queues
    process = lifecycle()
    fleet_drain = {} if lifecycle.fleet_drain is None else lifecycle.fleet_drain.report()
    return {
        "turns_running": process.runner.keeper.turns,
        "leaked_threads": process.runtime.leaks.count,
        **fleet_drain,
        "tasks": process.metrics.snapshot(),
    }
