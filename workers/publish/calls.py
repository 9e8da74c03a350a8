"""Sends the tasks of Celery tools, reads their state from the result backend, and revokes them.

The tasks belong to other applications on perdure's broker. perdure's own Celery application cannot send or revoke
them: it routes tasks differently, and its control messages reach only perdure's workers. `CeleryCalls.at` therefore
makes a separate Celery application with Celery's defaults.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from celery import Celery, states
from celery.backends.base import DisabledBackend
from kombu import Queue
from kombu.exceptions import EncodeError

from perdure.assembly import Addresses
from perdure.errors import loggable
from perdure.settings import Settings
from perdure.tasks.arguments import described
from perdure.text.untrusted import error_summary
from perdure.tools.awaited.port import TaskCall, TaskEnded, TaskRuns, TaskSent
from perdure.workers.celery_application import connected_app, transport_options
from perdure.workers.publish.alarms import publishing
from perdure.workers.publish.queues import RETRY_ONCE, by_name, concerns_one
from perdure.workers.publish.wake import PAUSE_S

log = logging.getLogger(__name__)

T = TypeVar("T")

LINK = "turns.tool_result"
"""The task of perdure that records the result of a Celery tool's task."""

_SENDING = {"serializer": "json", "retry": False}
"""Publishing options that override the options of the application's routes.

Without a retry: a broker that answers too late has the task, and would get it a second time.
"""

_WAIT_S = 2.0
_BACKEND_PAUSE_S = 5.0
"""Seconds after a failure during which the result backend is not queried, so that a sweep stays short."""

_REVOKED = "The task was revoked, or was not begun in time."


