"""The signal handlers of a worker, in place of Celery's.

With Celery's own handlers, a second SIGINT or any SIGQUIT makes the worker abandon its running tasks without releasing
their leases. A single SIGINT makes the worker exit with status 1. SIGHUP kills a worker at a terminal, and restarts any
other one, even if SIGTERM follows. `perdure.workers.consumer.pause.PauseStep` installs the handlers of this module when
the pool runs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from celery import signals
from celery.platforms import EX_OK
from celery.worker import state

_IMMEDIATE = signal.SIGQUIT


def install_handlers(worker: Any, stopping: Iterable[signal.Signals], request_shutdown: Callable[[], None]) -> None:
    """Make each of the signals `stopping` request the shutdown once, and each SIGQUIT three times.

    The first request begins the shutdown, the second ends the drain, and the third makes the process exit as at the
    hard limit (`perdure.workers.shutdown.phases`). Call this in the main thread. `request_shutdown` must be safe in a
    signal handler.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        if state.should_stop is None:
            state.should_stop = EX_OK
            name = signal.Signals(number).name
            # The receiver of `worker_shutting_down` requests the shutdown (`perdure.workers.lifecycle.follow`).
            signals.worker_shutting_down.send(sender=worker.hostname, sig=name, how="Warm", exitcode=EX_OK)
        else:
            request_shutdown()
        if number == _IMMEDIATE:
            request_shutdown()
            request_shutdown()

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # unless it is one of `stopping`
    for number in (*stopping, _IMMEDIATE):
        signal.signal(number, handle)
