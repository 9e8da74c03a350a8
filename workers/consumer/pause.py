"""Pauses and resumes a worker's consumption; at shutdown, returns the messages of tasks that have not begun.

`Consumption` pauses the queues that start turns while the intake of all workers is closed (`perdure drain`).

`PauseStep` is a boot step between Celery's pool and its consumer. At shutdown, Celery first stops the consumer, then
stops `PauseStep`, and then waits until the pool's running tasks end. `PauseStep` returns the messages of tasks that
have not begun to the broker, so the messages do not wait for the running tasks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty
from typing import Any

from celery import bootsteps
from celery.worker import state
from celery.worker.request import Request

from perdure.errors import loggable
from perdure.servers.process.stop_signals import stop_signals
from perdure.workers.consumer.room import Rooms
from perdure.workers.shutdown.signals import install_handlers

log = logging.getLogger(__name__)

INTAKE = ("ingress", "turns")
"""The queues whose tasks start turns. The tasks of the other queues finish accepted work."""


class Consumption:
    """Pauses and resumes a worker's consumption. Threads other than the consumer's may call its methods."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._paused: list[str] = []
        self._lock = threading.Lock()

    def attach(self, worker: Any) -> None:
        self._worker = worker

    def wake(self) -> None:
        """Wake the event loop, so that it notices a requested stop at once. Otherwise it checks about once a second."""
        hub = getattr(self._worker, "hub", None)
        if hub is not None:
            hub.call_soon(lambda: None)

    def queues(self) -> set[str]:
        """The queues that the worker consumes, with those that it has paused.

        An operator may have cancelled some of those with which it began, or added others (`celery control`, Flower).
        """
        if self._worker is None:
            return set()
        with self._lock:
            return {*self._worker.app.amqp.queues.consume_from, *self._paused}

    def pause(self) -> None:
        """Stop consuming the queues in `INTAKE`. Their messages stay in the broker."""
        if self._worker is None or self._paused:
            return
        app, consumer = self._worker.app, self._worker.consumer
        with self._lock:
            self._paused = [name for name in INTAKE if name in app.amqp.queues.consume_from]
            # Deselect the queues before cancelling them: after a broker failure, Celery consumes all selected queues.
            app.amqp.queues.deselect(self._paused)
        if consumer.task_consumer is not None:
            consumer.call_soon(_cancel, consumer, self._paused)

    def resume(self) -> None:
        """Consume the paused queues again: now, or once the consumer has reconnected."""
        if not self._paused:
            return
        app, consumer = self._worker.app, self._worker.consumer
        with self._lock:
            paused, self._paused = self._paused, []
            # Select the queues before consuming them: after a broker failure, Celery consumes all selected queues.
            for name in paused:
                app.amqp.queues.select_add(app.amqp.queues[name])
        if consumer.task_consumer is not None:
            consumer.call_soon(_consume, consumer, paused)


def _cancel(consumer: Any, names: Iterable[str]) -> None:
    for name in names:
        consumer.cancel_task_queue(name)


def _consume(consumer: Any, names: Iterable[str]) -> None:
    for name in names:
        consumer.add_task_queue(name)


class PauseStep(bootsteps.StartStopStep):  # type: ignore[misc]  # celery carries no types
    """The boot step of a worker. It calls the application's `Lifecycle`."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        self._lifecycle = worker.app.perdure
        self._held: list[Request] = []
        self._began = 0.0
        self._stop_signals = stop_signals()  # Celery installs a handler of SIGHUP later
        super().__init__(worker, **options)

    def create(self, worker: Any) -> PauseStep:
        """Attach the worker to the lifecycle's `Consumption`; returns this step, which Celery starts and stops."""
        self._lifecycle.consumption.attach(worker)
        return self

    def start(self, worker: Any) -> None:
        """Install the signal handlers, now that the pool runs."""
        if threading.current_thread() is threading.main_thread():
            install_handlers(worker, self._stop_signals, self._lifecycle.request_shutdown)

    def close(self, worker: Any) -> None:  # noqa: ARG002 (the step's signature)
        """Begin the shutdown unless it has begun, and record the received tasks.

        Celery calls this when the worker stops, after a signal or a remote `shutdown` command.
        """
        self._lifecycle.ensure_shutdown()
        self._began = time.monotonic()
        # Copied here and not in `stop`, since closing the consumer clears `state.requests`.
        self._held = list(state.requests.values())

    def stop(self, worker: Any) -> None:
        """Return to the broker the messages whose tasks have not begun.

        Celery calls this once the consumer has stopped.
        """
        worker.pool.executor.shutdown(wait=False, cancel_futures=True)
        waiting = [each for each in self._held if each not in state.active_requests and not each.acknowledged]
        count = _return_requests(waiting)
        if (consumer := worker.consumer.task_consumer) is not None:
            _return_pending_reply(consumer.channel)
        if (rooms := worker.consumer.rooms) is not None:
            _return_held(rooms)
        log.info(
            "shutdown, 1 of 4: consumes no more; returned %d of %d tasks that had not begun (%.3f s)",
            count, len(waiting), time.monotonic() - self._began,
        )  # fmt: skip

    terminate = stop


def _return_requests(requests: Iterable[Request]) -> int:
    """Give the messages of `requests` back to the broker; returns how many the broker accepted. Stops at an error.

    An error loses no message: the sweeper publishes a wake-up again, and the broker redelivers a submission.
    """
    count = 0
    for request in requests:
        try:
            request.message.requeue()
        except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
            log.warning(
                "%s could not be returned to the broker (%s); the sweeper will issue it again",
                request.name,
                loggable(error),
            )
            break
        request.acknowledged = True
        count += 1
    return count


def _return_pending_reply(channel: Any) -> None:
    """Read the reply to the pending BRPOP of a Redis channel, and put the reply's message back into its queue.

    Takes up to a second. kombu would read the reply only when it closes the channel, after the last running task has
    ended.
    """
    if not getattr(channel, "_in_poll", None):
        return  # RabbitMQ redelivers the messages that a closed channel has not acknowledged
    try:
        with suppress(Empty):
            # This worker no longer consumes the queue, so kombu puts the message back at the queue's front.
            channel._brpop_read()  # noqa: SLF001 (kombu reads it elsewhere only when it closes the channel)
    except Exception as error:  # noqa: BLE001 (as above)
        log.warning(
            "the broker's last reply could not be read (%s); the sweeper will issue its message again", loggable(error)
        )


def _return_held(rooms: Rooms) -> None:
    try:
        rooms.return_held()
    except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
        log.warning(
            "held messages could not be returned to the broker (%s); the sweeper will issue them again", loggable(error)
        )
