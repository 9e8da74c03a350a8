"""Pausing and resuming a worker's consumption while the broker fails."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.worker import state
from kombu import Queue

from perdure.application.install import install
from perdure.network.queues import QUEUES
from perdure.servers.process.stop_signals import stop_signals
from perdure.workers.consumer.pause import INTAKE, Consumption, PauseStep


class FailingConsumer:
    """A fake of Celery's consumer, with the methods that `Consumption` uses. Its broker always fails."""

    def __init__(self, app: Celery) -> None:
        self.task_consumer: object | None = object()
        self._app = app
        self._pending: list[Callable[[], None]] = []

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call, as Celery's hub does."""
        self._pending.append(partial(function, *arguments))

    def run_pending(self) -> None:
        """Run the scheduled calls once. If a call fails, discard the remaining calls."""
        pending, self._pending = self._pending, []
        for each in pending:
            each()

    def add_task_queue(self, name: str) -> None:
        """Select the queue, as Celery does, then raise the broker's error."""
        self._app.amqp.queues.select_add(self._app.amqp.queues[name])
        raise ConnectionError("the broker is gone")

    def cancel_task_queue(self, name: str) -> None:
        """Deselect the queue, as Celery does, then raise the broker's error."""
        self._app.amqp.queues.deselect(name)
        raise ConnectionError("the broker is gone")


@pytest.fixture
def app() -> Celery:
    """An application with a worker's queues."""
    made = Celery("pausing", set_as_current=False)
    made.conf.task_queues = [Queue(name) for name in (*INTAKE, "deliveries")]
    return made


@pytest.mark.parametrize("selected", [QUEUES, ()])
def test_the_applications_maximum_priority_is_not_perdures(selected: tuple[str, ...]) -> None:
    """The paused queues keep their arguments: RabbitMQ refuses to declare them with others, which ends the worker."""
    app = Celery("shop", broker="amqp://127.0.0.1:1//", set_as_current=False)
    app.conf.task_queue_max_priority = 10
    install(app)
    app.amqp.queues.select(selected)
    before, arguments = dict(app.amqp.queues.consume_from), _arguments(app)
    consumption = Consumption()
    consumption.attach(SimpleNamespace(app=app, consumer=SimpleNamespace(task_consumer=None)))
    consumption.pause()
    assert set(app.amqp.queues.consume_from) == before.keys() - set(INTAKE)
    assert consumption.queues() == before.keys(), "a worker that is drained still counts as one of turns"
    consumption.resume()
    assert app.amqp.queues.consume_from == before
    assert _arguments(app) == arguments


def _arguments(app: Celery) -> dict[str, str]:
    return {name: str(queue.queue_arguments or None) for name, queue in app.amqp.queues.items()}


def test_a_failing_broker_loses_no_queue(app: Celery) -> None:
    """`resume` selects the paused queues even if the broker fails, so that Celery consumes them after it reconnects."""
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


def test_a_worker_that_ignores_hangups_goes_on_ignoring_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `nohup`, SIGHUP neither stops nor restarts the worker, though Celery has installed a handler of it."""
    before = {number: signal.getsignal(number) for number in (*stop_signals(), signal.SIGHUP, signal.SIGQUIT)}
    monkeypatch.setattr(state, "should_stop", None)
    requested: list[None] = []
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        step = PauseStep(Mock(app=Mock(perdure=Mock(request_shutdown=lambda: requested.append(None)))))
        signal.signal(signal.SIGHUP, lambda *_: requested.append(None))  # Celery's, which restarts the worker
        step.start(Mock())
        signal.raise_signal(signal.SIGHUP)
        assert (requested, state.should_stop) == ([], None)
        signal.raise_signal(signal.SIGQUIT)
        assert len(requested) == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
