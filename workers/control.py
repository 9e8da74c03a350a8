"""The remote-control commands `celery -A perdure inspect perdure` and `stats`, without the broker's passwords."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from perdure.workers.lifecycle import Lifecycle

_HIDDEN = "********"
"""What Celery shows in place of secret settings."""


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


@inspect_command()  # type: ignore[untyped-decorator]  # as above
def stats(state: Any) -> dict[str, Any]:
    """Celery's statistics of the worker. Celery leaves out the broker's password, but not the one of its key file."""
    found: dict[str, Any] = state.consumer.controller.stats()
    tls = found["broker"].get("ssl") if isinstance(found.get("broker"), dict) else None
    if isinstance(tls, dict) and "ssl_password" in tls:
        found["broker"]["ssl"] = {**tls, "ssl_password": _HIDDEN}
    return found
