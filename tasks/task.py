"""The base class of all tasks: logging context, metrics, and the mapping of errors.

If the database cannot be reached, a wake-up is dropped (the sweeper issues it again) and a submission is retried. Any
other error of the domain fails the task with its code and message. The caller never receives a stack trace.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, TaskPredicate

from perdure.errors import PerdureError, Unavailable, loggable
from perdure.tasks import current_task
from perdure.tasks.arguments import described
from perdure.tasks.process import Process

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
_MOST_DOUBLINGS = 5


class Refused(Exception):
    """An error as the caller of a task receives it: its code and its message."""


class PerdureTask(Task):  # type: ignore[misc]
    """A task of perdure. `hint`: a lost message only causes a delay."""

    abstract = True
    hint = True
    Request = f"{__package__}.request:Request"
    """The class of the task's messages in a worker, which Celery imports."""

    @property
    def process(self) -> Process:
        """The parts that the tasks of this process share."""
        process: Process = self.app.perdure()
        return process

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task's function in its context."""
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
            raise self.refused(PerdureError("Something went wrong here; the operator's log says what.")) from None
        else:
            return result
        finally:
            self.process.metrics.count(self.name, clock.monotonic() - began, failed=failed)
            current_task.reset(token)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Publish the task, or a retry of it, with its arguments masked in events."""
        return super().apply_async(args, kwargs, **{**described(args, kwargs), **options})

    def refused(self, error: PerdureError) -> Exception:
        """Record `error` as the task's result; returns the exception to raise.

        Celery itself would store the traceback with the result, where the caller could read it.
        """
        refused = Refused(f"{error.code}: {error.message}")
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
            log.warning("%s; the sweeper will issue this again", error.message)
            ignored: Exception = Ignore()
            return ignored
        countdown = min(_FIRST_RETRY_S * 2.0 ** min(self.request.retries, _MOST_DOUBLINGS), _LONGEST_RETRY_S)
        again: Exception
        try:
            again = self.retry(exc=error, countdown=countdown, max_retries=None, throw=False)
        except Reject:
            # The broker or the result backend is unavailable, too: the message returns to its queue.
            again = Reject(str(error), requeue=True)
        return again
