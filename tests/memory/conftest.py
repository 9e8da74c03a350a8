"""Fixtures for tests of memory: memory in Redis, a Redis that a test may stop, and the harness of the turns' tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis as redis_py

from perdure.clock import MovedClock
from perdure.ids import new_id
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.working import RememberedMessage, RememberedTurn
from perdure.models.protocol import Role
from perdure.servers import redis
from perdure.servers.lifecycle import Running
from perdure.settings import MemorySettings, Settings
from perdure.turns.lease.keeper import Keeper
from tests.memory.archive import Archive
from tests.turns.conftest import harness
from tests.turns.harness import Harness

__all__ = ["harness"]

Remembered = Callable[..., RememberedTurn]


@pytest.fixture
def archive(harness: Harness, settings: Settings) -> Archive:
    """An `Archive` that has no sessions yet."""
    harness.check = lambda: None  # type: ignore[method-assign]  # the check would fail: no turn ran
    return Archive(harness, Keeper(harness.database, harness.clock, settings.turn))


@pytest.fixture
def redis_memory(redis_url: str, clock: MovedClock) -> Iterator[RedisMemory]:
    """A `RedisMemory` in the suite's Redis."""
    made = RedisMemory.at(redis_url, MemorySettings(), clock)
    yield made
    made.close()


@pytest.fixture
def unreachable(tmp_path: Path, clock: MovedClock) -> Iterator[RedisMemory]:
    """A `RedisMemory` whose Redis does not exist."""
    made = RedisMemory.at(f"redis+socket://{tmp_path}/no-redis.sock", MemorySettings(), clock)
    yield made
    made.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    """A client of the suite's Redis."""
    with redis_py.Redis.from_url(redis.client_url(redis_url), decode_responses=True) as made:
        yield made


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Running]:
    """A Redis of the test's own, which the test can stop."""
    running = redis.start(tmp_path / "redis")
    yield running
    if redis.find(tmp_path / "redis") is not None:
        running.stop()


@pytest.fixture
def remembered(clock: MovedClock) -> Remembered:
    """A function that makes turns as working memory stores them. By default a turn has a question and its answer."""
    numbers = itertools.count(1)

    def make(token: int = 1, *, turn_id: UUID | None = None, text: str | None = None, **other: Any) -> RememberedTurn:
        number = next(numbers)
        question = text or f"question {number}"
        given = {
            "turn_id": turn_id or new_id(clock),
            "seq": number,
            "token": token,
            "agent": "assistant",
            "channel": "cli",
            "status": "done",
            "settled_at": clock.now(),
            "messages": (
                line(Role.USER, question, message_id=f"message {number}", created_at=clock.now()),
                line(
                    Role.ASSISTANT,
                    f"answer to {question}",
                    model="scripted",
                    usage={"input_tokens": 9, "output_tokens": 3},
                ),
            ),
        }
        return RememberedTurn.model_validate(given | other)

    return make


def line(role: Role, content: str = "", **other: Any) -> RememberedMessage:
    """One message of a remembered turn."""
    return RememberedMessage.model_validate({"role": role, "content": content, "token_count": 5, **other})
