"""Starting, pausing and stopping a worker's consumption, and the signals that cause it.

A step among Celery's own, between its pool and its consumer. So it is told to stop when
nothing is consumed any more and the pool has not been joined yet: what was prefetched and has
not begun is handed back to the broker there and then. Left to Celery, it would wait in this
process until the last running task has ended.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty
from types import FrameType
from typing import Any

from celery import bootsteps, signals
from celery.platforms import EX_OK
from celery.worker import state
from celery.worker.request import Request

from perdure.workers.consumer.room import Rooms

log = logging.getLogger(__name__)

INTAKE = ("ingress", "turns")
"""The queues that bring turns; the others finish what turns and sessions have left."""

_WARM = (signal.SIGTERM, signal.SIGINT)
_COLD = signal.SIGQUIT


class Taking:
    """One worker's consumer, to the threads beside it."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._paused: list[str] = []

    def of(self, worker: Any) -> None:
        """This is the worker."""
        self._worker = worker

    def notice(self) -> None:
        """Have the consumer notice at once that it is to stop: it looks about once a second."""
        hub = getattr(self._worker, "hub", None)
        if hub is not None:
            hub.call_soon(lambda: None)

    def pause(self) -> None:
        """Take nothing more from the queues that bring turns; what they hold stays there."""
        if self._worker is None or self._paused:
            return
        app, consumer = self._worker.app, self._worker.consumer
        self._paused = [name for name in INTAKE if name in app.amqp.queues.consume_from]
        # All are deselected first: where the broker fails, the consumer starts again with what is selected.
        app.amqp.queues.deselect(self._paused)
        if consumer.task_consumer is not None:
            consumer.call_soon(_cancel, consumer, self._paused)

    def resume(self) -> None:
        """Consume from them again, at once, or when the consumer has reached its broker again."""
        paused, self._paused = self._paused, []
        if not paused:
            return
        app, consumer = self._worker.app, self._worker.consumer
        # All are selected first, for the same reason.
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


class Step(bootsteps.StartStopStep):  # type: ignore[misc]  # celery carries no types
    """The step among Celery's. The application's lifecycle is told what happens."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        self._lifecycle = worker.app.perdure
        self._held: list[Request] = []
        self._began = 0.0
        super().__init__(worker, **options)

    def include_if(self, worker: Any) -> bool:
        """Whether the turns run in this very process."""
        return not is_supervisor(worker)

    def create(self, worker: Any) -> Step:
        """The step is its own service."""
        self._lifecycle.taking.of(worker)
        return self

    def start(self, worker: Any) -> None:
        """The pool runs: from here on signals are ours."""
        if threading.current_thread() is threading.main_thread():
            take_signals(worker, self._lifecycle.leave)

    def close(self, worker: Any) -> None:  # noqa: ARG002 (the step's signature)
        """The worker stops, by a signal or because it was told to from afar."""
        self._lifecycle.stop_taking()
        self._began = time.monotonic()
        # Now: Celery forgets them when it closes its consumer.
        self._held = list(state.requests.values())

    def stop(self, worker: Any) -> None:
        """Nothing is consumed any more: hand back what has not begun."""
        worker.pool.executor.shutdown(wait=False, cancel_futures=True)
        waiting = [each for each in self._held if each not in state.active_requests and not each.acknowledged]
        count = hand_back(waiting)
        if (consumer := worker.consumer.task_consumer) is not None:
            hand_back_underway(consumer.channel)
        if (rooms := worker.consumer.rooms) is not None:
            hand_back_held(rooms)
        log.info(
            "shutdown, 1 of 4: takes no more work; handed back %d of %d tasks that had not begun (%.3f s)",
            count, len(waiting), time.monotonic() - self._began,
        )  # fmt: skip

    terminate = stop


def is_supervisor(worker: Any) -> bool:
    """Whether the worker's process runs no tasks itself, but processes that do."""
    return "prefork" in getattr(worker.pool_cls, "__module__", "")


def hand_back(requests: Iterable[Request]) -> int:
    """Return these messages to the broker; the number that it took. Each is a hint, or is delivered again."""
    count = 0
    for request in requests:
        try:
            request.message.requeue()
        except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
            log.warning("the broker did not take back %s (%s); the sweeper will issue it again", request.name, error)
            break
        request.acknowledged = True
        count += 1
    return count


def hand_back_underway(channel: Any) -> None:
    """Have the broker give somebody else what it may be sending at this moment; waits for a second at most.

    Redis has been asked for one more message by then, and pops whichever comes first. kombu would read the
    reply when it closes the channel, which is after the last running task; its own way to do so is used here.
    """
    if not getattr(channel, "_in_poll", None):
        return  # RabbitMQ keeps what a channel has not acknowledged
    try:
        with suppress(Empty):
            # Nobody consumes from the queue any more: the message is put back to its front.
            channel._brpop_read()  # noqa: SLF001 (there is no other way to it but closing the channel)
    except Exception as error:  # noqa: BLE001 (as above)
        log.warning("what the broker was sending is not known (%s); the sweeper will issue it again", error)


def hand_back_held(rooms: Rooms) -> None:
    """Return to the broker the messages that came without room for them."""
    try:
        rooms.hand_back()
    except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
        log.warning("the broker did not take back what had no room (%s); the sweeper will issue it again", error)


def take_signals(worker: Any, leave: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT begins the shutdown, a second one hastens it, a third one ends it; SIGQUIT too.

    Celery's own handlers would answer a second SIGINT, and any SIGQUIT, by giving the tasks up
    without giving their leases back, and a single SIGINT by exit status 1.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        if state.should_stop is None:
            state.should_stop = EX_OK
            name = signal.Signals(number).name
            signals.worker_shutting_down.send(sender=worker.hostname, sig=name, how="Warm", exitcode=EX_OK)
        else:
            leave()
        if number == _COLD:
            leave()
            leave()

    for number in (*_WARM, _COLD):
        signal.signal(number, handle)
