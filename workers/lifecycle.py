"""The lifecycle of a worker process: assembles the runtime, starts the sweeper, runs the shutdown.

Celery's signals call this module. `worker_shutting_down` fires inside the operating system's signal handler, where I/O
is unsafe, so its receiver only puts an event into the queue of the shutdown thread (`perdure.workers.shutdown.phases`).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery import Celery
from celery.signals import (
    setup_logging,
    worker_init,
    worker_ready,
    worker_shutdown,
    worker_shutting_down,
)

from perdure.assembly import Addresses, assemble, require_database
from perdure.channels.callback import UrlCarrier
from perdure.channels.services import configured
from perdure.channels.services.buttons import Buttons
from perdure.channels.services.protocol import Channel
from perdure.channels.services.replies import ChatCarrier, read_file
from perdure.clock import SystemClock
from perdure.errors import loggable
from perdure.network.queues import QUEUES
from perdure.observe.measures import Measures, Server
from perdure.observe.presence import RELEASE, WORKER, Presence
from perdure.runtime import Runtime
from perdure.schedules.entries import active_entries
from perdure.settings import Settings
from perdure.tasks.deliveries import TaskCarrier
from perdure.tasks.process import Process
from perdure.tasks.timetable import fire
from perdure.timetable.sweep import sweep_slots
from perdure.turns.calls import awaited
from perdure.turns.cancel import cancel
from perdure.turns.outbox import Carrier, note_sent
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import DUTIES, sweep
from perdure.workers import logs, upkeep
from perdure.workers.consumer import pause
from perdure.workers.embedder import Embedding
from perdure.workers.isolated.child import Isolation
from perdure.workers.isolated.kill import Warden
from perdure.workers.publish.calls import CeleryCalls
from perdure.workers.publish.wake import CeleryWaker
from perdure.workers.shutdown.fleet_drain import FleetDrain
from perdure.workers.shutdown.flush import flushers
from perdure.workers.shutdown.phases import Shutdown
from perdure.workers.shutdown.start_failure import FAILED, exit_unless_startable
from perdure.workers.threads import require_threads
from perdure.workers.watchdog.heartbeat import Heartbeat

log = logging.getLogger(__name__)

_NEW_OBJECTS = 10_000
"""The number of new objects that start a garbage collection. Python's default, 700, is less than one turn makes."""


_DUTIES = ("intake", "sweep", *DUTIES, "schedule slots", "embedding", "running tasks", *upkeep.UPKEEP)
"""The names of all duties of a worker that are counted."""


