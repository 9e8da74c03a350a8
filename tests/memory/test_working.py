"""Working memory keeps a session's last turns in Redis for an hour. A failure of Redis does not fail a turn."""

from __future__ import annotations

import json
import logging
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from perdure.clock import MovedClock
from perdure.errors import Unavailable
from perdure.memory.redis.memory import RedisMemory
from perdure.models.protocol import Role
from perdure.settings import MemorySettings
from tests.memory.conftest import Remembered, line

SESSION = uuid4()
KEY = f"perdure:working:{SESSION}"


def test_turns_are_read_as_they_were_remembered(redis_memory: RedisMemory, remembered: Remembered) -> None:
    """Turns are read back unchanged, including tool calls and errors."""
    asks = line(Role.ASSISTANT, tool_calls=[{"id": "call_1", "name": "read", "arguments": "{not json"}])
    tools = remembered(
        2,
        messages=(
            line(Role.USER, "Où ? 📄", message_id="m"),
            asks,
            line(Role.TOOL, "42", tool_call_id="call_1"),
            line(Role.ASSISTANT, "42"),
        ),
    )
    failed = remembered(3, status="failed", error_code="TIMEOUT", error_message="too late")
    for turn in (tools, failed):
        assert redis_memory.working.remember_turn(SESSION, turn)
    assert redis_memory.working.read(SESSION) == (tools, failed)
    assert redis_memory.working.read(uuid4()) == ()


def test_the_last_turns_are_kept(redis_url: str, clock: MovedClock, client: Any, remembered: Remembered) -> None:
    """Only the last `PERDURE_MEMORY__WORKING_TURNS` turns are kept."""
    assert MemorySettings().working_turns == 20
    redis_memory = RedisMemory.at(redis_url, MemorySettings(working_turns=3), clock)
    turns = [remembered() for _ in range(5)]
    for turn in turns:
        redis_memory.working.remember_turn(SESSION, turn)
    assert redis_memory.working.read(SESSION) == tuple(turns[2:])
    assert client.llen(KEY) == 3
    redis_memory.close()


def test_turns_expire_after_the_last_one(redis_memory: RedisMemory, client: Any, remembered: Remembered) -> None:
    """Working memory expires `PERDURE_MEMORY__WORKING_TTL_S` seconds after the last turn."""
    redis_memory.working.remember_turn(SESSION, remembered())
    assert 3_500_000 < client.pttl(KEY) <= 3_600_000
    client.pexpire(KEY, 1_000)
    redis_memory.working.remember_turn(SESSION, remembered())
    assert 3_500_000 < client.pttl(KEY) <= 3_600_000


def test_a_turn_that_was_remembered_twice_is_one(redis_memory: RedisMemory, remembered: Remembered) -> None:
    """Turns are read in the session's order.

    If a turn has several entries, the entry with the highest fencing token is used.
    """
    first, second = remembered(2), remembered(3)
    stale = first.model_copy(update={"token": 1})
    for turn in (second, first, stale, first):
        redis_memory.working.remember_turn(SESSION, turn)
    assert redis_memory.working.read(SESSION) == (first, second)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe",
        b'{"turn_id": ',
        b"[]",
        b"{}",
        b'{"v": NaN}',
        {"token": -1},
        {"status": "running"},
        {"agent": "nul\x00"},
        {"messages": [{"role": "user"}]},
    ],
    ids=str,
)
def test_a_damaged_entry_is_skipped_and_logged(
    damage: bytes | dict[str, Any],
    redis_memory: RedisMemory,
    client: Any,
    remembered: Remembered,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A damaged entry is skipped. It is logged without its content. The other entries are read."""
    whole = remembered()
    record = json.loads(whole.model_dump_json()) | {"error_message": "a secret"}
    redis_memory.working.remember_turn(SESSION, whole)
    client.rpush(KEY, json.dumps(record | damage) if isinstance(damage, dict) else damage)
    assert redis_memory.working.read(SESSION) == (whole,)
    (report,) = caplog.records
    assert report.levelno == logging.ERROR
    assert str(SESSION) in report.getMessage()
    assert "secret" not in report.getMessage()


def test_a_key_that_is_not_a_list_is_logged_and_removed(
    redis_memory: RedisMemory, client: Any, remembered: Remembered, caplog: pytest.LogCaptureFixture
) -> None:
    """If the session's key is not a Redis list, an error is logged and no turns are read. `forget` deletes the key.

    The notice is published nevertheless.
    """
    client.set(KEY, "no list")
    with client.pubsub(ignore_subscribe_messages=True) as listening:
        listening.subscribe("news")
        listening.get_message(timeout=5)
        assert not redis_memory.working.remember_turn(SESSION, remembered(), ("news", "settled"))
        assert listening.get_message(timeout=5)["data"] == "settled"
    assert redis_memory.working.read(SESSION) == ()
    assert "not a list" in caplog.text
    redis_memory.working.forget(SESSION)
    assert client.keys() == []


def test_a_flushed_redis_is_an_empty_one(redis_memory: RedisMemory, client: Any, remembered: Remembered) -> None:
    """After `FLUSHALL` in Redis, working memory is empty and can be used again."""
    redis_memory.working.remember_turn(SESSION, remembered())
    client.flushall()
    assert redis_memory.working.read(SESSION) == ()
    redis_memory.working.forget(SESSION)
    again = remembered()
    redis_memory.working.remember_turn(SESSION, again)
    assert redis_memory.working.read(SESSION) == (again,)


def test_without_redis_turns_continue_and_flushes_raise(
    unreachable: RedisMemory, remembered: Remembered, caplog: pytest.LogCaptureFixture, clock: MovedClock
) -> None:
    """If Redis is unavailable, `remember_turn` returns False. `read` and `forget` raise `Unavailable`."""
    assert not unreachable.working.remember_turn(SESSION, remembered())
    assert len(caplog.records) == 1
    with pytest.raises(Unavailable, match="PERDURE_REDIS_URL"):
        unreachable.working.read(SESSION)
    with pytest.raises(Unavailable):
        unreachable.working.forget(SESSION)
    clock.advance(timedelta(seconds=6))
    assert not unreachable.working.remember_turn(SESSION, remembered())
    assert len(caplog.records) == 2
