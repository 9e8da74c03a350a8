"""Snapshots in Redis: one hash for each session. A script compares the versions and writes the snapshot atomically.

Snapshots are as durable as Redis's other data: with `appendfsync everysec`, a power failure loses the last second of
writes. The engine detects an outdated snapshot, and rebuilds it from PostgreSQL. A request to Redis times out after a
second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import redis

from perdure.errors import InvalidRequest
from perdure.redis import connect, remedy, where
from perdure.settings import REDIS_PREFIX
from perdure.snapshots.codec import dump
from perdure.snapshots.snapshot import AgentSnapshot
from perdure.snapshots.store import (
    SnapshotUnavailable,
    StaleSnapshot,
    Stored,
    Version,
    parse_stored,
    report_set_aside,
    version_of,
)
from perdure.text.untrusted import first_line

_REMEDY = "Check that server, or set PERDURE_SNAPSHOTS to another store."

# Converts a field to a number. Must accept exactly the fields that `_stored` accepts.
_NUMBER = """
local function number(field) return field and string.match(field, '^%d+$') and tonumber(field) end
"""

# In all scripts, KEYS[1] is the key of the snapshot, and KEYS[2] is the key of the snapshot that was set aside.

# Saves a snapshot, unless a newer version is stored. ARGV: token, tick, snapshot. Returns the outcome, and the stored
# version if the outcome is `stale`.
_SAVE = f"""
{_NUMBER}local kind = redis.call('TYPE', KEYS[1]).ok
local outcome = 'saved'
if kind ~= 'none' then
    local found = kind == 'hash' and redis.call('HMGET', KEYS[1], 'token', 'tick') or {{}}
    local token, tick = number(found[1]), number(found[2])
    if not (token and tick) then
        redis.call('RENAME', KEYS[1], KEYS[2])
        outcome = 'saved, the other set aside'
    elseif token > tonumber(ARGV[1]) or (token == tonumber(ARGV[1]) and tick > tonumber(ARGV[2])) then
        return {{'stale', found[1], found[2]}}
    end
end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'tick', ARGV[2], 'snapshot', ARGV[3])
return {{outcome}}
"""

# Sets a damaged snapshot aside, unless it has changed since `_read` read it. ARGV: the token, tick and snapshot that
# `_read` returned. Returns 1 if the script set the snapshot aside, otherwise 0.
_SET_DAMAGED_ASIDE = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return 0 end
if kind == 'hash' then
    local found = redis.call('HMGET', KEYS[1], 'token', 'tick', 'snapshot')
    for i = 1, 3 do
        if (found[i] or '') ~= ARGV[i] then return 0 end
    end
end
redis.call('RENAME', KEYS[1], KEYS[2])
return 1
"""

# Sets the snapshot aside, unless it is newer than the given version. ARGV: token, tick. Returns 1 if the script set the
# snapshot aside, otherwise 0.
_SET_ASIDE = f"""
{_NUMBER}if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then return 0 end
local found = redis.call('HMGET', KEYS[1], 'token', 'tick')
local token, tick = number(found[1]), number(found[2])
if not (token and tick) then return 0 end
if token > tonumber(ARGV[1]) or (token == tonumber(ARGV[1]) and tick > tonumber(ARGV[2])) then return 0 end
redis.call('RENAME', KEYS[1], KEYS[2])
return 1
"""

_Fields = tuple[bytes, bytes, bytes]


class RedisSnapshots:
    """The snapshots in the Redis at `url` (kombu's or redis-py's syntax), under keys that begin with `prefix`."""

    def __init__(self, url: str, prefix: str = REDIS_PREFIX) -> None:
        self._prefix = prefix
        self.name = f"redis ({where(url)})"
        self._client = connect(url)
        self._save = self._client.register_script(_SAVE)
        self._set_damaged_aside = self._client.register_script(_SET_DAMAGED_ASIDE)
        self._set_aside = self._client.register_script(_SET_ASIDE)

    def save(self, snapshot: AgentSnapshot, token: int) -> None:
        text = dump(snapshot)
        offered = version_of(snapshot, token)
        keys = self._keys(snapshot.agent_id)
        with self._mapped_errors():
            outcome, *stored = self._save(keys, [offered.token, offered.tick, text])
        if outcome == b"stale":
            raise StaleSnapshot(snapshot.agent_id, offered, Version(*map(int, stored)))
        if outcome != b"saved":
            report_set_aside(self.name, snapshot.agent_id, f"the key {keys[1]}", "its version cannot be read")

    def load(self, agent_id: UUID) -> Stored | None:
        keys = self._keys(agent_id)
        with self._mapped_errors():
            while (fields := self._read(keys[0])) is not None:
                try:
                    return _stored(fields, agent_id)
                except InvalidRequest as error:
                    if self._set_damaged_aside(keys, fields):
                        report_set_aside(self.name, agent_id, f"the key {keys[1]}", error.message)
        return None

    def set_aside(self, agent_id: UUID, upto: Version, reason: str) -> None:
        """See `SnapshotStore.set_aside`; renames the key."""
        keys = self._keys(agent_id)
        with self._mapped_errors():
            if self._set_aside(keys, [upto.token, upto.tick]):
                report_set_aside(self.name, agent_id, f"the key {keys[1]}", reason)

    def delete(self, agent_id: UUID) -> None:
        with self._mapped_errors():
            self._client.unlink(*self._keys(agent_id))

    def close(self) -> None:
        self._client.close()

    def _keys(self, agent_id: UUID) -> tuple[str, str]:
        """The key of the snapshot, and the key of the snapshot set aside.

        The braces in the keys place both keys on the same node of a Redis Cluster.
        """
        key = f"{self._prefix}snapshot:{{{agent_id}}}"
        return key, f"{key}:set-aside"

    def _read(self, key: str) -> _Fields | None:
        """The token, tick and snapshot of the hash at `key`; `None` if there is no such key.

        A missing field is empty. If the key is not a hash, all fields are empty.
        """
        try:
            found: Any = self._client.hmget(key, ["token", "tick", "snapshot"])
        except redis.ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            return (b"", b"", b"")
        token, tick, snapshot = (field or b"" for field in found)
        return (token, tick, snapshot) if any(field is not None for field in found) else None

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            raise SnapshotUnavailable(self.name, first_line(str(error)), remedy(error, _REMEDY)) from error


def _stored(fields: _Fields, agent_id: UUID) -> Stored:
    token, tick, snapshot = fields
    if not (token.isdigit() and tick.isdigit()):
        raise InvalidRequest("The snapshot cannot be read: its version is not a pair of numbers.")
    return parse_stored(snapshot, agent_id, Version(int(token), int(tick)))