class Lifecycle:
    """Assembles the parts of one worker process on first use, and closes the parts in `close`.

    Args:
        app: The worker's application.
        settings: The settings.
        where: The servers' addresses.
        waker: Makes the publisher of wake-ups. By default, the publisher uses the broker of `where`.
        calls: Makes the sender of Celery tools' tasks. By default, the sender uses the broker of `where`.
        others: Returns the number of running tasks that are not perdure's. The shutdown waits for these tasks without a
            limit.
        environment: Environment variables for the worker's child processes.
    """

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        where: Addresses,
        *,
        waker: Callable[[], CeleryWaker] | None = None,
        calls: Callable[[], CeleryCalls] | None = None,
        others: Callable[[], int] = lambda: 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.consumption = pause.Consumption()
        self.fleet_drain: FleetDrain | None = None
        self._embedding: Embedding | None = None
        self._app = app
        self._settings = settings
        self._where = where
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._waker: CeleryWaker | None = None
        self._calls: CeleryCalls | None = None
        self._make_waker = waker or partial(CeleryWaker, settings, where)
        self._make_calls = calls or partial(CeleryCalls.at, settings, where)
        self._chats: dict[str, Channel] = {}
        self._measures = Measures()
        self._isolation = Isolation(environment, self._measures.add)
        self._presence: Presence | None = None
        self._metrics: Server | None = None
        self._shutdown = Shutdown(settings.shutdown, self._isolation, self.consumption, others)

    def __call__(self) -> Process:
        with self._lock:
            if self._process is None:
                self._process = self._assemble()
            return self._process

    def check(self) -> None:
        require_database(self._settings, self._where.database_url)

    def start(self) -> None:
        """Assemble the parts, and start the threads of sweeps, embedding, upkeep, child processes and the shutdown."""
        process = self()
        fleet_drain = self.fleet_drain = FleetDrain(process, self._settings, self._isolation, self.consumption)
        embedding = self._embedding = Embedding(process.runtime)
        embedding.start()
        _thread("perdure-sweeper", lambda: self._sweep(process, fleet_drain, embedding))
        upkeep.start(process.runtime, self._shutdown.begun)
        _thread("perdure-tasks", partial(awaited.probe_in_rounds, process.runtime, cancel, self._shutdown.begun))
        warden = Warden(process.runtime, process.runner)
        _thread("perdure-warden", lambda: self._isolation.watch(warden))
        _thread("perdure-shutdown", lambda: self._shutdown.run(process))

    def watch(self, name: str) -> None:
        """Start what watches this process: the watchdog, the reports that it runs, and the port of its metrics.

        The watchdog kills this process if no Python thread of it runs for a certain time. `name` is the worker's name.
        Call this when the worker is ready.
        """
        environment = {"PERDURE_REDIS_URL": self._where.redis_url, "PERDURE_REDIS_PREFIX": self._settings.redis_prefix}
        Heartbeat(name, self._settings.turn.lease_s, environment).start()
        runtime = self().runtime
        self._presence = Presence(runtime.database, runtime.clock, WORKER, name, self._consumed, self._is_quiet)
        self._presence.start()
        self._metrics = self._serve_metrics()

    def request_shutdown(self) -> None:
        """Begin the shutdown, or shorten it if it has begun. Safe in a signal handler."""
        self._shutdown.request()

    def ensure_shutdown(self) -> None:
        """Begin the shutdown if no signal has begun it, for example after a remote `shutdown` command."""
        if not self._shutdown.requested:
            self._shutdown.request()

    def close(self) -> None:
        """Flush, release the leases and close the parts. Call this once the pool has ended."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        if self._embedding is not None:
            self._embedding.stop()
        if self._metrics is not None:
            self._metrics.close()
        if self._presence is not None:
            self._presence.stop()
        self._shutdown.finish(process)
        began, released = time.monotonic(), self._shutdown.release(process)
        process.runner.close()
        self._close_publishers()
        for each in self._chats.values():
            each.close()
        process.runtime.close()
        self._shutdown.end(released, began)

    def _consumed(self) -> list[str]:
        """Perdure's queues that this worker consumes, also while the intake is closed."""
        consumed = self.consumption.queues()
        return [queue for queue in QUEUES if queue in consumed]

    def _is_quiet(self) -> bool:
        return self.fleet_drain is not None and self.fleet_drain.is_quiet

    def _serve_metrics(self) -> Server | None:
        """Serve the worker's metrics, if a port is configured. A worker without a free port works without them."""
        process, settings = self(), self._settings.metrics
        if not settings.worker_port:
            return None
        gauges = {
            "turns_running": lambda: process.runner.keeper.turns,
            "threads_leaked": lambda: process.runtime.leaks.count,
            "children_running": lambda: self._isolation.running,
        }
        runtime = process.runtime
        models = runtime.called_models(summaries=True)
        self._measures.expect({agent.name for agent in runtime.agents}, models, _DUTIES)
        try:
            server = self._measures.serve(settings.worker_address, settings.worker_port, RELEASE, gauges)
        except OSError as error:
            why = loggable(error)
            log.error("no metrics are served: no port from %d on is free (%s)", settings.worker_port, why)  # noqa: TRY400 (the message has all facts)
            return None
        log.info("metrics are served on port %d", server.port)
        return server

    def _close_publishers(self) -> None:
        for publisher in (self._waker, self._calls):
            if publisher is not None:
                publisher.close()

    def _assemble(self) -> Process:
        waker = self._waker = self._make_waker()
        waker.observe = lambda published: self._measures.wake_up(published=published)
        found = active_entries(self._app.tasks, self._settings)
        calls = self._calls = self._make_calls()
        where = self._where
        runtime = assemble(
            self._settings, where.database_url, waker, where.redis_url, turns=True, calls=calls, measures=self._measures
        )
        runtime.leaks.on_too_many = _shut_down_for_leaks
        runner = Runner(runtime, owner=f"{socket.gethostname()}:{os.getpid()}")
        runner.start()
        carriers = self._carriers(waker, runtime)
        return Process(runtime, runner, carriers, self._isolation.run, found, flushers(runtime), self._shutdown.begun)

    def _carriers(self, waker: CeleryWaker, runtime: Runtime) -> dict[str, Carrier]:
        settings, breakers = self._settings, runtime.breakers
        keys, reachable = settings.webhook_keys(), settings.reachable()
        self._chats = configured.channels(settings, SystemClock())
        return {
            "url": UrlCarrier(keys, reachable, breakers=breakers, traces=runtime.traces),
            "task": TaskCarrier(waker, settings.allowed_reply_tasks()),
            "channel": ChatCarrier(
                self._chats,
                Buttons(settings.signing_keys()),
                breakers,
                note=partial(note_sent, runtime.database),
                read_file=partial(read_file, runtime),
            ),
        }

    def _sweep(self, process: Process, fleet_drain: FleetDrain, embedding: Embedding) -> None:
        runtime, stopped_after = process.runtime, self._shutdown.begun.wait
        duties = runtime.duties
        began = time.monotonic()
        # The pause counts from the beginning of the last round, which may itself go on until the next one is due.
        while not stopped_after(max(fleet_drain.pause_s - (time.monotonic() - began), 0)):
            began = time.monotonic()
            duties.run("intake", fleet_drain.follow_intake)
            turns = fleet_drain.is_open
            if duties.run("sweep", partial(sweep, runtime, turns=turns, stopped_after=stopped_after)) is not None:
                embedding.request()
            duties.run("schedule slots", partial(self._sweep_slots, process))

    def _sweep_slots(self, process: Process) -> None:
        runtime = process.runtime
        if self._waker is not None:
            sweep_slots(runtime.database, runtime.settings.turn, process.entries.values(), partial(fire, self._waker))


