"""Typing and presence events, which channels append to a user's stream (memory layer 0).

Losing an event does no harm. An event is dropped if the user has no row in `users` or the process has no Redis.
"""

from __future__ import annotations

import logging

from perdure.channels import queries
from perdure.errors import Unavailable
from perdure.memory.redis.stream import StreamAuthor, StreamEvent, StreamEventKind
from perdure.runtime import Runtime

log = logging.getLogger(__name__)

TYPING, PRESENCE = StreamEventKind.TYPING, StreamEventKind.PRESENCE
AGENT = StreamAuthor.AGENT


def note_activity(
    runtime: Runtime, user: str, channel: str, kind: StreamEventKind, by: StreamAuthor = StreamAuthor.USER
) -> bool:
    """Append an event to the stream of the user with the key `user`; returns whether it was appended.

    At most one event per kind, channel and author is appended every `stream.NOTED_EVERY_S` seconds. If the database is
    unavailable, the function logs this and returns `False`.
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
