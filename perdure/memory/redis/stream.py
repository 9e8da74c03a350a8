"""Layer 0 of memory: events of a user's typing, channel switches and presence, but not the user's messages.

Each user has one Redis Stream of about `MAX_ENTRIES` entries; Redis drops the oldest ones. Losing a stream does no
harm. The caller supplies the time of each event. When a session ends, the events up to that moment are deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from perdure.access.tenants import UserKey
from perdure.errors import loggable
from perdure.memory.redis.cache import Cache

log = logging.getLogger(__name__)

MAX_ENTRIES = 1_000
"""Approximate maximum of entries per user. Redis drops only whole nodes of a stream, so a few more entries may stay."""

_TTL_MS = 86_400_000
"""A stream expires this many milliseconds (one day) after its last entry."""

NOTED_EVERY_S = 10
"""In this many seconds, `note` writes at most one event per kind, channel and author."""

# The script of `note`. KEYS[1]: the stream. ARGV: kind, channel, time (milliseconds), author, the shortest time between
# two events of this kind, channel and author (milliseconds), MAX_ENTRIES and _TTL_MS. The script examines only the
# newest 20 entries.
_NOTE = """
for _, entry in ipairs(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 20)) do
    local field = {}
    for i = 1, #entry[2], 2 do field[entry[2][i]] = entry[2][i + 1] end
    local at = tonumber(field.at)
    if field.kind == ARGV[1] and field.channel == ARGV[2] and (field.by or 'user') == ARGV[4]
       and at and tonumber(ARGV[3]) - at < tonumber(ARGV[5]) then return 0 end
end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[6], '*',
           'kind', ARGV[1], 'channel', ARGV[2], 'at', ARGV[3], 'by', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[7])
return 1
"""

# The script of `trim_session`. KEYS[1]: the stream. ARGV: the time (milliseconds) up to which entries are deleted, and
# the channel of these entries ('' for all channels). The script also deletes entries without a time. It deletes the
# stream if no entry is left.
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
    """What an event records: typing, a change of channel, or presence."""

    TYPING = "typing"
    CHANNEL_SWITCH = "channel_switch"
    PRESENCE = "presence"


class StreamAuthor(StrEnum):
    """Who caused an event: the user, or the agent. The agent's only events are its typing indicators."""

    USER = "user"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One entry of a stream; `at` has millisecond precision."""

    kind: StreamEventKind
    channel: str
    at: datetime
    by: StreamAuthor = StreamAuthor.USER


class Stream:
    """The streams of all users."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def append(self, user_id: UserKey, event: StreamEvent) -> bool:
        """Append `event` to the user's stream in one round trip. If Redis fails, logs the failure and returns False."""
        entry = {"kind": event.kind, "channel": event.channel, "at": _milliseconds(event.at), "by": event.by}

        def work(client: Any) -> bool:
            pipeline = client.pipeline()
            pipeline.xadd(self._key(user_id), entry, maxlen=MAX_ENTRIES, approximate=True)
            pipeline.pexpire(self._key(user_id), _TTL_MS)
            pipeline.execute()
            return True

        return bool(self._cache.attempt(f"a {event.kind} event on a user's stream", work))

    def note(self, user_id: UserKey, event: StreamEvent) -> bool:
        """Append `event`, unless the stream has a recent event of the same kind, channel and author.

        An event is recent for `NOTED_EVERY_S` seconds. This limit keeps repeated reports of typing and presence from
        filling the stream. Returns False if nothing was appended.
        """
        given = [event.kind, event.channel, _milliseconds(event.at), event.by, NOTED_EVERY_S * 1000]
        noted = self._cache.attempt(
            f"a {event.kind} event on a user's stream",
            lambda client: client.eval(_NOTE, 1, self._key(user_id), *given, MAX_ENTRIES, _TTL_MS),
        )
        return bool(noted)

    def recent(self, user_id: UserKey, n: int) -> list[StreamEvent]:
        """The user's last `n` events, oldest first; empty while Redis is unavailable."""
        newest = self._cache.attempt(
            "reading a user's stream",
            lambda client: client.xrevrange(self._key(user_id), count=n),
        )
        found = (_event(identifier, fields) for identifier, fields in reversed(newest or []))
        return [event for event in found if event is not None]

    def trim_session(self, user_id: UserKey, channel: str | None, until: datetime) -> int:
        """Delete the user's events up to `until`; returns the number of deleted events.

        If `channel` is given, deletes only the events of that channel; `None` means all channels.
        """
        bounds = [_milliseconds(until), channel or ""]
        removed: int = self._cache.require(lambda client: client.eval(_TRIM, 1, self._key(user_id), *bounds))
        return removed

    def _key(self, user_id: UserKey) -> str:
        return f"{self._cache.prefix}stream:{user_id}"


def _milliseconds(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def _event(identifier: bytes, fields: Mapping[bytes, bytes]) -> StreamEvent | None:
    try:
        return StreamEvent(
            StreamEventKind(fields[b"kind"].decode()),
            fields[b"channel"].decode(),
            datetime.fromtimestamp(int(fields[b"at"]) / 1000, UTC),
            StreamAuthor(fields.get(b"by", b"user").decode()),
        )
    except (KeyError, ValueError, OverflowError, OSError) as error:
        reason = loggable(error)
        log.warning("entry %s of a user's stream is invalid and skipped: %s", identifier.decode(), reason)
        return None