def follow(app: Celery, settings: Settings, where: Addresses) -> Lifecycle:
    """Connect a `Lifecycle` to the signals of the application's worker; returns the `Lifecycle`."""
    lifecycle = Lifecycle(app, settings, where)
    app.perdure = lifecycle

    def configure() -> None:
        logs.configure(form=settings.log.format)

    app.steps["worker"].add(pause.PauseStep)

    def begin(sender: Any = None, **_: Any) -> None:
        configure()  # the signal `setup_logging` fires later, and lines logged before it would be lost
        if sender is not None:
            or_exit(partial(require_threads, sender))
        or_exit(lifecycle.check)
        or_exit(lifecycle.start)

    setup_logging.connect(lambda **_: configure(), weak=False)
    # `weak=False`: Celery would drop these receivers, which nothing else references.
    worker_init.connect(begin, weak=False)
    worker_ready.connect(lambda sender, **_: or_exit(partial(_ready, lifecycle, sender.hostname)), weak=False)
    worker_shutting_down.connect(lambda **_: lifecycle.request_shutdown(), weak=False)
    worker_shutdown.connect(lambda **_: lifecycle.close(), weak=False)
    return lifecycle


def _ready(lifecycle: Lifecycle, hostname: str) -> None:
    """Begin the lifecycle's rounds in a worker that consumes. The process is perdure's own: its collector is set, too.

    With a hundred threads, collections took a tenth of the worker's CPU time: each walks what all threads just made,
    and the imported objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    lifecycle.watch(hostname)


def or_exit(step: Callable[[], None]) -> None:
    """Run `step`; exit the process if `step` raises an error.

    If the receiver of a signal raises an error, Celery itself only logs the error and starts the worker, which would
    then take tasks and fail each of them.
    """
    try:
        with exit_unless_startable():
            step()
    except Exception:
        log.exception("this process cannot start")
        raise SystemExit(FAILED) from None


def _shut_down_for_leaks() -> None:
    """Send this process SIGTERM, since hung calls occupy too many threads. A supervisor then starts another worker."""
    log.error("too many tools or hooks run past their time limit and cannot be stopped: this worker shuts down")
    os.kill(os.getpid(), signal.SIGTERM)


def _thread(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()
