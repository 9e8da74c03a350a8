"""Keeps workers running when a key of the Redis broker has a type that kombu does not expect.

Without this module, one such key would end every worker, since Redis refuses kombu's command (WRONGTYPE). Any program
with the broker's URL can create such a key.

- Keys under `PERDURE_REDIS_PREFIX`, and the keys in which kombu stores the bindings of perdure's exchanges, belong to
  perdure alone. A worker renames such a key to `PREFIX…KEY.broken-TIME` and logs it. The renamed key does not expire.
- The queues have common names, such as `memory`, and another program may store its own data under such a key. A worker
  does not change a queue's key. It logs an error, and stops consuming the queue until the key is deleted or is a list.

`perdure.workers.consumer.consumer` checks the keys when a worker connects, every `CHECK_S` seconds, and when Redis
refuses a command.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from celery import Celery

from perdure.errors import loggable
from perdure.redis import remedy
from perdure.workers.consumer.tally import Tally

log = logging.getLogger(__name__)

CHECK_S = 10.0

# KEYS: the key, its new name. ARGV: the expected type.
# The only key that may be a string is kombu's mutex. A mutex without expiry is broken, too: while it exists, kombu
# restores no messages.
_RENAME = """
local found = redis.call('TYPE', KEYS[1]).ok
local endless = found == 'string' and redis.call('PTTL', KEYS[1]) == -1
if found == 'none' or (found == ARGV[1] and not endless) then return false end
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('PERSIST', KEYS[2])
return found
"""


class BrokenKeys:
    """Finds and renames broken keys for one worker of `app`. Call its methods only in the consumer's event loop."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.taken: frozenset[str] = frozenset()
        """The queues with a key that is not a list, because another program uses the key."""

    def skip_taken(self, channel: Any) -> None:
        """Make `channel`, of kombu's Redis transport, ignore queues in `taken` when it consumes and counts messages."""
        size = channel._size  # noqa: SLF001 (kombu has no public way)

        def count(queue: str) -> int:
            return 0 if queue in self.taken else int(size(queue))

        def update_cycle() -> None:
            channel._queue_cycle.update([queue for queue in channel.active_queues if queue not in self.taken])  # noqa: SLF001 (as above)

        channel._size, channel._update_queue_cycle = count, update_cycle  # noqa: SLF001 (as above)

    def check(self, channel: Any) -> list[str]:
        """Rename each broken key that belongs to perdure, and update `taken`; returns the former names of renamed keys.

        An error reply of Redis is logged, not raised.
        """
        own, queues = dict(_own(channel, self._app)), dict(_queues(channel, self._app))
        prefix = channel.unacked_key.removesuffix("unacked")  # PERDURE_REDIS_PREFIX
        try:
            with channel.conn_or_acquire() as client:
                kinds = _types(client, [*own, *queues])
                self._find_taken(channel, {key: kinds[key] for key in queues if kinds[key] not in {"none", "list"}})
                suspects = [
                    key
                    for key, expected in own.items()
                    if kinds[key] not in {"none", expected} or (kinds[key] == "string" and client.pttl(key) == -1)
                ]
                return [key for key in suspects if _rename(client, key, own[key], prefix)]
        except channel.ResponseError as error:
            log.warning("keys at the broker were not checked: %s. %s", loggable(error), remedy(error))
            return []

    def _find_taken(self, channel: Any, wrong: Mapping[str, str]) -> None:
        queues = dict(_queues(channel, self._app))
        taken = frozenset(queues[key] for key in wrong)
        for queue in sorted(self.taken - taken):
            log.warning(
                "queue %s: no other program uses its keys at the broker any more; the queue is consumed again", queue
            )
        self.taken = taken
        for key, kind in wrong.items():
            if not self._tallies[key].add():
                continue
            self._tallies[key].take()
            log.error(
                "the key %r at the broker holds a %s where perdure's queue %s needs a list: another program uses this "
                "key. The queue is not consumed. Give perdure a Redis database of its own, or remove the key",
                key, kind, queues[key],
            )  # fmt: skip


def _types(client: Any, keys: list[str]) -> dict[str, str]:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.type(key)
    return {key: kind.decode() for key, kind in zip(keys, pipeline.execute(), strict=True)}


def _rename(client: Any, key: str, expected: str, prefix: str) -> bool:
    renamed = f"{prefix}{key.removeprefix(prefix)}.broken-{time.time_ns()}"
    found = client.eval(_RENAME, 2, key, renamed, expected)
    if found is None:  # another worker has renamed it
        return False
    log.error(
        "the key %r at the broker holds a %s where kombu expects a %s: some program wrote to it; renamed to %r",
        key, found.decode(), expected, renamed,
    )  # fmt: skip
    return True


def _own(channel: Any, app: Celery) -> Iterable[tuple[str, str]]:
    """Each key that belongs to perdure alone, with the type that kombu expects."""
    whole = channel.global_keyprefix
    yield whole + channel.unacked_key, "hash"
    yield whole + channel.unacked_index_key, "zset"
    yield whole + channel.unacked_mutex_key, "string"
    yield whole + channel.keyprefix_binding_deadlines, "zset"
    control, events = app.conf.control_exchange, app.conf.event_exchange
    exchanges = [queue.exchange.name for queue in app.amqp.queues.values()]
    for exchange in (*exchanges, f"{control}.pidbox", f"reply.{control}.pidbox", events):
        yield whole + channel.keyprefix_queue % exchange, "set"
        yield whole + channel.keyprefix_binding_permanent % exchange, "set"


def _queues(channel: Any, app: Celery) -> Iterable[tuple[str, str]]:
    for queue in app.amqp.queues:
        for level in channel.priority_steps:
            yield channel.global_keyprefix + channel._q_for_pri(queue, level), queue  # noqa: SLF001 (as above)
