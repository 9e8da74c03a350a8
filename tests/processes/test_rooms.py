"""A worker that is busy with one kind of work delays no other kind, on Redis and on RabbitMQ."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from celery import Celery
from kombu import Exchange, Queue

from perdure.sessions.ending import request_end
from perdure.workers.consumer.unknown_tasks import HELD
from tests.processes import rabbit
from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import ModelServer
from tests.processes.nodes import RedisContainer
from tests.processes.receiver import Receiver

PATIENT = {"PERDURE_TURN__SWEEP_S": "60", "PERDURE_TURN__LEASE_S": "30", "PERDURE_TURN__HEARTBEAT_S": "10"}
"""Settings of a worker that runs no sweep during a test."""

BACKLOG = 400

AHEAD = 40
"""Upper bound on the messages that RabbitMQ prefetches before the worker cancels the consumer."""

BROKERS = [
    pytest.param("redis", id="redis"),
    pytest.param("rabbitmq", id="rabbitmq", marks=[pytest.mark.long, pytest.mark.timeout(200)]),
]


@pytest.fixture(params=BROKERS)
def installation(
    request: pytest.FixtureRequest,
    database_url: str,
    redis_server: RedisContainer,
    model_server: ModelServer,
    tmp_path: Path,
) -> Iterator[Installation]:
    """An installation with Redis or RabbitMQ as the broker, without workers."""
    broker_url = request.getfixturevalue("rabbitmq") if request.param == "rabbitmq" else None
    made = Installation(database_url, redis_server, model_server, tmp_path, broker_url)
    yield made
    made.close()
    if broker_url is not None:
        rabbit.empty_queues(made.waker.app, broker_url)


@pytest.fixture
def silent_receiver() -> Iterator[str]:
    """The URL of a receiver that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


@pytest.mark.long
def test_hanging_receivers_delay_no_turn(installation: Installation, silent_receiver: str) -> None:
    """A turn runs at once while twelve deliveries wait for a receiver that never answers."""
    installation.worker("--concurrency=4", **PATIENT).container.ready()
    sent = [installation.accept("hello", user=f"u{n}", reply_to={"url": silent_receiver}) for n in range(12)]
    installation.settled(*(each.turn_id for each in sent))
    attempted = "SELECT count(*) AS n FROM deliveries WHERE attempts > 0"
    wait_until(lambda: installation.query(attempted)[0].n >= 4, "the worker waits for the receiver")

    turn = installation.accept("plain", user="plain")

    assert installation.settled(turn.turn_id, within_s=5)[0]["status"] == "done"


@pytest.mark.long
def test_turns_that_wait_for_a_model_delay_nothing_else(installation: Installation, receiver: Receiver) -> None:
    """While all its turns wait for a model, a worker still accepts submissions, delivers replies and ends sessions."""
    gates = [installation.model_server.gate(f"slow {number}") for number in range(2)]
    installation.worker("--concurrency=2", **PATIENT).container.ready()
    finished = installation.accept("finished", user="finished", reply_to={"url": receiver.url})
    installation.settled(finished.turn_id)
    for number, gate in enumerate(gates):
        installation.accept(f"slow {number}", user=f"slow {number}")
        gate.wait()
    installation.accept("slow too", user="slow too")

    delivered = "SELECT 1 FROM deliveries WHERE status = 'delivered'"
    wait_until(lambda: installation.query(delivered), "the reply is delivered once")
    installation.query("UPDATE deliveries SET status = 'pending', due_at = now() RETURNING 1")
    (delivery,) = installation.query("SELECT delivery_id FROM deliveries")
    request_end(installation.database, finished.session_id, "enough").wake(installation.waker)
    installation.waker.delivery(delivery.delivery_id)
    submitted = {"user_id": "service", "text": "submitted"}
    installation.waker.publish("turns.submit", submitted, queue="ingress")

    wait_until(lambda: len(receiver.of(str(finished.turn_id))) == 2, "the reply is delivered")
    ended = "SELECT 1 FROM sessions WHERE session_id = %(id)s AND ended_at IS NOT NULL"
    wait_until(lambda: installation.query(ended, id=finished.session_id), "the session has ended")
    wait_until(
        lambda: installation.query("SELECT 1 FROM inbox WHERE user_id = 'service'"), "the submission is accepted"
    )
    assert all(not gate.opened.is_set() for gate in gates)


