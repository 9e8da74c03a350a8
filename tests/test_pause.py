"""Pausing and resuming what a worker consumes, with a broker that fails in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Queue

from perdure.workers.consumer.pause import INTAKE, Consumption


class FailingConsumer:
    """Celery's consumer as far as `Consumption` uses it; the broker fails at the first queue."""

    def __init__(self, app: Celery) -> None:
        self.task_consumer: object | None = object()
        self._app = app
        self._pending: list[Callable[[], None]] = []

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Schedule, as the hub does."""
        self._pending.append(partial(function, *arguments))

    def run_pending(self) -> None:
        """One round of the hub: the first failure ends it, and what was scheduled behind it is gone."""
        pending, self._pending = self._pending, []
        for each in pending:
            each()

    def add_task_queue(self, name: str) -> None:
        """As Celery's: selects the queue, then asks the broker."""
        self._app.amqp.queues.select_add(self._app.amqp.queues[name])
        raise ConnectionError("the broker is gone")

    def cancel_task_queue(self, name: str) -> None:
        """As Celery's: deselects the queue, then asks the broker."""
        self._app.amqp.queues.deselect(name)
        raise ConnectionError("the broker is gone")


@pytest.fixture
def app() -> Celery:
    """An application with a worker's queues."""
    made = Celery("pausing", set_as_current=False)
    made.conf.task_queues = [Queue(name) for name in (*INTAKE, "deliveries")]
    return made


def test_a_broker_that_fails_costs_no_queue_its_place(app: Celery) -> None:
    """Celery starts its consumer again with the selected queues, so all of them must be selected by then."""
    consumer = FailingConsumer(app)
    consumption = Consumption()
    consumption.attach(SimpleNamespace(app=app, consumer=consumer))
    consumption.pause()
    with pytest.raises(ConnectionError):
        consumer.run_pending()
    assert set(app.amqp.queues.consume_from) == {"deliveries"}
    consumption.resume()
    with pytest.raises(ConnectionError):
        consumer.run_pending()
    assert set(app.amqp.queues.consume_from) == {*INTAKE, "deliveries"}
