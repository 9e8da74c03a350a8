"""Layer 0: what happens around a conversation: typing, a switch of the channel, presence.

One Redis Stream a user, of about `MAX_ENTRIES` entries, the oldest dropped first. Nothing
depends on it. Times are the caller's, never Redis's, and what a session saw goes when it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from perdure.errors import loggable
from perdure.memory.redis.cache import Cache

log = logging.getLogger(__name__)

MAX_ENTRIES = 1_000
"""Entries of a user that are kept; Redis drops the oldest by whole nodes, so a few more may stay."""

_TTL_MS = 86_400_000
"""A stream that nothing is added to for a day goes by itself: its user may begin no further session."""

# KEYS[1]: the stream. ARGV: milliseconds up to which entries go, and the channel that they are of
# ('' for all). Entries without a time go as well, and a stream that is then empty goes whole.
_TRIM = """
if redis.call('TYPE', KEYS[1]).ok ~= 'stream' then return redis.call('UNLINK', KEYS[1]) end
local gone = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
    local field = {}
    for i = 1, #entry[2], 2 do field[entry[2][i]] = entry[2][i + 1] end
    local at = tonumber(field.at)
    if not at or (at <= tonumber(ARGV[1]) and (ARGV[2] == '' or field.channel == ARGV[2])) then
        table.insert(gone, entry[1])
    end
end
for _, id in ipairs(gone) do redis.call('XDEL', KEYS[1], id) end
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('UNLINK', KEYS[1]) end
return #gone
"""


class StreamEventKind(StrEnum):
    """What happened."""

    TYPING = "typing"
    CHANNEL_SWITCH = "channel_switch"
    PRESENCE = "presence"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One entry: `kind` happened on `channel` at `at`, to the millisecond."""

    kind: StreamEventKind
    channel: str
    at: datetime


class Stream:
    """The streams of all users."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def append(self, user_id: str, event: StreamEvent) -> bool:
        """Add to the user's stream, in one round trip; False if Redis is away, which is reported."""
        entry = {"kind": event.kind, "channel": event.channel, "at": _milliseconds(event.at)}

        def work(client: Any) -> bool:
            pipeline = client.pipeline()
            pipeline.xadd(self._key(user_id), entry, maxlen=MAX_ENTRIES, approximate=True)
            pipeline.pexpire(self._key(user_id), _TTL_MS)
            pipeline.execute()
            return True

        return bool(self._cache.attempt(f"the {event.kind} of the user {user_id!r} on the stream", work))

    def recent(self, user_id: str, n: int) -> list[StreamEvent]:
        """The user's last `n` happenings, oldest first; none while Redis is away."""
        newest = self._cache.attempt(
            f"reading the stream of the user {user_id!r}",
            lambda client: client.xrevrange(self._key(user_id), count=n),
        )
        found = (_event(identifier, fields) for identifier, fields in reversed(newest or []))
        return [event for event in found if event is not None]

    def trim_session(self, user_id: str, channel: str | None, until: datetime) -> int:
        """Remove what happened by `until`, on `channel` only where one is given; how many entries that were.

        Raises:
            Unavailable: Redis is away.
        """
        bounds = [_milliseconds(until), channel or ""]
        removed: int = self._cache.require(lambda client: client.eval(_TRIM, 1, self._key(user_id), *bounds))
        return removed

    def _key(self, user_id: str) -> str:
        return f"{self._cache.prefix}stream:{user_id}"


def _milliseconds(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def _event(identifier: bytes, fields: Mapping[bytes, bytes]) -> StreamEvent | None:
    try:
        return StreamEvent(
            StreamEventKind(fields[b"kind"].decode()),
            fields[b"channel"].decode(),
            datetime.fromtimestamp(int(fields[b"at"]) / 1000, UTC),
        )
    except (KeyError, ValueError, OverflowError, OSError) as error:
        reason = loggable(error)
        log.warning("entry %s of a user's stream is passed over: %s", identifier.decode(), reason)
        return None