class CeleryCalls:
    """A `perdure.tools.awaited.port.TaskCalls` that publishes with `app`. Threads may share it."""

    def __init__(self, app: Celery, *, owned: bool = True) -> None:
        """`owned`: whether `close` closes the connections of `app`."""
        self._app = app
        self._owned = owned
        self._asking = threading.Semaphore()
        self._revoking = threading.Semaphore()
        self._unavailable_until = 0.0
        self._no_answer_until = 0.0

    @classmethod
    def at(cls, settings: Settings, where: Addresses) -> CeleryCalls:
        """An instance that uses the servers at `where`, for tasks of applications with Celery's defaults."""
        app = connected_app("perdure-calls", where, set_as_current=False)
        app.conf.update(
            task_serializer="json",
            accept_content=["json"],
            broker_transport_options=transport_options(where.broker_url, _WAIT_S, settings.redis_prefix),
            broker_connection_timeout=_WAIT_S,
            redis_socket_timeout=_WAIT_S,
            redis_socket_connect_timeout=_WAIT_S,
            result_backend_transport_options={"retry_policy": {"max_retries": 1}},
        )
        return cls(app)

    def send(self, call: TaskCall) -> TaskSent:
        """Publish the task; see `TaskCalls.send`."""
        if time.monotonic() < self._unavailable_until:
            return TaskSent.NO
        reached = False
        try:
            message, options = self._message(call)  # in its own `try`, since these errors are not the broker's
        except Exception:  # an application's router may raise anything
            log.exception("the task %s cannot be sent", call.task)
            return TaskSent.NO
        try:
            with publishing(self._app, _WAIT_S) as producer:
                options |= self._reach(producer, options)
                reached = True
                self._app.amqp.send_task_message(producer, call.task, message, **{**options, **_SENDING})
        except EncodeError:
            log.exception("the arguments of the task %s cannot be sent", call.task)
            return TaskSent.NO
        except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
            log.warning("the broker did not accept the task %s: %s", call.task, loggable(error))
            if concerns_one(error):
                return TaskSent.NO
            self._unavailable_until = time.monotonic() + PAUSE_S
            return TaskSent.MAYBE if reached else TaskSent.NO
        return TaskSent.YES

    def ask(self, task_id: UUID) -> TaskEnded | TaskRuns | None:
        """The state of the task in the result backend; see `TaskCalls.ask`."""
        if time.monotonic() < self._no_answer_until:
            return None
        if isinstance(self._app.backend, DisabledBackend):
            return None
        try:
            # `AsyncResult` would subscribe to the result, and the subscription would remain.
            ask = partial(self._app.backend.get_task_meta, str(task_id), cache=False)
            # An owned application's connections have timeouts. Another application's may have none.
            found = ask() if self._owned else _within(_WAIT_S, self._asking, ask)
            status, value = found["status"], found.get("result")
        except Exception as error:  # noqa: BLE001 (each backend has errors of its own)
            self._no_answer_until = time.monotonic() + _BACKEND_PAUSE_S
            log.warning("the result backend has no readable answer about task %s: %s", task_id, loggable(error))
            return None
        return _state(status, value)

    def revoke(self, task_ids: Sequence[UUID]) -> bool:
        """Broadcast a command that revokes the tasks; see `TaskCalls.revoke`."""
        try:
            # While the broker is unavailable, kombu retries this without a limit.
            revoke = partial(self._app.control.revoke, [str(task_id) for task_id in task_ids])
            _within(_WAIT_S, self._revoking, revoke)
        except Exception as error:  # noqa: BLE001 (each transport has errors of its own)
            log.warning("%d tasks could not be revoked yet: %s", len(task_ids), loggable(error))
            return False
        return True

    def close(self) -> None:
        if self._owned:
            self._app.close()

    @staticmethod
    def _reach(producer: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Connect, also if the broker has closed the connection since the last task; returns the options for the queue.

        kombu finds that out only when it publishes, and it would be unknown whether the broker has the task. redis-py
        checks a connection before it sends a command.
        """
        if isinstance(queue := options.get("queue"), Queue) and "exchange" not in options:
            return by_name(producer, queue, _WAIT_S)
        connection = producer.connection
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=_WAIT_S)
        if connection.transport.driver_type == "amqp":
            connection.ensure(producer, _ask_nothing, **RETRY_ONCE)(producer)
        return {}

    def _message(self, call: TaskCall) -> tuple[Any, dict[str, Any]]:
        """The message of a call, and the delivery options from the application's routes."""
        # Replaces `Celery.send_task`, which would subscribe to the result. With `ignore_result=None`, the setting of
        # the task itself applies.
        amqp, task_id, arguments = self._app.amqp, str(call.task_id), dict(call.arguments)
        options = {} if call.queue is None else {"queue": call.queue}
        options = amqp.router.route(options, call.task, (), arguments)
        message = amqp.create_task_message(
            task_id,
            call.task,
            (),
            arguments,
            expires=call.expires_s,
            callbacks=[self._link(call)],
            errbacks=[self._link(call, failed=True)],
            root_id=task_id,
            ignore_result=None,
            **described((), arguments),
        )
        message.headers.update(call.headers)
        return message, options

    def _link(self, call: TaskCall, **also: bool) -> dict[str, Any]:
        # Every publisher declares the queue `ingress` with the same arguments (`perdure.workers.celery_application`).
        arguments = {"effect_id": str(call.effect_id), **also}
        if call.part is not None:
            arguments["part"] = call.part
        options = {"queue": "ingress", "serializer": "json", "ignore_result": True, **described(("",), arguments)}
        return dict(self._app.signature(LINK, kwargs=arguments, options=options))


def _ask_nothing(producer: Any) -> None:
    """Wait for an answer of the broker, to a command that changes nothing on a channel without consumers."""
    producer.channel.basic_qos(0, 0, False)  # noqa: FBT003 (the driver's signature)


def _within(seconds: float, place: threading.Semaphore, work: Callable[[], T]) -> T:
    """Call `work` in a thread, and wait at most `seconds` for its result. `place` admits one call at a time.

    Raises:
        TimeoutError: `work` or an earlier call has not returned in time. The call continues in its thread.
    """
    if not place.acquire(timeout=seconds):
        raise TimeoutError("an earlier call has not returned yet")
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised in the calling thread)
            found.set_exception(error)
        finally:
            place.release()

    threading.Thread(target=run, name="perdure-calls", daemon=True).start()
    return found.result(seconds)


def _state(status: object, value: object) -> TaskEnded | TaskRuns | None:
    match status:
        case states.SUCCESS:
            found: TaskEnded | TaskRuns | None = TaskEnded(failed=False, value=value)
        case states.FAILURE | states.REJECTED:
            found = TaskEnded(failed=True, value=_error_text(value))
        case states.REVOKED:
            found = TaskEnded(failed=True, value=_REVOKED)
        case states.PENDING:
            found = None
        case states.RETRY | states.STARTED | states.RECEIVED:
            found = TaskRuns()
        case _:
            found = TaskRuns(value)  # a custom state that the task set with `update_state`
    return found


def _error_text(value: object) -> str:
    return error_summary(value) if isinstance(value, BaseException) else str(value)
