"""Drops malformed items of queues, counts them, and logs the counts without the items' text.

Any program with the broker's URL can publish any bytes to a queue. kombu and Celery parse an item in the worker's event
loop, where an unexpected error ends the worker. `screen` drops items that are not JSON before kombu parses them.
`fault` detects JSON that is not a kombu message. `UNREADABLE` lists the errors that Celery raises for a message that is
not a task.

`perdure.workers.consumer.consumer` calls this module.
"""

from __future__ import annotations

import logging
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

from perdure.workers.consumer.tally import Tally

log = logging.getLogger(__name__)

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The errors that Celery raises if a message's headers or body are not those of a task. Excludes connection errors."""

_MOST_KINDS = 1_000

Drop = Callable[[str, str], None]
"""A function that records a dropped item, given the item's queue and the reason."""


class Dropped:
    """Logs dropped items: the first of each kind (queue and reason) at once, later items as a count.

    Call `report` every `tally.REPORT_S` seconds, and when the consumer closes.
    """

    def __init__(self) -> None:
        self._tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)

    def note(self, queue: str, reason: str) -> None:
        """Record a dropped item of `queue`. `reason` must not contain text of the item."""
        if len(self._tallies) >= _MOST_KINDS:
            self.report()
            self._tallies.clear()
        tally = self._tallies[queue, reason]
        if tally.add():
            self._write(queue, reason, tally.take())

    def report(self) -> None:
        for (queue, reason), tally in self._tallies.items():
            if tally.count:
                self._write(queue, reason, tally.take())

    @staticmethod
    def _write(queue: str, reason: str, count: int) -> None:
        log.error("queue %s: dropped %d items that no worker can read: %s", queue, count, reason)


def screen(transport: Any, channel: Any, drop: Drop) -> None:
    """Drop items that are not JSON: from queues on `channel`, and from pub/sub on channels created after this call.

    `transport` is the Redis transport of `channel`. After this call, Celery creates channels of `transport` for
    remote-control commands and events.
    """
    create = transport.create_channel

    def create_screened(connection: Any) -> Any:
        created = create(connection)
        _screen_published(created, drop)
        return created

    transport.create_channel = create_screened
    screen_queues(channel, drop)


def screen_queues(channel: Any, drop: Drop, only: Collection[str] | None = None) -> None:
    """Drop items that are not JSON from the queues on a Redis channel; by default from all queues."""
    client = channel.client
    convert = client.response_callbacks.get("BRPOP")

    def only_json(reply: Any, **options: Any) -> Any:
        popped = convert(reply, **options) if convert is not None else reply
        if not popped:
            return popped
        key, item = popped
        queue = bytes_to_str(key).removeprefix(channel.global_keyprefix).rsplit(channel.sep, 1)[0]
        if (only is None or queue in only) and (wrong := _not_json(item)) is not None:
            drop(queue, wrong)
            return None
        return popped

    client.set_response_callback("BRPOP", only_json)


def _screen_published(channel: Any, drop: Drop) -> None:
    """Drop pub/sub items that are not JSON. Celery sends remote-control commands and events by pub/sub.

    For such an item, kombu would raise an unexpected error, or log the item in full and raise `Empty`. After `Empty`,
    kombu leaves the next items unread until a further item arrives. So this replaces the item's data by `None`, which
    makes kombu skip the item.
    """
    handle = channel._handle_message  # noqa: SLF001 (kombu has no public way)

    def only_json(client: Any, response: Any) -> Any:
        payload = handle(client, response)
        if not (bytes_to_str(payload["type"]).endswith("message") and payload["data"]):
            return payload
        if (wrong := _not_json(payload["data"])) is not None:
            topic = bytes_to_str(payload["channel"]).partition(".")[2]
            drop(topic.partition("/")[0], wrong)  # only the exchange's name: a publisher chooses the text after it
            payload["data"] = None
        return payload

    channel._handle_message = only_json  # noqa: SLF001 (as above)


def _not_json(item: Any) -> str | None:
    try:
        loads(bytes_to_str(item))
    except Exception as error:  # noqa: BLE001 (kombu's type decoders may raise any error)
        return f"not JSON ({type(error).__name__})"
    return None


def fault(item: Any, channel: Any) -> str | None:
    """The reason why `channel` cannot deliver a parsed item; `None` if it can."""
    if not isinstance(item, dict):
        return f"not an envelope ({type(item).__name__})"
    try:
        message = channel.Message(item, channel=channel)
    except Exception as error:  # noqa: BLE001 (kombu checks nothing, so any member may raise any error)
        return f"not an envelope ({reason(error)})"
    if not isinstance(message.delivery_tag, str | int):
        return "its delivery tag is neither text nor a number"
    if not isinstance(message.headers, dict):
        return "its headers are not an object"
    if not isinstance(message.delivery_info, dict) or not isinstance(message.delivery_info.get("routing_key"), str):
        return "its delivery info has no routing key"
    return None


def reason(error: BaseException) -> str:
    """The type, file and line of an error. Its message is omitted, since it may quote the item."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    return f"{type(error).__name__} in {Path(frames[-1].filename).name}:{frames[-1].lineno}"
