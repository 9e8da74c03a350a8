"""Queues of other programs on RabbitMQ, which refuses to declare a queue with other arguments than it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from amqp.exceptions import AccessRefused, ConnectionForced, NotFound  # type: ignore[import-untyped]
from celery import Celery
from kombu import Connection, Queue
from redis.exceptions import NoPermissionError, OutOfMemoryError, ResponseError

from perdure.application.install import install
from perdure.application.queues import publisher
from perdure.assembly import Addresses
from perdure.settings import Settings
from perdure.tools.awaited.port import TaskCall, TaskSent
from perdure.workers.publish.background import BackgroundWaker
from perdure.workers.publish.calls import CeleryCalls
from perdure.workers.publish.queues import concerns_one
from perdure.workers.publish.wake import CeleryWaker
from tests.processes.faults import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]

Publish = Callable[[str], bool]
"""Publishes a task to a queue; returns whether the broker accepted it."""

ARGUMENTS = [{"x-queue-type": "quorum"}, {"x-max-priority": 10}]
SETTINGS = Settings(_env_file=None)


@pytest.fixture
def broker(rabbitmq: str) -> Iterator[Any]:
    """A connection to RabbitMQ, which at the end deletes the queues of the test."""
    with Connection(rabbitmq) as connection:
        yield connection
        for name in ("theirs", "turns", "ingress"):
            with connection.channel() as channel:
                channel.queue_delete(name)
                channel.exchange_delete(name)


@pytest.fixture
def shop(rabbitmq: str) -> Iterator[Celery]:
    """An application with perdure installed, whose queues have a maximum priority."""
    with Celery("shop", broker=rabbitmq, set_as_current=False) as made:
        made.conf.task_queue_max_priority = 10
        install(made)
        yield made


@pytest.fixture(params=["reply", "reply of an application", "tool", "tool of an application"])
def publish(request: pytest.FixtureRequest, rabbitmq: str) -> Iterator[Publish]:
    """Each way in which perdure publishes a task of another program."""
    where = Addresses("postgresql://", "redis://127.0.0.1:1", rabbitmq)
    shop: Celery | None = None if " of " not in request.param else request.getfixturevalue("shop")
    if request.param.startswith("reply"):
        waker = CeleryWaker(SETTINGS, where, shop and publisher(shop))
        yield lambda queue: waker.publish("shop.take", {"text": "hello"}, queue=queue)
        waker.close()
        return
    calls = CeleryCalls(shop, owned=False) if shop else CeleryCalls.at(SETTINGS, where)
    yield lambda queue: calls.send(_call(queue)) is TaskSent.YES
    calls.close()


def _call(queue: str) -> TaskCall:
    task_id = uuid4()
    return TaskCall(task_id, "shop.take", {"text": "hello"}, queue, 60, task_id)


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_queue_keeps_the_arguments_that_its_program_gave_it(
    broker: Any, publish: Publish, arguments: dict[str, Any]
) -> None:
    """Tasks reach a quorum queue, and one with a maximum priority, from each connection more than once."""
    theirs = Queue("theirs", queue_arguments=arguments)(broker.default_channel)
    theirs.queue_declare()
    assert [publish("theirs") for _ in range(3)] == [True] * 3
    wait_until(lambda: theirs.queue_declare(passive=True).message_count == 3, "the tasks arrive")


def test_a_missing_queue_is_created_each_time(broker: Any, publish: Publish) -> None:
    """A task that is sent before its program starts waits in the queue, also after the queue was deleted."""
    channel = broker.default_channel
    for _ in range(2):
        assert publish("theirs")
        wait_until(lambda: channel.queue_declare("theirs", passive=True).message_count == 1, "the task arrives")
        channel.queue_delete("theirs")


@pytest.mark.parametrize("kind", ["reply", "tool"])
@pytest.mark.parametrize(
    "settings",
    [
        {"task_queue_max_priority": 10},
        {"task_create_missing_queue_type": "quorum", "task_create_missing_queue_exchange_type": "topic"},
    ],
)
def test_a_missing_queue_is_created_as_the_application_would(
    broker: Any, shop: Celery, kind: str, settings: dict[str, Any]
) -> None:
    """The application's worker, which starts later, declares the queue with the same arguments."""
    shop.conf.task_queue_max_priority = None
    shop.conf.update(settings)
    if kind == "reply":
        waker = CeleryWaker(SETTINGS, Addresses("", "", shop.conf.broker_url), publisher(shop))
        assert waker.publish("shop.take", {}, queue="theirs")
        waker.close()
    else:
        assert CeleryCalls(shop, owned=False).send(_call("theirs")) is TaskSent.YES
    declared = shop.amqp.queues["theirs"](broker.default_channel)
    declared.declare()
    assert declared.queue_declare(passive=True).message_count == 1


