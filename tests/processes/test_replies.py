"""A reply is sent to a Celery task, or posted with a signature to a URL until the receiver accepts it."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from celery import Celery
from kombu import Consumer, Queue
from pytest_celery import CeleryTestSetup
from standardwebhooks import Webhook

from tests.processes.faults import wait_until
from tests.processes.installation import REPLY_QUEUE as QUEUE
from tests.processes.installation import SECRET, Installation
from tests.processes.model_server import answer_to
from tests.processes.receiver import Delivery, Receiver


@pytest.mark.long
def test_a_reply_is_posted_until_the_receiver_accepts_it(
    celery_setup: CeleryTestSetup, installation: Installation, receiver: Receiver
) -> None:
    """A receiver that fails once gets the reply a second time, with the same id."""
    receiver.statuses.append(500)
    accepted = installation.accept("hello", reply_to={"url": receiver.url})

    def both() -> list[Delivery] | None:
        received = receiver.of(str(accepted.turn_id))
        return received if len(received) == 2 else None

    first, second = wait_until(both, "the reply is received twice")

    assert second.raw == first.raw
    for received in (first, second):
        Webhook(SECRET).verify(received.raw, dict(received.headers))
    assert {received.headers["webhook-id"] for received in (first, second)} == {second.body["delivery_id"]}
    (turn,) = installation.settled(accepted.turn_id)
    body = dict(second.body)
    delivery_id = body.pop("delivery_id")
    assert body == turn
    assert body["reply"]["text"] == answer_to("hello")

    def recorded() -> Any:
        return installation.query("SELECT delivery_id, attempts FROM deliveries WHERE status = 'delivered'")

    ((recorded_id, attempts),) = wait_until(recorded, "the delivery is marked")
    assert (str(recorded_id), attempts) == (delivery_id, 2)


@pytest.mark.long
def test_a_reply_is_sent_to_a_task(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """A Celery application gets the turn as keyword arguments of its own task."""
    received: list[dict[str, Any]] = []
    app: Celery = celery_setup.app
    arrived = threading.Event()

    def take(body: Any, message: Any) -> None:
        received.append({"task": message.headers["task"], "kwargs": json.loads(message.body)[1]})
        message.ack()
        arrived.set()

    accepted = installation.accept("hello", reply_to={"task": "replies.take", "queue": QUEUE})
    with (
        app.connection_for_read() as connection,
        Consumer(connection, [Queue(QUEUE)], on_message=None, callbacks=[take]),
    ):
        while not arrived.is_set():
            connection.drain_events(timeout=20)

    (turn,) = installation.settled(accepted.turn_id)
    (reply,) = received
    delivery_id = reply["kwargs"].pop("delivery_id")
    assert reply == {"task": "replies.take", "kwargs": turn}
    assert str(installation.query("SELECT delivery_id FROM deliveries")[0].delivery_id) == delivery_id
