"""A worker keeps running if kombu cannot use the value of a broker key. Keys of other programs stay unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py
from celery import Celery

from perdure.servers.redis import client_url
from tests.processes.faults import wait_until
from tests.processes.installation import Installation

KEYS: dict[str, str] = {
    "perdure:unacked": "string",
    "perdure:unacked_index": "list",
    "perdure:unacked_mutex": "string",
    "_kombu.binding.turns": "string",
    "_kombu.binding_permanent.turns": "list",
    "_kombu.binding.perdure:celery.pidbox": "string",
    "_kombu.binding.reply.perdure:celery.pidbox": "string",
    "_kombu.binding.perdure:celeryev": "string",
    "_kombu.binding_deadlines": "string",
}
"""Keys that only perdure uses, each with a Redis type that kombu cannot use."""

FOREIGN: dict[str, str] = {"sessions": "hash", "memory": "string", "maintenance\x06\x163": "set"}
"""Keys of another program, with their types.

Each key has the name of one of perdure's queues, or the name of the list of one priority of a queue.
"""


@pytest.fixture
def client(installation: Installation) -> Iterator[Any]:
    """A client of the broker."""
    with redis_py.Redis.from_url(client_url(installation.redis.url), decode_responses=True) as made:
        yield made


def _break(client: Any, *keys: str) -> None:
    for key in keys:
        client.delete(key)
        write = {"string": client.set, "list": client.lpush, "set": client.sadd}
        if (kind := (KEYS | FOREIGN | {"turns": "string"})[key]) == "hash":
            client.hset(key, "x", "x")
        else:
            write[kind](key, "x")


def _aside(client: Any) -> dict[str, str]:
    """The type of each key that workers renamed. A key is listed by its former name, without the prefix `perdure:`."""
    found = client.keys("*.broken-*")
    return {key.removeprefix("perdure:").rpartition(".broken-")[0]: client.type(key) for key in found}


@pytest.mark.long
def test_a_worker_starts_over_broken_keys(installation: Installation, client: Any) -> None:
    """A starting worker renames each broken key and logs it once, instead of crashing in a loop."""
    _break(client, *KEYS)
    installation.worker().ready()
    (turn,) = installation.settled(installation.accept("hello").turn_id)
    assert turn["status"] == "done"
    assert _aside(client) == {key.removeprefix("perdure:"): kind for key, kind in KEYS.items()}
    assert {client.ttl(key) for key in client.keys("*.broken-*")} == {-1}, "no key expires"
    (worker,) = installation.workers
    assert worker.container.status == "running"
    for key in KEYS:
        assert worker.logs().count(f"the key {key!r} at the broker holds a ") == 1
    assert "Traceback" not in worker.logs()


@pytest.mark.long
@pytest.mark.parametrize("key", ["perdure:unacked", "perdure:unacked_index"])
def test_a_worker_continues_when_a_key_is_broken(installation: Installation, client: Any, key: str) -> None:
    """If a broker key breaks while a worker runs, the worker renames the key and still accepts a submission."""
    worker = installation.worker()
    worker.ready()
    pid = worker.pid
    _break(client, key)
    app = Celery(broker=installation.redis.url, backend=installation.redis.url, set_as_current=False)
    with app:
        sent = app.send_task("turns.submit", kwargs={"user_id": "bob", "text": "hi"}, queue="ingress")
        assert sent.get(timeout=20)["turn_id"]
    (turn,) = installation.settled(installation.accept("hello").turn_id)
    assert turn["status"] == "done"
    wait_until(lambda: _aside(client) == {key.removeprefix("perdure:"): KEYS[key]}, "the key is set aside")
    assert (worker.pid, worker.container.status) == (pid, "running")
    assert "Unrecoverable" not in worker.logs()


@pytest.mark.exhaustive
def test_a_worker_repairs_the_keys_of_publishers(installation: Installation, client: Any) -> None:
    """A running worker renames a broken binding, although only publishers read bindings."""
    installation.worker().ready()
    _break(client, "_kombu.binding.turns", "perdure:unacked_mutex")
    wait_until(lambda: len(_aside(client)) == 2, "the keys are set aside", 20)
    (turn,) = installation.settled(installation.accept("hello").turn_id)
    assert turn["status"] == "done"


@pytest.mark.long
def test_keys_of_another_program_stay_as_they_are(installation: Installation, client: Any) -> None:
    """If another program's key has a queue's name, workers leave the key unchanged and consume the other queues."""
    _break(client, *FOREIGN)
    client.expire("memory", 1_000)
    worker = installation.worker()
    worker.ready()
    (turn,) = installation.settled(installation.accept("hello").turn_id)
    assert turn["status"] == "done"
    assert {key: client.type(key) for key in FOREIGN} == FOREIGN
    assert (client.ttl("sessions"), client.ttl("memory") > 0) == (-1, True)
    assert _aside(client) == {}
    for key, kind in FOREIGN.items():
        assert worker.logs().count(f"the key {key!r} at the broker holds a {kind} where perdure's queue") == 1
    assert "Give perdure a Redis database of its own, or remove the key" in worker.logs()
    assert "Traceback" not in worker.logs()


@pytest.mark.exhaustive
def test_a_queue_is_consumed_again_when_its_key_is_free(installation: Installation, client: Any) -> None:
    """A running worker consumes a queue again after another program's key with the queue's name is removed."""
    worker = installation.worker()
    worker.ready()
    pid = worker.pid
    _break(client, "turns")
    wait_until(lambda: "the key 'turns' at the broker holds a string" in worker.logs(), "the key is reported", 20)
    app = Celery(broker=installation.redis.url, backend=installation.redis.url, set_as_current=False)
    with app:
        sent = app.send_task("turns.submit", kwargs={"user_id": "bob", "text": "hi"}, queue="ingress")
        assert sent.get(timeout=20)["turn_id"]
    assert client.get("turns") == "x"
    client.delete("turns")
    (turn,) = installation.settled(installation.accept("hello").turn_id, within_s=20)
    assert turn["status"] == "done"
    assert worker.logs().count("the key 'turns' at the broker holds a string") == 1
    assert (worker.pid, worker.container.status) == (pid, "running")
