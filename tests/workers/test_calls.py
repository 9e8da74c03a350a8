"""`CeleryCalls` sends task messages like Celery's, and raises no error if a server is unavailable."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
import redis as redis_py
from celery import Celery

from perdure.assembly import Addresses
from perdure.servers import redis
from perdure.settings import Settings
from perdure.tools.awaited.port import TaskCall, TaskEnded, TaskRuns, TaskSent
from perdure.workers.celery_application import make_app
from perdure.workers.publish.calls import CeleryCalls
from perdure.workers.publish.wake import CeleryWaker

TASK = UUID(int=7)
UNREACHABLE = "redis://127.0.0.1:1/0"


@pytest.fixture
def calls(settings: Settings, redis_url: str) -> Iterator[CeleryCalls]:
    """A `CeleryCalls` on the test's Redis."""
    made = CeleryCalls.at(settings, Addresses("postgresql://", redis_url, redis_url))
    yield made
    made.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    """A client of the broker and of the result backend."""
    made = redis_py.Redis.from_url(redis.client_url(redis_url))
    yield made
    made.close()


@pytest.fixture
def application(redis_url: str) -> Iterator[Celery]:
    """The Celery application whose tasks are used as tools."""
    made = Celery("shop", broker=redis_url, backend=redis_url, set_as_current=False)
    yield made
    made.close()


def _call(**given: Any) -> TaskCall:
    return TaskCall(**{
        "task_id": TASK, "task": "shop.export", "arguments": {"text": "a secret"}, "queue": None, "expires_s": 60.0,
        "effect_id": TASK, **given,
    })  # fmt: skip


@pytest.mark.parametrize(("queue", "key"), [(None, "celery"), ("money", "money")])
def test_a_message_is_as_celery_sends_it(calls: CeleryCalls, client: Any, queue: str | None, key: str) -> None:
    """The message has the task's id, an expiry, and a callback for each outcome. The headers contain no arguments."""
    assert calls.send(_call(queue=queue)) is TaskSent.YES
    [text] = client.lrange(key, 0, -1)
    message = json.loads(text)
    headers, (args, kwargs, embedded) = message["headers"], json.loads(base64.b64decode(message["body"]))
    assert (headers["id"], headers["task"], headers["ignore_result"]) == (str(TASK), "shop.export", None)
    assert headers["expires"]
    assert (args, kwargs) == ([], {"text": "a secret"})
    assert "secret" not in json.dumps(headers)
    links = [*embedded["callbacks"], *embedded["errbacks"]]
    assert [each["task"] for each in links] == ["turns.tool_result"] * 2
    assert [each["options"]["queue"] for each in links] == ["ingress"] * 2
    assert [each["kwargs"] for each in links] == [
        {"effect_id": str(TASK)}, {"effect_id": str(TASK), "failed": True},
    ]  # fmt: skip
    assert client.pubsub_channels() == [], "no subscription to its result remains"


def test_applications_do_not_share_the_limit_of_their_pools(
    settings: Settings, redis_url: str, application: Celery
) -> None:
    """Each Celery application of a process has its own limit of connections, so that all can publish concurrently."""
    where = Addresses("postgresql://", redis_url, redis_url)
    waker, calls = CeleryWaker(settings, where), CeleryCalls.at(settings, where)
    application.conf.broker_pool_limit = 4
    with waker.app.producer_or_acquire() as held, application.producer_or_acquire() as its:
        assert calls.send(_call()) is TaskSent.YES
        for producer in (held, its):
            producer.publish({}, routing_key="celery")
    assert application.pool.limit == 4
    calls.close()
    waker.app.close()


def test_threads_share_the_pools_of_an_application(settings: Settings, redis_url: str) -> None:
    """If several threads use an application for the first time, all of them get the same pools."""
    where = Addresses("postgresql://", redis_url, redis_url)
    for _ in range(20):
        app = make_app(settings, where, publisher=True)
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _, app=app: (app.pool, app.amqp.producer_pool), range(8)))
        assert {(id(connections), id(producers)) for connections, producers in found} == {
            (id(app.pool), id(app.amqp.producer_pool))
        }
        assert app.amqp.producer_pool.connections is app.pool
        app.close()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")  # Python 3.12's
