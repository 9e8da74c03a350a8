"""The base class of all tasks: logging context, metrics, and the mapping of errors.

If the database cannot be reached, a wake-up is dropped, and the sweeper issues the wake-up again. Other tasks, such as
submissions, are retried. Any other `PerdureError` fails the task with the error's code and message. The caller never
receives a stack trace.

The task modules declare functions with `declare`, and `register` adds the functions to one application as tasks.
Celery's `shared_task` would add them to every application in the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, TaskPredicate

from perdure.errors import INTERNAL_ERROR, PerdureError, SettingsError, Unavailable, loggable
from perdure.tasks import current_task
from perdure.tasks.arguments import described
from perdure.tasks.process import Process

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
_MOST_DOUBLINGS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """A function that `register` adds to an application as the task `name`."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]


_declared: dict[str, Declared] = {}


def declare(name: str, **options: Any) -> Callable[[Callable[..., Any]], Declared]:
    """Declare the decorated function, whose first argument is the task, as the task `name`. `options` are Celery's."""

    def of(function: Callable[..., Any]) -> Declared:
        made = _declared[name] = Declared(name, function, options)
        return made

    return of


def register(app: Celery) -> None:
    """Add every declared function to `app` as a task. Idempotent.

    Raises:
        SettingsError: `app` has a task of its own with one of the names.
    """
    for each in list(_declared.values()):
        existing = app.tasks.get(each.name)
        if existing is None:
            app.task(each.function, name=each.name, bind=True, shared=False, lazy=False, **each.options)
        elif not isinstance(existing, PerdureTask):
            raise SettingsError(
                f"the application {app.main!r} has a task {each.name!r}, which is a name of perdure's: rename your task"
            )


class SubmissionRefused(Exception):
    """The error that the caller of a task receives: a code and a message."""


class PerdureTask(Task):  # type: ignore[misc]
    """The base class of perdure's tasks. `hint`: whether losing a message of the task only causes a delay."""

    abstract = True
    hint = True
    Request = f"{__package__}.request:Request"
    """The import path of the class that represents a message of the task in a worker."""
    from_config = ()
    """Empty, so the application's settings (`task_acks_late` and others) do not apply. The attributes below apply."""

    max_retries = None
    """No limit. `retry` takes `None` as this attribute, whose default is 3."""

    serializer = "json"
    ignore_result = True
    acks_late = False
    acks_on_failure_or_timeout = True
    reject_on_worker_lost = False
    track_started = False
    store_eager_result = False
    store_errors_even_if_ignored = False

    @classmethod
    def annotate(cls) -> None:
        """Ignore the setting `task_annotations`, which is meant for the application's own tasks."""

    @property
    def process(self) -> Process:
        """The parts that the tasks of this process share."""
        process: Process = self.app.perdure()
        return process

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task's function; logs with the task's id, counts the outcome and maps errors."""
        clock = self.process.runtime.clock
        token = current_task.set(f"{self.name}[{self.request.id}]")
        began, failed = clock.monotonic(), True
        try:
            result = self.perform(*args, **kwargs)
            failed = False
        except Unavailable as error:
            raise self._retry_or_ignore(error) from None  # Celery stores the traceback of a retry, causes included
        except TaskPredicate:
            raise
        except PerdureError as error:
            log.info("refused: %s", loggable(error))
            raise self.refused(error) from None
        except Exception:
            log.exception("the task failed")
            raise self.refused(PerdureError(INTERNAL_ERROR)) from None
        else:
            return result
        finally:
            self.process.metrics.count(self.name, clock.monotonic() - began, failed=failed)
            current_task.reset(token)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Publish the task, or a retry of it, with its arguments masked in events.

        Raises:
            SettingsError: `task_always_eager` is set; perdure's tasks run only in a worker.
        """
        if self.app.conf.task_always_eager:
            raise SettingsError(
                f"task_always_eager is true, and {self.name} runs in a worker only: unset it, or test your agent with "
                "perdure.testing.ask"
            )
        return super().apply_async(args, kwargs, **{**described(args, kwargs), **options})

    def refused(self, error: PerdureError) -> Exception:
        """Record `error` as the task's result; returns the exception to raise.

        Celery itself would store the traceback with the result, where the caller could read it.
        """
        refused = SubmissionRefused(f"{error.code}: {error.message}")
        self.backend.mark_as_failure(
            self.request.id, refused, request=self.request, store_result=not self.ignore_result
        )
        self.send_event("task-failed", exception=repr(refused), traceback="")
        ignored: Exception = Ignore()
        return ignored

    def perform(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task's function. Subclasses override this."""
        return super().__call__(*args, **kwargs)

    def _retry_or_ignore(self, error: Unavailable) -> Exception:
        if self.hint:
            log.warning("%s The sweeper will issue this task again", error.message)
            ignored: Exception = Ignore()
            return ignored
        countdown = min(_FIRST_RETRY_S * 2.0 ** min(self.request.retries, _MOST_DOUBLINGS), _LONGEST_RETRY_S)
        again: Exception
        try:
            again = self.retry(exc=error, countdown=countdown, throw=False)
        except Reject:
            # The retry cannot be published or recorded, so the message returns to its queue.
            again = Reject(str(error), requeue=True)
        return again
