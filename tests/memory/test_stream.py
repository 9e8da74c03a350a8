"""A user's event stream in Redis is bounded and ordered. A failure of Redis does not fail or delay a turn."""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.stream import MAX_ENTRIES, StreamEvent, StreamEventKind
from perdure.servers import redis
from perdure.servers.lifecycle import Running
from perdure.settings import MemorySettings

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
WITHIN_S = 3.0
"""Maximum duration of a call to a paused Redis. The expected duration is 2 s; 1 s is added for a loaded machine."""


def event_at(second: int, channel: str = "cli", kind: StreamEventKind = StreamEventKind.PRESENCE) -> StreamEvent:
    """An event `second` seconds after noon."""
    return StreamEvent(kind, channel, NOON + timedelta(seconds=second))


def test_the_newest_events_are_read_in_order(redis_memory: RedisMemory) -> None:
    """The newest events are read in order, with their times."""
    events = [
        event_at(1),
        event_at(2, "web", StreamEventKind.CHANNEL_SWITCH),
        event_at(3, "web", StreamEventKind.TYPING),
    ]
    for each in events:
        assert redis_memory.stream.append(UserKey("ana"), each)
    assert redis_memory.stream.recent(UserKey("ana"), 10) == events
    assert redis_memory.stream.recent(UserKey("ana"), 2) == events[1:]
    assert redis_memory.stream.recent(UserKey("ben"), 10) == []


def test_a_stream_is_bounded(redis_memory: RedisMemory, client: Any) -> None:
    """The stream's length is bounded, however many events are appended."""
    pipeline = client.pipeline()
    for second in range(2 * MAX_ENTRIES):
        entry = {"kind": "typing", "channel": "cli", "at": int(event_at(second).at.timestamp() * 1000)}
        pipeline.xadd("perdure:stream:ana", entry)
    pipeline.execute()
    redis_memory.stream.append(UserKey("ana"), event_at(2 * MAX_ENTRIES))
    assert MAX_ENTRIES <= client.xlen("perdure:stream:ana") < MAX_ENTRIES * 1.2
    assert redis_memory.stream.recent(UserKey("ana"), 1) == [event_at(2 * MAX_ENTRIES)]


def test_an_unused_stream_expires(redis_memory: RedisMemory, client: Any) -> None:
    """A stream expires one day after its last event, in case no later session ends and trims the stream."""
    redis_memory.stream.append(UserKey("ana"), event_at(1))
    assert 0 < client.pttl("perdure:stream:ana") <= 86_400_000


def test_the_end_of_a_session_removes_its_events(redis_memory: RedisMemory, client: Any) -> None:
    """When a session ends, the user's events up to that time are deleted. Later events belong to the next session."""
    for second in (1, 2, 3):
        redis_memory.stream.append(UserKey("ana"), event_at(second))
    redis_memory.stream.append(UserKey("ben"), event_at(1))
    assert redis_memory.stream.trim_session(UserKey("ana"), None, event_at(2).at) == 2
    assert redis_memory.stream.recent(UserKey("ana"), 10) == [event_at(3)]
    assert redis_memory.stream.trim_session(UserKey("ana"), None, event_at(2).at) == 0
    assert redis_memory.stream.trim_session(UserKey("ana"), None, event_at(3).at) == 1
    assert client.keys() == ["perdure:stream:ben"]


def test_a_session_of_one_channel_leaves_the_others_alone(redis_memory: RedisMemory) -> None:
    """If each channel has its own session, the end of a session removes only the events of that session's channel."""
    for second, channel in enumerate(("cli", "web", "cli")):
        redis_memory.stream.append(UserKey("ana"), event_at(second, channel))
    assert redis_memory.stream.trim_session(UserKey("ana"), "cli", event_at(9).at) == 2
    assert redis_memory.stream.recent(UserKey("ana"), 10) == [event_at(1, "web")]


def test_malformed_entries_are_skipped_and_logged(
    redis_memory: RedisMemory, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Malformed entries are skipped and logged. The end of the session deletes them."""
    client.xadd("perdure:stream:ana", {"kind": "dancing", "channel": "cli", "at": 1})
    client.xadd("perdure:stream:ana", {"kind": "typing", "channel": "cli", "at": "noon"})
    client.xadd("perdure:stream:ana", {"kind": "typing"})
    redis_memory.stream.append(UserKey("ana"), event_at(1))
    assert redis_memory.stream.recent(UserKey("ana"), 10) == [event_at(1)]
    assert len([each for each in caplog.records if "skipped" in each.getMessage()]) == 3
    redis_memory.stream.trim_session(UserKey("ana"), None, event_at(1).at)
    assert client.keys() == []


def test_a_key_that_is_not_a_stream_does_not_stop_a_sessions_end(redis_memory: RedisMemory, client: Any) -> None:
    """If the stream's key has another Redis type, the end of a session deletes the key."""
    client.set("perdure:stream:ana", "no stream")
    assert not redis_memory.stream.append(UserKey("ana"), event_at(1))
    redis_memory.stream.trim_session(UserKey("ana"), None, event_at(1).at)
    assert client.keys() == []


def test_without_redis_one_warning_is_logged(
    unreachable: RedisMemory, caplog: pytest.LogCaptureFixture, clock: MovedClock
) -> None:
    """If Redis is unavailable, `append` returns False. A warning is logged at most once every few seconds."""
    with caplog.at_level(logging.WARNING):
        assert not unreachable.stream.append(UserKey("ana"), event_at(1))
        assert unreachable.stream.recent(UserKey("ana"), 5) == []
    assert "PERDURE_REDIS_URL" in caplog.text
    assert len(caplog.records) == 1
    clock.advance(timedelta(seconds=6))
    assert not unreachable.stream.append(UserKey("ana"), event_at(1))
    assert len(caplog.records) == 2


@pytest.mark.long
def test_an_unresponsive_redis_costs_a_bounded_wait(own_redis: Running, clock: MovedClock) -> None:
    """If Redis does not respond, `append` returns within `WITHIN_S` seconds. After Redis resumes, `append` succeeds."""
    redis_memory = RedisMemory.at(own_redis.url, MemorySettings(), clock)
    assert redis_memory.stream.append(UserKey("ana"), event_at(1))
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert not redis_memory.stream.append(UserKey("ana"), event_at(2))
        assert time.monotonic() - began < WITHIN_S
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
    clock.advance(timedelta(seconds=6))
    assert redis_memory.stream.append(UserKey("ana"), event_at(3))
    assert redis_memory.stream.recent(UserKey("ana"), 1) == [event_at(3)]
    redis_memory.close()


def test_a_redis_that_was_restarted_is_used_again(own_redis: Running, tmp_path: Path, clock: MovedClock) -> None:
    """After a restart of Redis, the same `RedisMemory` can append events."""
    redis_memory = RedisMemory.at(own_redis.url, MemorySettings(), clock)
    assert redis_memory.stream.append(UserKey("ana"), event_at(1))
    assert own_redis.stop()
    with redis.start(tmp_path / "redis"):
        assert redis_memory.stream.append(UserKey("ana"), event_at(2))
    redis_memory.close()