def test_a_queue_that_the_application_may_not_create(broker: Any, shop: Celery) -> None:
    """Without `task_create_missing_queues`, replies still reach a queue of another program."""
    shop.conf.task_create_missing_queues = False
    waker = CeleryWaker(SETTINGS, Addresses("", "", shop.conf.broker_url), publisher(shop))
    assert waker.publish("shop.take", {}, queue="theirs")
    assert broker.default_channel.queue_declare("theirs", passive=True).message_count == 1
    waker.close()


def test_a_refused_queue_delays_no_other(broker: Any, rabbitmq: str, publish: Publish) -> None:
    """A queue that another connection holds exclusively is refused. The next task, to another queue, is sent."""
    with Connection(rabbitmq) as other:
        other.default_channel.queue_declare("held", exclusive=True)
        assert not publish("held")
        assert publish("theirs")
        assert not publish("held")
        assert publish("theirs")
    assert broker.default_channel.queue_declare("theirs", passive=True).message_count == 2


@pytest.mark.parametrize("kind", [CeleryWaker, BackgroundWaker])
def test_a_refused_wake_up_delays_no_other(broker: Any, rabbitmq: str, kind: type[CeleryWaker]) -> None:
    """If another program has declared a queue of perdure with arguments, the other queues get their wake-ups."""
    Queue("ingress", queue_arguments={"x-max-priority": 3})(broker.default_channel).queue_declare()
    waker = kind(SETTINGS, Addresses("", "", rabbitmq))
    sessions = [uuid4() for _ in range(2)]
    for session_id in sessions:
        waker.publish("turns.route", {"user": "ana"}, queue="ingress")
        assert waker.session(session_id, 5)
    waker.close()
    channel = broker.default_channel
    found = [channel.basic_get("turns", no_ack=True) for _ in range(channel.queue_declare("turns", passive=True)[1])]
    assert {json.loads(message.body)[1]["session_id"] for message in found} == set(map(str, sessions))


def test_an_application_without_perdure_sends_without_a_declaration(broker: Any, rabbitmq: str) -> None:
    """An application whose queues have a maximum priority submits messages as the documentation says."""
    Queue("ingress")(broker.default_channel).queue_declare()
    with Celery("other", broker=rabbitmq, set_as_current=False) as other:
        other.conf.task_queue_max_priority = 10
        other.send_task("turns.submit", kwargs={}, queue="ingress", declare=[], ignore_result=True)
    wait_until(lambda: broker.default_channel.queue_declare("ingress", passive=True).message_count == 1, "it arrives")


def test_a_tools_task_in_a_refused_queue_is_not_sent(rabbitmq: str) -> None:
    """The outcome of the call is known, so the model does not read that the task may have taken effect."""
    calls = CeleryCalls.at(SETTINGS, Addresses("", "redis://127.0.0.1:1", rabbitmq))
    with Connection(rabbitmq) as other:
        other.default_channel.queue_declare("held", exclusive=True)
        assert calls.send(_call("held")) is TaskSent.NO
    calls.close()


@pytest.mark.parametrize(
    ("error", "one"),
    [
        (NotFound("no queue", (60, 40), reply_code=404), True),
        (AccessRefused("no right", (50, 10), reply_code=403), True),
        (AccessRefused("no login", (0, 0), reply_code=403), False),
        (ConnectionForced("closed", (0, 0), reply_code=320), False),
        (ConnectionResetError(), False),
        (ResponseError("Command # 1 of pipeline caused error: WRONGTYPE Operation against a key"), True),
        (NoPermissionError("NOPERM No permissions to access a key"), True),
        (OutOfMemoryError("OOM command not allowed"), False),
    ],
)
def test_errors_of_one_message(error: Exception, *, one: bool) -> None:
    """Publishing pauses after an error of the broker, and not after one that concerns a single queue."""
    assert concerns_one(error) is one
