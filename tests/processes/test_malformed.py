"""Items on a Redis queue that are not messages, and messages that a worker cannot read as tasks."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_py
from pytest_celery import CeleryTestSetup

from perdure.redis import client_url
from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.nodes import Worker

pytestmark = pytest.mark.long

TEXT = "the PIN of my card is 4711"
"""A text in the malformed items. It must not appear in a log."""


LINES = 10
"""The minimum number of log lines about `ITEMS`. The worker logs the first item of each kind of fault at once."""


class Absent:
    """Marks a member to leave out of a message."""


def encoded(body: bytes) -> str:
    """A body as kombu encodes it in an envelope."""
    return base64.b64encode(body).decode()


def envelope(**changes: Any) -> bytes:
    """A message as kombu pushes it to Redis, with `changes` applied to its members."""
    made = {
        "body": encoded(json.dumps([[], {"session_id": TEXT}, {}]).encode()),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers(),
        "properties": properties(),
    } | changes
    return json.dumps({name: value for name, value in made.items() if value is not Absent}).encode()


def properties(**changes: Any) -> dict[str, Any]:
    """A message's properties with `changes` applied."""
    made = {
        "correlation_id": TEXT,
        "delivery_mode": 2,
        "delivery_info": {"exchange": "turns", "routing_key": "turns"},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": str(uuid4()),
    } | changes
    return {name: value for name, value in made.items() if value is not Absent}


def headers(**changes: Any) -> dict[str, Any]:
    """A task's headers with `changes` applied."""
    return {"lang": "py", "task": "turns.run", "id": str(uuid4()), "retries": 0} | changes


PICKLED = encoded(pickle.dumps([[], {"session_id": TEXT}, {}]))

ITEMS: dict[str, bytes] = {
    "raw text": TEXT.encode(),
    "bytes that are no text": b"\xff\xfe" + TEXT.encode(),
    "nothing": b"",
    "a number": b"4711",
    "a string": json.dumps(TEXT).encode(),
    "a list": json.dumps([TEXT]).encode(),
    "null": b"null",
    "deeply nested": b"[" * 100_000,
    "an empty object": b"{}",
    "no properties": envelope(properties=Absent),
    "properties that are a list": envelope(properties=[TEXT]),
    "no delivery tag": envelope(properties=properties(delivery_tag=Absent)),
    "a delivery tag that is a list": envelope(properties=properties(delivery_tag=[TEXT])),
    "no delivery info": envelope(properties=properties(delivery_info=Absent)),
    "delivery info that is text": envelope(properties=properties(delivery_info=TEXT)),
    "a routing key that is a list": envelope(properties=properties(delivery_info={"routing_key": [TEXT]})),
    "a priority that is text": envelope(properties=properties(priority=TEXT)),
    "a body encoding that does not exist": envelope(properties=properties(body_encoding=TEXT)),
    "a body that is not base64": envelope(body="~"),
    "a body that is a number": envelope(body=5),
    "a body that is no JSON": envelope(body=encoded(TEXT.encode())),
    "a body that is no list": envelope(body=encoded(b"5")),
    "a body of another length": envelope(body=encoded(json.dumps([[TEXT]]).encode())),
    "arguments that are no mapping": envelope(body=encoded(json.dumps({"args": [], "kwargs": TEXT}).encode())),
    "headers that are a list": envelope(headers=[TEXT]),
    "no identifier": envelope(headers={"task": "turns.run"}),
    "an identifier that is a list": envelope(headers=headers(id=[TEXT])),
    "a time limit that is text": envelope(headers=headers(timelimit=TEXT)),
    "an ETA that is text": envelope(headers=headers(eta=TEXT)),
    "an expiry that is text": envelope(headers=headers(expires=TEXT)),
    "a task whose name is a list": envelope(headers=headers(task=[TEXT])),
    "a compression that does not exist": envelope(headers=headers(compression=TEXT)),
    "text as its content type": envelope(**{"content-type": "text/plain"}),
    "a content type that is a list": envelope(**{"content-type": [TEXT]}),
    "an unknown charset": envelope(**{"content-encoding": TEXT}),
    "pickles": envelope(
        **{"content-type": "application/x-python-serialize", "content-encoding": "binary", "body": PICKLED}
    ),
    "pickles declared as JSON": envelope(body=PICKLED),
    "YAML": envelope(**{"content-type": "application/x-yaml"}),
}


PUBLISHED: dict[str, bytes] = {
    "raw text": TEXT.encode(),
    "bytes that are no text": b"\xff\xfe" + TEXT.encode(),
    "deeply nested": b"[" * 100_000,
    "a list": json.dumps([TEXT]).encode(),
    "a body that is no JSON": envelope(body=encoded(TEXT.encode()), headers={}),
    "a deeply nested body": envelope(body=encoded(b"[" * 100_000), headers={}),
}


@pytest.fixture
def client(installation: Installation) -> Iterator[Any]:
    """A Redis client of the broker."""
    with redis_py.Redis.from_url(client_url(installation.redis.url)) as made:
        yield made


