"""A worker process from its first signal to its last: assembled, swept for, drained.

Celery's signals call in here. `worker_shutting_down` fires inside the signal handler, where
no I/O may be done, so it only sets an event; the thread that waits for it drains: running
turns go on for their budget, then whoever waits for a model is parked for another worker,
and a tool is awaited until the hard exit.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery
from celery.signals import setup_logging, worker_init, worker_process_init, worker_shutdown, worker_shutting_down

import schedules
from perdure.channels.callback import UrlCarrier
from perdure.errors import SettingsError, Unavailable
from perdure.settings import Settings, ShutdownSettings
from perdure.slots.sweep import sweep_slots
from perdure.turns.outbox import Carrier
from perdure.turns.runner import Runner
from perdure.turns.sweep import sweep
from tasks.deliveries import TaskCarrier
from tasks.process import Process
from tasks.scheduled import fire
from workers import logs
from workers.alone import Isolation
from workers.assembly import Addresses, assemble
from workers.wake import CeleryWaker

log = logging.getLogger(__name__)

_CLOSE_S = 5.0


class Lifecycle:
    """The parts of one worker process, made when first needed and closed when it ends."""

    def __init__(self, app: Celery, settings: Settings, where: Addresses) -> None:
        self._app = app
        self._settings = settings
        self._where = where
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._waker: CeleryWaker | None = None
        self._isolation = Isolation()
        self._pid = 0
        self._leaving = threading.Event()
        self._closed = threading.Event()

    def __call__(self) -> Process:
        """The process's parts. A forked child makes its own."""
        with self._lock:
            if self._process is None or self._pid != os.getpid():
                self._process = self._assemble()
                self._pid = os.getpid()
            return self._process

    def start(self) -> None:
        """Assemble now, and begin to sweep and to wait for the end."""
        process = self()
        _thread("perdure-sweeper", lambda: self._sweep(process))
        _thread("perdure-drain", lambda: self._drain(process, self._settings.shutdown))

    def leave(self) -> None:
        """A warm shutdown has begun. Safe in a signal handler."""
        self._leaving.set()

    def close(self) -> None:
        """The pool has ended: give everything back."""
        self._closed.set()
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.runner.close()
        if self._waker is not None:
            self._waker.close()
        process.runtime.database.close()
        log.info("closed")

    def _assemble(self) -> Process:
        waker = self._waker = CeleryWaker(self._settings, self._where)
        runtime = assemble(self._settings, self._where.database_url, waker)
        runner = Runner(runtime, owner=f"{socket.gethostname()}:{os.getpid()}")
        runner.start()
        carriers: dict[str, Carrier] = {"url": UrlCarrier(self._settings.signing_key()), "task": TaskCarrier(waker)}
        found = schedules.entries(self._app.tasks, self._settings)
        return Process(runtime, runner, carriers, self._isolation.run, found)

    def _sweep(self, process: Process) -> None:
        while not self._leaving.wait(process.runtime.settings.turn.sweep_s):
            try:
                sweep(process.runtime)
                self._sweep_slots(process)
            except Unavailable as error:
                log.warning("could not sweep: %s", error.message)
            except Exception:
                log.exception("the sweeper met an error and goes on")

    def _sweep_slots(self, process: Process) -> None:
        runtime = process.runtime
        if self._waker is not None:
            sweep_slots(runtime.database, runtime.settings.turn, process.entries.values(), partial(fire, self._waker))

    def _drain(self, process: Process, budget: ShutdownSettings) -> None:
        self._leaving.wait()
        hard_exit_at = time.monotonic() + budget.hard_exit_s
        keeper = process.runner.keeper
        log.info("draining %d turns for at most %g s", keeper.running, budget.drain_s)
        if not keeper.wait_idle(budget.drain_s):
            log.info("parking %d turns", keeper.running)
        keeper.drain()
        self._isolation.leave()
        if self._closed.wait(hard_exit_at - time.monotonic()):
            return
        log.error("%d turns did not end in time: leaving the hard way", keeper.running)
        try:
            keeper.release_all()
        except Unavailable as error:
            log.warning("their leases were not given back, and run out: %s", error.message)
        logging.shutdown()
        os._exit(1)


def follow(app: Celery, settings: Settings, where: Addresses) -> Lifecycle:
    """Tie the process's parts to the application's worker."""
    lifecycle = Lifecycle(app, settings, where)
    app.perdure = lifecycle

    def begin(sender: Any = None, **_: Any) -> None:
        # A prefork parent only supervises; its children assemble themselves.
        if sender is None or "prefork" not in getattr(sender.pool_cls, "__module__", ""):
            _start_or_exit(lifecycle)

    setup_logging.connect(lambda **_: logs.configure(), weak=False)
    # Kept alive by the application: Celery holds its receivers weakly.
    worker_init.connect(begin, weak=False)
    worker_process_init.connect(lambda **_: _start_or_exit(lifecycle), weak=False)
    worker_shutting_down.connect(lambda **_: lifecycle.leave(), weak=False)
    worker_shutdown.connect(lambda **_: lifecycle.close(), weak=False)
    return lifecycle


def _start_or_exit(lifecycle: Lifecycle) -> None:
    """Start, or end the worker with a sentence: Celery would log an error of a signal's receiver and go on."""
    try:
        lifecycle.start()
    except SettingsError as error:
        sys.stderr.write(f"perdure: {error}\n")
        raise SystemExit(2) from None
    except Unavailable as error:
        sys.stderr.write(f"perdure: {error.message}\n")
        raise SystemExit(3) from None


def _thread(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()
