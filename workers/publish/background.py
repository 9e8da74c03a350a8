"""Publishes the gateway's wake-ups on a background thread, in batches.

The gateway accepts a message by committing it to PostgreSQL, so a request does not wait for the broker. On Redis, a
batch takes one round trip. If wake-ups are lost because the process dies or the broker is unavailable, the sweeper
issues them again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any
from uuid import UUID

from celery import Celery
from kombu import Producer
from kombu.utils.uuid import uuid

from perdure.assembly import Addresses
from perdure.errors import loggable
from perdure.settings import Settings
from perdure.tasks.arguments import described
from perdure.workers.celery_application import PRIORITIES, broker_priority
from perdure.workers.publish.alarms import publishing
from perdure.workers.publish.queues import RETRY_ONCE, concerns_one
from perdure.workers.publish.wake import ENOUGH, PAUSE_S, CeleryWaker

log = logging.getLogger(__name__)

_MOST = 10_000
"""The maximum number of queued wake-ups. Further wake-ups are dropped, and the sweeper issues them later."""

_BATCH = 200
_PAUSE_S = 0.01
"""Seconds between two batches. The pause lets wake-ups accumulate, since a batch is faster than single messages."""

_TRIES = 2
_CLOSE_S = 3.0

_DRAINS = {"drains": True}
"""The option of a wake-up that is not published if enough wake-ups for turns wait at the broker."""

_Wake = tuple[str, dict[str, Any], dict[str, Any]]


class BackgroundWaker(CeleryWaker):
    """A `CeleryWaker` whose callers do not wait for the broker. `close` publishes the remaining wake-ups."""

    def __init__(self, settings: Settings, where: Addresses, app: Celery | None = None) -> None:
        super().__init__(settings, where, app)
        self._reset()

    def _reset(self) -> None:
        """Set the initial state. A forked child calls this, too: it lacks the thread and may inherit a held lock."""
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: dict[str, _Wake] = {}
        self._closing = False
        self._unavailable_until = 0.0
        self._thread: threading.Thread | None = None

    def drain(self, session_id: UUID, priority: int) -> bool:
        """Queue `turns.run`. The thread publishes it, unless enough of these messages wait at the broker by then."""
        ranked = broker_priority(self._broker_url, priority)
        return self.publish("turns.run", {"session_id": str(session_id)}, queue="turns", priority=ranked, **_DRAINS)

    def publish(self, task: str, arguments: dict[str, Any], **options: Any) -> bool:
        """Queue one task message, unless an equal message is already queued; returns whether the message is queued.

        Returns False in three cases: a batch has failed in the last `PAUSE_S` seconds, `close` has been called, or
        `_MOST` messages are queued.
        """
        if os.getpid() != self._pid:
            self._reset()
        with self._changed:
            if self._closing or time.monotonic() < self._unavailable_until or len(self._waiting) >= _MOST:
                return False
            self._waiting.setdefault(f"{task}{arguments}{options}", (task, arguments, options))
            if self._thread is None:
                self._thread = threading.Thread(target=self._publish_all, name="wake-ups", daemon=True)
                self._thread.start()
            self._changed.notify()
        return True

    def close(self) -> None:
        """Publish the queued wake-ups for at most `_CLOSE_S` seconds, then close the connections to the broker."""
        if os.getpid() != self._pid:  # a forked process: the thread, the queue and the connections are its parent's
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        super().close()

    def _publish_all(self) -> None:
        while wakes := self._next():
            error = self._publish_batch(wakes)
            if error is None:
                time.sleep(0 if self._closing else _PAUSE_S)
                continue
            with self._changed:
                self._unavailable_until = time.monotonic() + PAUSE_S
                left = len(self._waiting)
                self._waiting.clear()
            count = len(wakes) + left
            log.warning(
                "the broker did not accept %d wake-ups (%s); the sweeper will issue them again", count, loggable(error)
            )

    def _next(self) -> list[_Wake]:
        """Wait for the next batch; returns an empty batch after `close`, once no wake-ups are left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            keys = list(self._waiting)[:_BATCH]
            return [self._waiting.pop(key) for key in keys]

    def _publish_batch(self, wakes: list[_Wake]) -> Exception | None:
        """Publish a batch; returns the broker's error, or None.

        Tries again after an error, since a pooled connection may have been closed. A repeated wake-up is harmless. Then
        publishes the wake-ups one by one, since an invalid wake-up fails its batch.
        """
        failed: Exception | None = None
        for _ in range(_TRIES):
            try:
                with publishing(self.app, PAUSE_S) as producer, producer.batch():
                    self._send(producer, wakes)
            except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
                failed = error
            else:
                return None
        if len(wakes) > 1:
            refusals = (self._publish_batch([wake]) for wake in wakes)
            return next((refusal for refusal in refusals if refusal is not None), None)
        if failed is None or not concerns_one(failed):
            return failed
        log.error("a wake-up for %s cannot be published (%s)", wakes[0][0], type(failed).__name__)
        return None

    def _send(self, producer: Producer, wakes: list[_Wake]) -> None:
        """Send `wakes`. Unlike `Celery.send_task`, this uses no routes, and declares each queue once per batch."""
        amqp, declared = self.app.amqp, set()
        if any(_DRAINS.keys() & options.keys() for _, _, options in wakes):
            wakes = _fewer(wakes, ENOUGH - self.waiting(producer))
        for task, arguments, options in wakes:
            task_id, queue = uuid(), options["queue"]
            ranked = {"priority": broker_priority(self._broker_url, PRIORITIES[queue]), **options}
            shown = described((), arguments)
            message = amqp.create_task_message(
                task_id, task, kwargs=arguments, root_id=task_id, ignore_result=True, **shown
            )
            declare = None if queue not in declared else ()
            declared.add(queue)
            amqp.send_task_message(
                producer, task, message, retry=True, retry_policy=RETRY_ONCE, declare=declare, **ranked
            )
            self._has_published |= queue == "turns"


def _fewer(wakes: list[_Wake], most: int) -> list[_Wake]:
    """The wake-ups, with at most `most` of those for drains. Of those, the first ones stay."""
    kept: list[_Wake] = []
    for task, arguments, options in wakes:
        drains = options.keys() & _DRAINS.keys()
        if not drains or most > 0:
            kept.append((task, arguments, {name: value for name, value in options.items() if name not in drains}))
        most -= bool(drains)
    return kept