def survives_malformed_items(installation: Installation, worker: Worker, client: Any, unacked: str) -> None:
    """Send each of `ITEMS` and a message to `worker`, which must drop the item and answer the message.

    `unacked` is the Redis key of the messages that the worker has not acknowledged.
    """
    pid = worker.pid
    for number, (name, item) in enumerate(ITEMS.items()):
        client.lpush("turns", item)
        behind = installation.accept(f"hello {number}", user=f"user {number}")
        (turn,) = installation.settled(behind.turn_id)
        assert (name, turn["status"]) == (name, "done")
        assert (name, worker.container.status, worker.pid) == (name, "running", pid), worker.logs()
        wait_until(lambda: not client.exists("turns", unacked), f"{name}: the item is gone")
    assert worker.logs().count("queue turns: dropped") >= LINES


@pytest.mark.exhaustive
@pytest.mark.parametrize("worker_count", [1])
def test_a_malformed_item_is_dropped_and_the_next_message_runs(
    celery_setup: CeleryTestSetup, installation: Installation, client: Any, worker_count: int
) -> None:
    """A malformed item stops no worker, and its text is not in the worker's log."""
    (worker,) = installation.workers
    survives_malformed_items(installation, worker, client, "perdure:unacked")
    assert TEXT not in worker.logs()
    assert encoded(TEXT.encode()) not in worker.logs()
    installation.check()


def test_a_malformed_control_command_is_dropped(installation: Installation, client: Any) -> None:
    """A malformed item on the control channel stops no worker, and its text is not in the worker's log."""
    worker = installation.worker()
    worker.ready()
    pid = worker.pid
    channel = "/0.perdure:celery.pidbox"
    wait_until(lambda: client.publish(channel, b"{") == 1, "the worker listens for commands")
    for name, item in PUBLISHED.items():
        assert client.publish(channel, item) == 1, name
    wait_until(lambda: worker.logs().count("celery.pidbox: dropped") >= 4, "the dropped items are logged")
    (turn,) = installation.settled(installation.accept("hello").turn_id, within_s=10)
    assert turn["status"] == "done"
    assert (worker.pid, worker.container.status) == (pid, "running"), worker.logs()
    assert TEXT not in worker.logs()
    assert encoded(TEXT.encode()) not in worker.logs()


LINKS: dict[str, dict[str, Any]] = {
    "callbacks that are a number": {"callbacks": 5},
    "a callback that is text": {"callbacks": [TEXT]},
    "a callback without a task": {"callbacks": [{"args": []}]},
    "a callback whose arguments are text": {"callbacks": [{"task": "a", "args": TEXT}]},
    "a callback for a queue that is a list": {"callbacks": [{"task": "a", "options": {"queue": [TEXT]}}]},
    "a callback at a time that is text": {"callbacks": [{"task": "a", "options": {"countdown": TEXT}}]},
    "errbacks that are text": {"callbacks": [{"task": "a", "options": {"countdown": TEXT}}], "errbacks": TEXT},
    "an errback that is a number": {"callbacks": [{"task": "a", "options": {"eta": TEXT}}], "errbacks": [5]},
    "a chain of numbers": {"chain": [1]},
    "a chord that is text": {"chord": TEXT},
}


def test_a_submission_with_malformed_links_is_settled(installation: Installation, client: Any) -> None:
    """Celery reads linked tasks when the task has run. A message that it cannot link is not left unacknowledged."""
    worker = installation.worker()
    worker.ready()
    for place in ("embedded", "headers"):
        for number, (name, links) in enumerate(LINKS.items()):
            embedded, given = (links, {}) if place == "embedded" else ({}, links)
            words = {"user_id": f"{place} {number}", "text": "hello"}
            item = envelope(
                body=encoded(json.dumps([[], words, embedded]).encode()),
                headers=headers(task="turns.submit", **given),
                properties=properties(delivery_info={"exchange": "ingress", "routing_key": "ingress"}),
            )
            client.lpush("ingress", item)
            wait_until(lambda: not client.exists("ingress", "perdure:unacked"), f"{place}, {name}: the message is gone")
    (turn,) = installation.settled(installation.accept("hello").turn_id, within_s=10)
    assert turn["status"] == "done"
    assert TEXT not in worker.logs()


@pytest.mark.long
def test_dropped_items_of_one_kind_are_counted(installation: Installation, client: Any) -> None:
    """The log reports the first dropped item at once, and later the number of further items."""
    client.lpush("turns", *[TEXT.encode()] * 500)
    worker = installation.worker()
    worker.ready()
    wait_until(lambda: not client.exists("turns"), "the worker has consumed all items")
    worker.kill("SIGTERM")
    assert worker.container.wait() == 0
    assert "queue turns: dropped 1 items" in worker.logs()
    assert "queue turns: dropped 499 items" in worker.logs()


def test_a_message_of_another_content_type_returns_to_its_queue(installation: Installation, client: Any) -> None:
    """A worker returns a message whose content type it does not accept, because another application may own it."""
    item = envelope(**{"content-type": "application/x-protobuf", "content-encoding": "binary", "headers": {}})
    client.lpush("memory", item)
    worker = installation.worker()
    worker.ready()
    wait_until(lambda: "a message that cannot be decoded; they are returned" in worker.logs(), "the message is held")
    worker.kill("SIGTERM")
    assert worker.container.wait() == 0
    assert client.llen("memory") == 1
    assert "dropped" not in worker.logs()
