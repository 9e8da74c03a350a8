"""The gateway's `BackgroundWaker` publishes wake-ups from a thread, in batches. Its messages equal `CeleryWaker`'s."""

from __future__ import annotations

import base64
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis as redis_py

from perdure.assembly import Addresses
from perdure.servers import redis
from perdure.settings import Settings
from perdure.workers.publish.background import BackgroundWaker
from perdure.workers.publish.wake import CeleryWaker

SESSION = UUID(int=7)
CALLS: list[Callable[[CeleryWaker], bool]] = [
    lambda waker: waker.session(SESSION, 8),
    lambda waker: waker.delivery(SESSION),
    lambda waker: waker.ending(SESSION),
    lambda waker: waker.consolidation(SESSION),
    lambda waker: waker.consolidation(None),
    lambda waker: waker.casebank(),
]

_PATIENCE_S = 30.0


@pytest.fixture
def broker(redis_url: str) -> Iterator[Any]:
    """A client of the broker."""
    client = redis_py.Redis.from_url(redis.client_url(redis_url))
    yield client
    client.close()


@contextmanager
def published_by(kind: type[CeleryWaker], settings: Settings, redis_url: str) -> Iterator[Any]:
    """Yield a waker of this kind. After the block, the waker publishes its pending wake-ups and is closed."""
    made = kind(settings, Addresses("postgresql://", redis_url, redis_url))
    yield made
    made.close()


def _messages(broker: Any) -> dict[str, list[dict[str, Any]]]:
    lists = [key for key in broker.scan_iter() if broker.type(key) == b"list"]
    return {key.decode(): [json.loads(text) for text in broker.lrange(key, 0, -1)] for key in sorted(lists)}


def _comparable(message: dict[str, Any]) -> Any:
    """The message without the fields that are unique to each message, such as its id."""
    headers = {name: value for name, value in message["headers"].items() if name not in {"id", "root_id", "origin"}}
    properties = {name: message["properties"][name] for name in ("priority", "delivery_info", "delivery_mode")}
    assert message["headers"]["id"] == message["headers"]["root_id"] == message["properties"]["correlation_id"]
    return headers, properties, base64.b64decode(message["body"]), message.keys()


def test_background_messages_equal_celerys(settings: Settings, redis_url: str, broker: Any) -> None:
    """The queue, priority, arguments and headers are those of `CeleryWaker`'s messages, so any worker accepts them."""
    found = []
    for kind in (CeleryWaker, BackgroundWaker):
        with published_by(kind, settings, redis_url) as waker:
            assert all(call(waker) for call in CALLS)
        found.append({key: list(map(_comparable, messages)) for key, messages in _messages(broker).items()})
        broker.flushall()

    assert sum(map(len, found[0].values())) == len(CALLS)
    assert found[0] == found[1]


def test_pending_wake_ups_are_published_together_and_once(
    settings: Settings, redis_url: str, broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred equal wake-ups become one message. The wake-ups of a hundred sessions are published in one batch."""
    batches, begun, go_on = [], threading.Event(), threading.Event()
    tried = BackgroundWaker._publish_batch

    def noting(waker: BackgroundWaker, wakes: Any) -> Exception | None:
        begun.set()
        assert go_on.wait(_PATIENCE_S)
        batches.append(len(wakes))
        return tried(waker, wakes)

    monkeypatch.setattr(BackgroundWaker, "_publish_batch", noting)
    with published_by(BackgroundWaker, settings, redis_url) as waker:
        waker.session(uuid4(), 5)
        assert begun.wait(_PATIENCE_S)
        for _ in range(100):
            waker.session(SESSION, 5)
        for number in range(99):
            waker.session(UUID(int=1_000 + number), 5)
        go_on.set()

    [messages] = _messages(broker).values()
    assert len(messages) == sum(batches) == 101
    assert batches == [1, 100]


def test_a_connection_that_was_closed_is_replaced(settings: Settings, redis_url: str, broker: Any) -> None:
    """If the broker closes the connection between two wake-ups, the second one is still published."""
    with published_by(BackgroundWaker, settings, redis_url) as waker:
        waker.session(uuid4(), 5)
        _until(lambda: sum(map(len, _messages(broker).values())) == 1)
        broker.client_kill_filter(_type="normal", skipme=True)
        waker.session(uuid4(), 5)

    assert sum(map(len, _messages(broker).values())) == 2


def test_an_unavailable_broker_delays_no_caller(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """If the broker is unavailable, `session()` still returns at once.

    The wake-ups that could not be published are logged. Further wake-ups are refused.
    """
    nowhere = "redis://127.0.0.1:1/0"
    with caplog.at_level(logging.WARNING), published_by(BackgroundWaker, settings, nowhere) as waker:
        began = time.monotonic()
        assert waker.session(uuid4(), 5)
        took_s = time.monotonic() - began
        _until(lambda: not waker.session(uuid4(), 5))

    assert took_s < 1
    assert "the sweeper will issue them again" in caplog.text


def test_an_unencodable_wake_up_does_not_stop_the_others(settings: Settings, redis_url: str, broker: Any) -> None:
    """If one wake-up of a batch cannot be encoded, the others are published one by one."""
    with published_by(BackgroundWaker, settings, redis_url) as waker:
        with waker._changed:
            waker._waiting["bad"] = ("turns.run", {"session_id": object()}, {"queue": "turns", "priority": 5})
        assert all(waker.session(uuid4(), 5) for _ in range(10))

    assert sum(map(len, _messages(broker).values())) == 10


def test_a_closed_waker_refuses_wake_ups(settings: Settings, redis_url: str) -> None:
    """A closed waker refuses wake-ups, because no thread would publish them."""
    with published_by(BackgroundWaker, settings, redis_url) as waker:
        assert waker.session(uuid4(), 5)
    assert not waker.session(uuid4(), 5)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_publishes_by_itself(settings: Settings, redis_url: str, broker: Any) -> None:
    """A forked child publishes from its own thread, because the parent's thread does not exist in the child."""
    with published_by(BackgroundWaker, settings, redis_url) as waker:
        waker.session(uuid4(), 5)
        _until(lambda: sum(map(len, _messages(broker).values())) == 1)
        if (child := os.fork()) == 0:
            waker.session(uuid4(), 5)
            waker._closing = True
            waker._thread.join(_PATIENCE_S)
            os._exit(0)
        os.waitpid(child, 0)
        assert sum(map(len, _messages(broker).values())) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_waker_alone(settings: Settings, redis_url: str) -> None:
    """A child that never published may close the waker at its exit, even if its parent's thread held the lock."""
    with published_by(BackgroundWaker, settings, redis_url) as waker:
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with waker._changed:
                held.set()
                over.wait(_PATIENCE_S)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(_PATIENCE_S)
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout handles it
            signal.alarm(5)  # ends a child that waits for the lock
            waker.close()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        over.set()
        thread.join()
        assert status == 0


def _until(true: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + _PATIENCE_S, threading.Event()
    while not true():
        assert time.monotonic() < deadline
        pause.wait(0.01)
