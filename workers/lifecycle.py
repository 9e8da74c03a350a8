"""A worker process from its start to its end: assembles the runtime, starts the sweeper, runs the shutdown.

Celery's signals call this module. `worker_shutting_down` fires inside the operating system's signal handler, where I/O
is unsafe, so it only sets an event for the shutdown thread (`shutdown`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery
from celery.signals import (
    setup_logging,
    worker_init,
    worker_process_init,
    worker_ready,
    worker_shutdown,
    worker_shutting_down,
)

from perdure import schedules
from perdure.channels.callback import UrlCarrier
from perdure.errors import Unavailable
from perdure.resilience.registry import BreakerRegistry
from perdure.schedule.sweep import sweep_slots
from perdure.settings import Settings
from perdure.tasks.deliveries import TaskCarrier
from perdure.tasks.process import Process
from perdure.tasks.scheduled import fire
from perdure.turns.outbox import Carrier
from perdure.turns.run.runner import Runner
from perdure.turns.sweep import sweep
from perdure.workers import logs
from perdure.workers.assembly import Addresses, assemble, require_database
from perdure.workers.consumer import pause
from perdure.workers.consumer.old_unacked import OldUnacked
from perdure.workers.embedding import Embedding
from perdure.workers.isolated.kill import Warden
from perdure.workers.isolated.run import Isolation
from perdure.workers.publish.wake import CeleryWaker
from perdure.workers.shutdown.flush import flushers
from perdure.workers.shutdown.phases import Shutdown
from perdure.workers.shutdown.standby import Standby
from perdure.workers.shutdown.start_failure import exit_unless_startable
from perdure.workers.watchdog.heartbeat import Heartbeat

log = logging.getLogger(__name__)


class Lifecycle:
    """The parts of one worker process, made when first needed and closed when it ends."""

    def __init__(self, app: Celery, settings: Settings, where: Addresses) -> None:
        self.taking = pause.Taking()
        self.standby: Standby | None = None
        self._embedding: Embedding | None = None
        self._app = app
        self._settings = settings
        self._where = where
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._waker: CeleryWaker | None = None
        self._isolation = Isolation()
        self._shutdown = Shutdown(settings.shutdown, self._isolation, self.taking)
        self._pid = 0

    def __call__(self) -> Process:
        """The process's parts. A forked child makes its own."""
        with self._lock:
            if self._process is None or self._pid != os.getpid():
                self._process = self._assemble()
                self._pid = os.getpid()
            return self._process

    def check(self) -> None:
        """Check that this release can use the database; see `require_database`."""
        require_database(self._where.database_url)

    def start(self) -> None:
        """Assemble now, and begin to sweep and to wait for the end."""
        process = self()
        standby = self.standby = Standby(process, self._settings, self._isolation, self.taking)
        embedding = self._embedding = Embedding(process.runtime)
        embedding.start()
        _thread("perdure-old-unacked", lambda: OldUnacked(self._app).run(self._shutdown.begun))
        _thread("perdure-sweeper", lambda: self._sweep(process, standby, embedding))
        warden = Warden(process.runtime, process.runner)
        _thread("perdure-warden", lambda: self._isolation.watch(warden))
        _thread("perdure-drain", lambda: self._shutdown.watch(process))

    def watch(self, name: str) -> None:
        """The worker `name` is ready: from now on a second process kills it if it falls silent."""
        environment = {"PERDURE_REDIS_URL": self._where.redis_url, "PERDURE_REDIS_PREFIX": self._settings.redis_prefix}
        Heartbeat(name, self._settings.turn.lease_s, environment).start()

    def leave(self) -> None:
        """A shutdown begins, or is to be hastened. Safe in a signal handler."""
        self._shutdown.ask()

    def stop_taking(self) -> None:
        """The worker stops; if no signal told it to, a shutdown begins all the same."""
        if not self._shutdown.asked:
            self._shutdown.ask()

    def close(self) -> None:
        """The pool has ended: flush, and give everything back."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        if self._embedding is not None:
            self._embedding.leave()
        self._shutdown.finish(process)
        began, released = time.monotonic(), self._shutdown.release(process)
        process.runner.close()
        if process.runtime.connections is not None:
            process.runtime.connections.close()
        if self._waker is not None:
            self._waker.close()
        if process.runtime.redis_memory is not None:
            process.runtime.redis_memory.close()
        process.runtime.snapshots.close()
        if process.runtime.breakers is not None:
            process.runtime.breakers.close()
        process.runtime.database.close()
        self._shutdown.ended(released, began)

    def _assemble(self) -> Process:
        waker = self._waker = CeleryWaker(self._settings, self._where)
        found = schedules.entries(self._app.tasks, self._settings)
        runtime = assemble(self._settings, self._where.database_url, waker, self._where.redis_url, turns=True)
        runtime.leaks.on_too_many = _leave_for_leaks
        runner = Runner(runtime, owner=f"{socket.gethostname()}:{os.getpid()}")
        runner.start()
        carriers = self._carriers(waker, runtime.breakers)
        return Process(runtime, runner, carriers, self._isolation.run, found, flushers(runtime), self._shutdown.begun)

    def _carriers(self, waker: CeleryWaker, breakers: BreakerRegistry | None) -> dict[str, Carrier]:
        settings = self._settings
        keys, reachable = settings.webhook_keys(), settings.reachable()
        return {
            "url": UrlCarrier(keys, settings.signing_key(), reachable, breakers=breakers),
            "task": TaskCarrier(waker, settings.allowed_reply_tasks()),
        }

    def _sweep(self, process: Process, standby: Standby, embedding: Embedding) -> None:
        while not self._shutdown.begun.wait(standby.pause_s):
            try:
                if sweep(process.runtime, turns=standby.look(), stopped_after=self._shutdown.begun.wait) is not None:
                    embedding.look()
                self._sweep_slots(process)
            except Unavailable as error:
                log.warning("could not sweep: %s", error.message)
            except Exception:
                log.exception("the sweeper met an error and goes on")

    def _sweep_slots(self, process: Process) -> None:
        runtime = process.runtime
        if self._waker is not None:
            sweep_slots(runtime.database, runtime.settings.turn, process.entries.values(), partial(fire, self._waker))


def follow(app: Celery, settings: Settings, where: Addresses) -> Lifecycle:
    """Tie the process's parts to the application's worker."""
    lifecycle = Lifecycle(app, settings, where)
    app.perdure = lifecycle
    app.steps["worker"].add(pause.Step)

    def begin(sender: Any = None, **_: Any) -> None:
        logs.configure()  # Celery asks for it only later, and what is logged until then would be lost
        or_exit(lifecycle.check)
        if sender is None or not pause.is_supervisor(sender):  # its children assemble themselves
            or_exit(lifecycle.start)

    def begin_child(**_: Any) -> None:
        or_exit(lifecycle.start)
        lifecycle.watch(f"{socket.gethostname()}:{os.getpid()}")

    def ready(sender: Any, **_: Any) -> None:
        if not pause.is_supervisor(sender.controller):
            lifecycle.watch(sender.hostname)

    setup_logging.connect(lambda **_: logs.configure(), weak=False)
    # Kept alive by the application: Celery holds its receivers weakly.
    worker_init.connect(begin, weak=False)
    worker_process_init.connect(begin_child, weak=False)
    worker_ready.connect(ready, weak=False)
    worker_shutting_down.connect(lambda **_: lifecycle.leave(), weak=False)
    worker_shutdown.connect(lambda **_: lifecycle.close(), weak=False)
    return lifecycle


def or_exit(step: Callable[[], None]) -> None:
    """Run a step of the start, or exit with its message: Celery logs an error of a signal's receiver and goes on."""
    with exit_unless_startable():
        step()


def _leave_for_leaks() -> None:
    """What hangs has taken too many threads: shut down as for any SIGTERM; a supervisor starts another worker."""
    log.error("too many tools or hooks run past their time and cannot be ended: this worker drains and leaves")
    os.kill(os.getpid(), signal.SIGTERM)


def _thread(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()
