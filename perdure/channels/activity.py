"""Typing and presence events, which channels append to a user's stream (memory layer 0).

Losing an event does no harm. `note_activity` drops an event if the table `users` has no row for the user, or if this
process uses no Redis.
"""

from __future__ import annotations

import logging

from perdure.access.tenants import UserKey
from perdure.channels import queries
from perdure.errors import Unavailable
from perdure.memory.redis.stream import StreamAuthor, StreamEvent, StreamEventKind
from perdure.runtime import Runtime

log = logging.getLogger(__name__)

TYPING, PRESENCE = StreamEventKind.TYPING, StreamEventKind.PRESENCE
AGENT = StreamAuthor.AGENT


def note_activity(
    runtime: Runtime, user: UserKey, channel: str, kind: StreamEventKind, by: StreamAuthor = StreamAuthor.USER
) -> bool:
    """Append an event to a user's stream; returns whether the event was appended. `user` is the user key.

    Appends at most one event per kind, channel and author every `stream.NOTED_EVERY_S` seconds. If the database is
    unavailable, logs the error and returns `False`.
    """
    if runtime.redis_memory is None:
        return False
    try:
        if not runtime.database.run(queries.USER_EXISTS, {"user_id": user})[0].known:
            return False
    except Unavailable as error:
        log.info("a %s event on %s was not recorded: %s", kind, channel, error.message)
        return False
    event = StreamEvent(kind, channel, runtime.clock.now(), by)
    return runtime.redis_memory.stream.note(user, event)