def test_a_forked_process_leaves_its_parents_connections_alone(settings: Settings, redis_url: str) -> None:
    """A child process has pools of its own. Closing the application there does not close the parent's connections."""
    where = Addresses("postgresql://", redis_url, redis_url)
    app = make_app(settings, where, publisher=True)
    with app.producer_or_acquire() as producer:
        producer.publish({}, routing_key="celery")
        if (child := os.fork()) == 0:
            own = False
            try:
                own = app.pools is not vars(app)["_pools"][os.getppid()]
                app.close()
            finally:
                os._exit(0 if own else 1)  # whatever was raised: the child must not go on with the tests
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        producer.publish({}, routing_key="celery")
    app.close()


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # from celery's own code
def test_states_of_the_result_backend(calls: CeleryCalls, application: Celery) -> None:
    """`ask` reports each state of a task: unknown, running, running with progress, succeeded, failed and revoked."""
    backend, task_id = application.backend, str(TASK)
    assert calls.ask(TASK) is None
    backend.store_result(task_id, {"pid": 1}, "STARTED")
    assert calls.ask(TASK) == TaskRuns()
    backend.store_result(task_id, {"done": 1}, "PROGRESS")
    assert calls.ask(TASK) == TaskRuns({"done": 1})
    backend.store_result(task_id, ValueError("no\x1b[31m paper"), "FAILURE")
    failed = calls.ask(TASK)
    assert isinstance(failed, TaskEnded)
    assert (failed.failed, str(failed.value).startswith("ValueError: no")) == (True, True)
    other = UUID(int=8)
    backend.store_result(str(other), {"rows": 3}, "SUCCESS")
    assert calls.ask(other) == TaskEnded(failed=False, value={"rows": 3})
    gone = UUID(int=9)
    backend.mark_as_revoked(str(gone), "revoked")
    revoked = calls.ask(gone)
    assert isinstance(revoked, TaskEnded)
    assert revoked.failed


def test_an_unreadable_result_is_unknown(calls: CeleryCalls, client: Any) -> None:
    """If another serializer or program wrote the result, `ask` returns `None`."""
    client.set(f"celery-task-meta-{TASK}", b"\x80\x04pickle")
    assert calls.ask(TASK) is None


@pytest.mark.long
def test_without_servers_nothing_is_sent_and_nothing_raises(settings: Settings) -> None:
    """Without a broker `send` returns `TaskSent.NO` and `ask` returns `None`. A second attempt does not wait again."""
    made = CeleryCalls.at(settings, Addresses("postgresql://", UNREACHABLE, UNREACHABLE))
    assert made.send(_call()) is TaskSent.NO
    assert made.ask(TASK) is None
    made.revoke([TASK])
    began = time.monotonic()
    assert (made.send(_call()), made.ask(TASK)) == (TaskSent.NO, None)
    assert time.monotonic() - began < 0.5
    made.close()


def _routed(name: str, *_: Any, **__: Any) -> None:
    if name == "shop.export":
        raise LookupError(f"no queue for {name}")


def test_a_routing_error_sends_nothing(application: Celery, client: Any) -> None:
    """After a routing error `send` returns `TaskSent.NO`. The broker counts as available, so the next task is sent."""
    application.conf.task_routes = (_routed,)
    made = CeleryCalls(application, owned=False)
    assert made.send(_call()) is TaskSent.NO
    assert made.send(_call(task="shop.import")) is TaskSent.YES
    assert client.llen("celery") == 1


def test_without_a_result_backend_the_state_is_unknown(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a result backend `ask` returns `None` and logs nothing. The task's callbacks report the outcome."""
    made = CeleryCalls(Celery("shop", broker=redis_url, backend="disabled://", set_as_current=False))
    assert made.ask(TASK) is None
    assert caplog.text == ""
    assert made.send(_call()) is TaskSent.YES
    made.close()


def test_an_eager_application_sends_a_message(redis_url: str, client: Any) -> None:
    """A tool's task goes to the broker even with `task_always_eager`, which would run it inside the turn's worker."""
    application = Celery("shop", broker=redis_url, backend=redis_url, set_as_current=False)
    application.conf.task_always_eager = True
    made = CeleryCalls(application)
    assert made.send(_call()) is TaskSent.YES
    assert client.llen("celery") == 1
    made.close()


@pytest.mark.long
def test_a_dead_broker_does_not_delay_a_revocation(application: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revocation over a dead connection ends in bounded time, although kombu retries a broadcast without a limit."""
    back = threading.Event()
    monkeypatch.setattr(application.control, "revoke", lambda _ids: back.wait(30))
    calls = CeleryCalls(application)
    began = time.monotonic()
    assert calls.revoke([TASK]) is False
    assert calls.revoke([TASK]) is False
    assert time.monotonic() - began < 10
    back.set()
    assert calls.revoke([TASK]) is True


@pytest.mark.long
def test_an_applications_backend_answers_within_a_limit(application: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent requests to the application's result backend are answered. A request that hangs times out."""
    calls = CeleryCalls(application, owned=False)
    backend = type(application.backend)  # the class, since each thread has its own backend instance
    monkeypatch.setattr(backend, "get_task_meta", lambda *_, **__: {"status": "SUCCESS", "result": 7})
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(calls.ask, [TASK] * 8))
    assert found == [TaskEnded(failed=False, value=7)] * 8
    hanging = threading.Event()
    monkeypatch.setattr(backend, "get_task_meta", lambda *_, **__: hanging.wait(30))
    began = time.monotonic()
    assert calls.ask(TASK) is None
    assert calls.ask(TASK) is None, "no request is made in the pause after a failure"
    assert time.monotonic() - began < 5
    hanging.set()
