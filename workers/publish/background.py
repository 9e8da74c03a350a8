"""Wake-ups of the gateway: published by one thread, together where several are waiting.

A message is accepted when it is committed; a request does not wait for the broker as well. On Redis the wake-ups that
have come while the last ones were published take one round trip. What is lost when the process dies, or while the
broker is unavailable, the sweeper issues again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from kombu import Producer
from kombu.exceptions import EncodeError
from kombu.utils.uuid import uuid
from redis.exceptions import ResponseError

from perdure.settings import Settings
from perdure.tasks.arguments import described
from perdure.workers.application import PRIORITIES, broker_priority
from perdure.workers.assembly import Addresses
from perdure.workers.publish.wake import ONCE_MORE, PAUSE_S, CeleryWaker

log = logging.getLogger(__name__)

_MOST = 10_000
"""Wake-ups that wait to be published; further ones are left to the sweeper."""

_TOGETHER = 200
_PAUSE_S = 0.01
"""Between two publications: what comes during it is published together, at a fraction of the cost."""

_TRIES = 2
_CLOSE_S = 3.0

_OF_ONE = (EncodeError, ResponseError)
"""What fails one wake-up and no other: arguments that are no JSON, a queue whose key another program uses."""

_Wake = tuple[str, dict[str, Any], dict[str, Any]]


class BackgroundWaker(CeleryWaker):
    """A `CeleryWaker` whose callers do not wait for the broker. Call `close` last: it publishes what waits."""

    def __init__(self, settings: Settings, where: Addresses) -> None:
        super().__init__(settings, where)
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing. A forked child has neither its parent's thread nor, perhaps, a lock that is free."""
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: dict[str, _Wake] = {}
        self._closing = False
        self._away_until = 0.0
        self._thread: threading.Thread | None = None

    def publish(self, task: str, arguments: dict[str, Any], **options: Any) -> bool:
        """Have one task message sent, once if it waits already; whether it is likely to be.

        It is not while the broker is unavailable, and after `close`.
        """
        if os.getpid() != self._pid:
            self._begin()
        with self._changed:
            if self._closing or time.monotonic() < self._away_until or len(self._waiting) >= _MOST:
                return False
            self._waiting.setdefault(f"{task}{arguments}{options}", (task, arguments, options))
            if self._thread is None:
                self._thread = threading.Thread(target=self._publish_all, name="wake-ups", daemon=True)
                self._thread.start()
            self._changed.notify()
        return True

    def close(self) -> None:
        """Publish what waits, for at most a few seconds, and close the connections to the broker."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        super().close()

    def _publish_all(self) -> None:
        while wakes := self._next():
            error = self._tried(wakes)
            if error is None:
                time.sleep(0 if self._closing else _PAUSE_S)
                continue
            with self._changed:
                self._away_until = time.monotonic() + PAUSE_S
                left = len(self._waiting)
                self._waiting.clear()
            count = len(wakes) + left
            log.warning("the broker did not take %d wake-ups (%s); the sweeper will issue them again", count, error)

    def _next(self) -> list[_Wake]:
        """The wake-ups that wait, as soon as there are any; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            taken = list(self._waiting)[:_TOGETHER]
            return [self._waiting.pop(key) for key in taken]

    def _tried(self, wakes: list[_Wake]) -> Exception | None:
        """Publish; once more if that fails, for a kept connection may be closed. A repeated wake-up is harmless."""
        failed: Exception | None = None
        for _ in range(_TRIES):
            try:
                with self.app.producer_or_acquire() as producer, producer.batch():
                    self._send(producer, wakes)
            except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
                failed = error
            else:
                return None
        return failed if len(wakes) == 1 else self._tried_singly(wakes)

    def _tried_singly(self, wakes: list[_Wake]) -> Exception | None:
        """Publish one by one, without those that no broker can take: one such wake-up fails its whole batch."""
        for wake in wakes:
            failed = self._tried([wake])
            if isinstance(failed, _OF_ONE):
                log.error("a wake-up for %s cannot be published (%s)", wake[0], type(failed).__name__)
            elif failed is not None:
                return failed
        return None

    def _send(self, producer: Producer, wakes: list[_Wake]) -> None:
        """As `Celery.send_task` does, less what is the same for all of them: routing, and declaring the queues."""
        amqp, declared = self.app.amqp, set()
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
                producer, task, message, retry=True, retry_policy=ONCE_MORE, declare=declare, **ranked
            )