@pytest.mark.exhaustive
def test_a_busy_worker_leaves_wake_ups_to_an_idle_one(installation: Installation) -> None:
    """Wake-ups for which a worker has no slot stay in the broker, where another worker gets them."""
    gates = [installation.model_server.gate(f"slow {number}") for number in range(4)]
    installation.worker("--concurrency=4", **PATIENT).container.ready()
    for number, gate in enumerate(gates):
        installation.accept(f"slow {number}", user=f"slow {number}")
        gate.wait()
    quick = [installation.accept("quick", user=f"quick {number}") for number in range(30)]
    installation.worker("--concurrency=4", **PATIENT).container.ready()
    turns = installation.settled(*(each.turn_id for each in quick), within_s=10)
    assert {turn["status"] for turn in turns} == {"done"}
    for gate in gates:
        gate.opened.set()
    more = [installation.accept("more", user=f"quick {number}") for number in range(30)]
    installation.settled(*(each.turn_id for each in more), within_s=10)
    wait_until(lambda: not _unsettled(installation), "the busy worker runs its turns")
    installation.check()


@pytest.mark.exhaustive
def test_a_worker_continues_with_turns_it_had_no_slot_for(installation: Installation) -> None:
    """A worker without a free slot consumes again as soon as one of its turns ends. It needs no sweep.

    The model calls take three seconds in all. If the worker paused for a second after every four turns, the turns would
    take 18 seconds.
    """
    installation.model_server.latency_s = 0.2
    installation.worker("--concurrency=4", **PATIENT).container.ready()
    sent = [installation.accept("hello", user=f"user {number}") for number in range(60)]
    installation.settled(*(each.turn_id for each in sent), within_s=7)
    installation.check()


@pytest.mark.exhaustive
def test_a_backlog_of_unknown_tasks_delays_no_turn(installation: Installation) -> None:
    """The worker holds a bounded number of unknown tasks, whatever their routing key."""
    url = installation.environment["PERDURE_BROKER_URL"]
    bound = Queue("maintenance", Exchange("events", type="topic"), routing_key="quick.*")
    worker = installation.worker("--concurrency=4", **PATIENT)
    worker.container.ready()
    with Celery("neighbour", broker=url, set_as_current=False) as app, app.connection_for_write() as connection:
        channel = connection.channel()
        producer = connection.Producer(channel=channel)
        bound(channel).declare()
        for _ in range(BACKLOG):
            app.send_task("neighbour.quick", exchange="events", routing_key="quick.1", producer=producer)
        wait_until(lambda: "perdure has no task for" in worker.logs(), "perdure holds tasks")
        for number in range(3):
            accepted = installation.accept("hello", user=f"user {number}")
            assert installation.settled(accepted.turn_id, within_s=5)[0]["status"] == "done"
        for _ in range(20):
            held = BACKLOG - bound(channel).queue_declare(passive=True).message_count
            assert held <= HELD + AHEAD, "the worker holds a bounded number of tasks"
            installation.settled(installation.accept("hello").turn_id)
        channel.exchange_delete("events")


@pytest.mark.long
def test_turns_begin_by_priority(installation: Installation) -> None:
    """Turns begin in the order of their priorities. On Redis, up to three adjacent priorities count as equal."""
    priorities = [5, 0, 9, 3, 6, 1, 8, 2, 7, 4]
    sent = [installation.accept(f"priority {each}", user=f"u{each}", priority=each) for each in priorities]
    installation.worker("--concurrency=1", **PATIENT)
    installation.settled(*(each.turn_id for each in sent))
    first_calls = {text: times[0] for text, times in installation.model_server.called_at.items()}
    began = [int(text.split()[1]) for text in sorted(first_calls, key=lambda text: first_calls[text])]
    ranked = "amqp" in installation.environment["PERDURE_BROKER_URL"]
    level = {each: each if ranked else -((9 - each) // 3) for each in priorities}
    assert all(level[earlier] >= level[later] for earlier, later in pairwise(began)), began


@pytest.mark.long
def test_workers_that_are_killed_and_stopped_lose_nothing(installation: Installation) -> None:
    """Sixty turns are answered once each, although one worker gets a SIGKILL and another one a SIGTERM."""
    installation.model_server.latency_s = 0.05
    killed, stopped = (installation.worker("--concurrency=4") for _ in range(2))
    for worker in (killed, stopped):
        worker.container.ready()
    sent = [installation.accept(f"message {number}", user=f"user {number % 12}") for number in range(60)]
    wait_until(lambda: _unsettled(installation) < 50, "some are answered")
    killed.kill()
    wait_until(lambda: _unsettled(installation) < 35, "more are answered")
    installation.worker("--concurrency=4").container.ready()
    stopped.kill("SIGTERM")
    assert stopped.container.wait() == 0
    turns = installation.settled(*(each.turn_id for each in sent), within_s=40)
    assert {turn["status"] for turn in turns} == {"done"}
    installation.check()


def _unsettled(installation: Installation) -> int:
    return int(installation.query("SELECT count(*) AS n FROM turns WHERE settled_at IS NULL")[0].n)
