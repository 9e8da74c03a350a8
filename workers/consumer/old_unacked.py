"""Restores unacknowledged messages of workers of an old release, one without the setting `PERDURE_REDIS_PREFIX`.

The old release kept unacknowledged messages under kombu's default keys, `unacked` and `unacked_index`, which all
applications on a Redis database share. This release has its own keys, so kombu does not restore the messages of a
killed worker of the old release. Each worker of this release restores those messages at its start.

During a rolling upgrade, a worker of the old release may still process a message that is younger than the visibility
timeout. So this module leaves such a message, and checks again later. It does not change messages of other
applications.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

from celery import Celery

from perdure.errors import loggable
from perdure.network.queues import QUEUES
from perdure.tasks.task import PerdureTask
from perdure.workers.application import REDELIVER_S, restored_level

log = logging.getLogger(__name__)

_KEYS = ("unacked", "unacked_index")
_CONNECT_S = 5.0
_RETRY_S = 30.0
_BATCH = 100

# KEYS: the unacknowledged messages, the times of their delivery, the queue. ARGV: the delivery tag, the latest delivery
# time of an abandoned message, the message. Like kombu, the script uses RPUSH, so the message is consumed next.
_RESTORE = """
local delivered_at = redis.call('ZSCORE', KEYS[2], ARGV[1])
if delivered_at and tonumber(delivered_at) > tonumber(ARGV[2]) then return 'young' end
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 'gone' end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('RPUSH', KEYS[3], ARGV[3])
return 'restored'
"""


class OldUnacked:
    """Restores the old release's unacknowledged messages of perdure's queues on the broker of `app`.

    A message is abandoned if it was delivered more than `abandoned_s` seconds ago. `abandoned_s` is the visibility
    timeout of the old release.
    """

    def __init__(self, app: Celery, abandoned_s: float = REDELIVER_S) -> None:
        self._app = app
        self._abandoned_s = abandoned_s

    def run(self, ends: threading.Event) -> None:
        """Restore messages repeatedly, until no unacknowledged message of perdure's queues remains or `ends` is set."""
        pause_s: float = 0
        while not ends.wait(pause_s):
            try:
                if not self.restore():
                    return
                pause_s = self._abandoned_s
            except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
                log.warning("the unacknowledged messages of the previous release cannot be read (%s)", loggable(error))
                pause_s = _RETRY_S

    def restore(self) -> int:
        """Put abandoned messages back into their queues; returns the number of messages that are not abandoned yet.

        If the broker is not Redis, this does nothing and returns 0.
        """
        with self._app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=_CONNECT_S)
            if connection.transport.driver_type != "redis":
                return 0
            channel = connection.channel()
            with channel.conn_or_acquire() as client:
                return self._restore(channel, client)

    def _restore(self, channel: Any, client: Any) -> int:
        counts = {b"restored": 0, b"young": 0, b"gone": 0}
        abandoned = time.time() - self._abandoned_s  # the local clock, which kombu also uses for the index
        for tag, entry in client.hscan_iter(_KEYS[0], count=_BATCH):
            if (found := self._own(entry)) is None:
                continue
            queue, message = found
            key = _list(channel, queue, message)
            counts[client.eval(_RESTORE, 3, *_KEYS, key, tag, abandoned, json.dumps(message))] += 1
        if counts[b"restored"]:
            log.info(
                "restored messages that the previous release left in the Redis key %r: %d",
                _KEYS[0],
                counts[b"restored"],
            )
        return counts[b"young"]

    def _own(self, entry: bytes) -> tuple[str, dict[str, Any]] | None:
        """The queue and the message of an entry in `unacked`; `None` if the message is not perdure's.

        The queue and the task must both be perdure's, since another application may have a queue with the same name.
        """
        try:
            message, exchange, routing_key = json.loads(entry)
            task = self._app.tasks.get(message["headers"]["task"])
            message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
        except (ValueError, TypeError, KeyError):
            return None
        own = isinstance(task, PerdureTask) and routing_key in QUEUES and exchange in ("", routing_key)
        return (routing_key, message) if own else None


def _list(channel: Any, queue: str, message: dict[str, Any]) -> str:
    """The Redis list of `queue` that `message` returns to."""
    priority = channel._get_message_priority(message, reverse=False)  # noqa: SLF001 (kombu has no public way)
    key: str = channel._q_for_pri(queue, restored_level(priority))  # noqa: SLF001 (as above)
    return key
