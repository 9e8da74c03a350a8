"""Malformed items on a queue: dropped and counted, logged without their text.

Any program with the broker's address can put anything on a queue. kombu and Celery parse an item in the worker's
event loop, where an error that they do not expect ends the worker; Redis has popped the item by then, so the next
item of that kind ends the next worker. `screen` drops what is no JSON before kombu parses it, `fault` finds what is
no message of kombu's, and `UNREADABLE` are the errors of Celery over a message that is no task.

Called by `perdure.workers.consumer.consumer`.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

log = logging.getLogger(__name__)

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What Celery raises over headers or a body of another shape than a task's. No error of a connection is among them."""

REPORT_S = 60.0
"""Seconds between two reports of what was dropped since the first item of its kind."""

_MOST_KINDS = 1_000

Drop = Callable[[str, str], None]
"""Notes that an item of a queue was dropped, and why."""


@dataclass(slots=True)
class _Tally:
    """How many items were dropped since the last line of the log, and until when further ones are only counted."""

    count: int = 0
    counted_until: float = 0.0


class Dropped:
    """Reports what was dropped: the first item of each kind at once, further ones as a count.

    `report` must be called every `REPORT_S` seconds, and when no more is received.
    """

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def note(self, queue: str, reason: str) -> None:
        """An item of `queue` was dropped. `reason` holds no text of the item's."""
        if len(self._tallies) >= _MOST_KINDS:
            self.report()
            self._tallies.clear()
        tally = self._tallies.setdefault((queue, reason), _Tally())
        tally.count += 1
        if time.monotonic() >= tally.counted_until:
            self._write(queue, reason, tally)

    def report(self) -> None:
        """Log how many items of each kind were dropped since its last line, if any were."""
        for (queue, reason), tally in self._tallies.items():
            if tally.count:
                self._write(queue, reason, tally)

    @staticmethod
    def _write(queue: str, reason: str, tally: _Tally) -> None:
        log.error("queue %s: dropped %d items that no worker can read: %s", queue, tally.count, reason)
        tally.count, tally.counted_until = 0, time.monotonic() + REPORT_S


def screen(transport: Any, channel: Any, drop: Drop) -> None:
    """Have `channel` of kombu's Redis `transport` receive nothing where an item is no JSON; commands' channels, too.

    Celery makes a channel for commands and one for events when it needs them.
    """
    create = transport.create_channel

    def create_screened(connection: Any) -> Any:
        created = create(connection)
        _screen_published(created, drop)
        return created

    transport.create_channel = create_screened
    _screen_queues(channel, drop)


def _screen_queues(channel: Any, drop: Drop) -> None:
    client = channel.client
    convert = client.response_callbacks.get("BRPOP")

    def only_json(reply: Any, **options: Any) -> Any:
        popped = convert(reply, **options) if convert is not None else reply
        if not popped:
            return popped
        key, item = popped
        if (wrong := _not_json(item)) is not None:
            drop(bytes_to_str(key).rsplit(channel.sep, 1)[0], wrong)
            return None
        return popped

    client.set_response_callback("BRPOP", only_json)


def _screen_published(channel: Any, drop: Drop) -> None:
    """The same for pub/sub: commands and events. kombu logs an item that is no JSON, or ends over it.

    Raising `Empty`, as kombu does, would leave the items behind it unread until the next one comes.
    """
    handle = channel._handle_message  # noqa: SLF001 (kombu has no public way)

    def only_json(client: Any, response: Any) -> Any:
        payload = handle(client, response)
        if not (bytes_to_str(payload["type"]).endswith("message") and payload["data"]):
            return payload
        if (wrong := _not_json(payload["data"])) is not None:
            topic = bytes_to_str(payload["channel"]).partition(".")[2]
            drop(topic.partition("/")[0], wrong)  # behind the exchange's name is text of the publisher's
            payload["data"] = None
        return payload

    channel._handle_message = only_json  # noqa: SLF001 (as above)


def _not_json(item: Any) -> str | None:
    try:
        loads(bytes_to_str(item))
    except Exception as error:  # noqa: BLE001 (kombu's decoders of single types raise errors of their own)
        return f"not JSON ({type(error).__name__})"
    return None


def fault(item: Any, channel: Any) -> str | None:
    """Why a parsed item is no message that `channel` can deliver; `None` if it is one."""
    if not isinstance(item, dict):
        return f"not an envelope ({type(item).__name__})"
    try:
        message = channel.Message(item, channel=channel)
    except Exception as error:  # noqa: BLE001 (kombu checks nothing: any error may come of any member)
        return f"not an envelope ({reason(error)})"
    if not isinstance(message.delivery_tag, str | int):
        return "its delivery tag is neither text nor a number"
    if not isinstance(message.headers, dict):
        return "its headers are not an object"
    if not isinstance(message.delivery_info, dict) or not isinstance(message.delivery_info.get("routing_key"), str):
        return "its delivery info has no routing key"
    return None


def reason(error: BaseException) -> str:
    """An error's type and place. Its message may quote the item."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    return f"{type(error).__name__} in {Path(frames[-1].filename).name}:{frames[-1].lineno}"
