"""The signal handlers of a worker, in place of Celery's.

Celery's own handlers answer a second SIGINT, and any SIGQUIT, by abandoning the running tasks without releasing their
leases, and a single SIGINT with exit status 1. Installed by `perdure.workers.consumer.pause.Step` when the pool runs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from celery import signals
from celery.platforms import EX_OK
from celery.worker import state

_SHUTDOWN = (signal.SIGTERM, signal.SIGINT)
_IMMEDIATE = signal.SIGQUIT


def install_handlers(worker: Any, request_shutdown: Callable[[], None]) -> None:
    """Make each SIGTERM or SIGINT call `request_shutdown` once, and SIGQUIT as often as reaches the hard limit.

    The first request begins the shutdown, the second makes the drain's deadline now, the third the hard limit
    (`perdure.workers.shutdown.phases`). Call this in the main thread. `request_shutdown` must be safe in a signal
    handler.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        if state.should_stop is None:
            state.should_stop = EX_OK
            name = signal.Signals(number).name
            # The receiver of this signal requests the shutdown (`perdure.workers.lifecycle.follow`).
            signals.worker_shutting_down.send(sender=worker.hostname, sig=name, how="Warm", exitcode=EX_OK)
        else:
            request_shutdown()
        if number == _IMMEDIATE:
            request_shutdown()
            request_shutdown()

    for number in (*_SHUTDOWN, _IMMEDIATE):
        signal.signal(number, handle)
