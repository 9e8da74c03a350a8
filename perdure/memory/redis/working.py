"""Layer 1 of memory: working memory, a copy of a session's last turns in Redis.

A turn is added after its commit in PostgreSQL, with the fencing token of that commit. If PostgreSQL loses the commit in
a failover, `flush` writes the turn back. The copy expires `PERDURE_MEMORY__WORKING_TTL_S` seconds after the last turn.
Losing the copy does no harm. Each session has one Redis list, with one entry per turn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import redis
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perdure.errors import loggable
from perdure.memory.redis.cache import Cache
from perdure.models.protocol import Role
from perdure.text.untrusted import first_line, load_object

log = logging.getLogger(__name__)

# One script costs the client two thirds of the CPU time of a transaction with the same commands. The notice is
# published even if another program's key is in the way.
_REMEMBER = """
local added = redis.pcall('RPUSH', KEYS[1], ARGV[1])
if type(added) == 'number' then
    redis.call('LTRIM', KEYS[1], '-' .. ARGV[2], -1)
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
if ARGV[4] then
    redis.call('PUBLISH', ARGV[4], ARGV[5])
end
return added
"""

_Int4 = Annotated[int, Field(ge=0, lt=2**31)]
_Int8 = Annotated[int, Field(ge=0, lt=2**63)]
_Name = Annotated[str, Field(min_length=1)]


class _Record(BaseModel):
    """A record that keeps unknown members, because a newer release may have added them."""

    model_config = ConfigDict(frozen=True, extra="allow")


class RememberedCall(_Record):
    """A tool call; `arguments` is the model's text, unchanged."""

    id: str
    name: str
    arguments: str


class RememberedUsage(_Record):
    """Tokens of one model call."""

    input_tokens: _Int4 = 0
    output_tokens: _Int4 = 0
    cached_tokens: _Int4 | None = None
    reasoning_tokens: _Int4 | None = None


class RememberedMessage(_Record):
    """One message of a turn; the fields are columns of the table `messages`. `position` counts from 1."""

    position: _Int4 = 1
    role: Role
    content: str
    tool_calls: tuple[RememberedCall, ...] | None = None
    tool_call_id: str | None = None
    message_id: str | None = None
    token_count: _Int4
    model: str | None = None
    fallback: bool | None = None
    usage: RememberedUsage | None = None
    stop_reason: str | None = None
    opaque: dict[str, Any] | None = None
    parts: tuple[dict[str, Any], ...] | None = None
    created_at: datetime | None = None


class RememberedTurn(_Record):
    """A settled turn with its messages in order. `token` is the fencing token of the commit that settled the turn.

    `remember` is false if nothing of the turn may be remembered in later sessions.
    """

    turn_id: UUID
    seq: _Int8
    token: _Int8
    agent: _Name
    channel: _Name
    status: Literal["done", "failed", "cancelled"]
    settled_at: datetime
    error_code: str | None = None
    error_message: str | None = None
    remember: bool = True
    messages: tuple[RememberedMessage, ...]


class WorkingMemory:
    """The working memories of all sessions.

    Each keeps the last `turns` turns of its session, and expires `ttl_s` seconds after the last turn.
    """

    def __init__(self, cache: Cache, turns: int, ttl_s: float) -> None:
        self._cache = cache
        self._turns = turns
        self._ttl_ms = max(1, int(ttl_s * 1000))

    def remember_turn(self, session_id: UUID, turn: RememberedTurn, notice: tuple[str, str] | None = None) -> bool:
        """Add a committed turn in one round trip. If Redis fails, logs the failure and returns False.

        `notice` is an optional pair: a Redis channel, and the message to publish on it.
        """
        entry = turn.model_dump_json(exclude_none=True)

        def work(client: Any) -> bool:
            client.eval(_REMEMBER, 1, self._key(session_id), entry, self._turns, self._ttl_ms, *(notice or ()))
            return True

        return bool(self._cache.attempt(f"remembering turn {turn.turn_id} of session {session_id}", work))

    def read(self, session_id: UUID) -> tuple[RememberedTurn, ...]:
        """The session's turns in working memory, in order.

        Turns that were settled while Redis was unavailable are missing.
        """
        return self._cache.require(lambda client: _read(client, self._key(session_id), session_id))

    def forget(self, session_id: UUID) -> None:
        self._cache.require(lambda client: client.unlink(self._key(session_id)))

    def _key(self, session_id: UUID) -> str:
        return f"{self._cache.prefix}working:{session_id}"


def _read(client: Any, key: str, session_id: UUID) -> tuple[RememberedTurn, ...]:
    try:
        entries: Sequence[bytes] = client.lrange(key, 0, -1)
    except redis.ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        log.error("the key %s is not a list of turns and is ignored: %s", key, loggable(error))  # noqa: TRY400 (another program's key)
        return ()
    turns: dict[UUID, RememberedTurn] = {}
    for position, entry in enumerate(entries):
        turn = _parse(session_id, position, entry)
        if turn is not None and (turn.turn_id not in turns or turns[turn.turn_id].token <= turn.token):
            turns[turn.turn_id] = turn
    return tuple(sorted(turns.values(), key=lambda turn: (turn.seq, turn.token)))


def _parse(session_id: UUID, position: int, entry: bytes) -> RememberedTurn | None:
    """Parse a list entry as a turn. If the entry is invalid, logs the reason and returns `None`.

    The log does not contain the entry's content.
    """
    try:
        load_object(entry.decode())  # rejects text that PostgreSQL cannot store
        return RememberedTurn.model_validate_json(entry)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        reason = f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
    except ValueError as error:
        reason = str(error)
    log.error(
        "entry %d of the working memory of session %s is invalid and skipped: %s",
        position,
        session_id,
        first_line(reason, 200),
    )
    return None
