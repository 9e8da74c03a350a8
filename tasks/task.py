"""The one task class: what every task has and none of them repeats.

Logging context, metrics, and the mapping of errors: a database that cannot be reached is no
failure of a wake-up (the sweeper issues it again) and a reason to try a submission again;
any other error of the domain fails the task with its code and sentence, and no stack trace
of ours reaches the caller.
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
    """What a caller of a task sees of an error: its code and its sentence."""


class PerdureTask(Task):  # type: ignore[misc]
    """A task of perdure. `hint` says that losing it costs speed and nothing else."""

    abstract = True
    hint = True
    Request = f"{__package__}.request:Request"
    """The class of its messages in a worker, which Celery imports there."""

    @property
    def process(self) -> Process:
        """What the tasks of this process share."""
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
            raise self._later(error) from None  # Celery stores the traceback of what is tried again, causes and all
        except TaskPredicate:
            raise
        except PerdureError as error:
            log.info("refused: %s", loggable(error))
            raise self.refused(error) from None
        except Exception:
            log.exception("the task met an error")
            raise self.refused(PerdureError("Something went wrong here; the operator's log says what.")) from None
        else:
            return result
        finally:
            self.process.metrics.count(self.name, clock.monotonic() - began, failed=failed)
            current_task.reset(token)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Publish the task, or publish it again, with its arguments hidden from those who watch."""
        return super().apply_async(args, kwargs, **{**described(args, kwargs), **options})

    def refused(self, error: PerdureError) -> Exception:
        """What to raise for an error that the caller is told of.

        It is recorded here: Celery would store the traceback beside it, for the caller to read.
        """
        refused = Refused(f"{error.code}: {error.message}")
        self.backend.mark_as_failure(
            self.request.id, refused, request=self.request, store_result=not self.ignore_result
        )
        self.send_event("task-failed", exception=repr(refused), traceback="")
        ignored: Exception = Ignore()
        return ignored

    def perform(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task's function. A kind of task that does something around that overrides this."""
        return super().__call__(*args, **kwargs)

    def _later(self, error: Unavailable) -> Exception:
        if self.hint:
            log.warning("%s; the sweeper will issue this again", error.message)
            ignored: Exception = Ignore()
            return ignored
        countdown = min(_FIRST_RETRY_S * 2.0 ** min(self.request.retries, _MOST_DOUBLINGS), _LONGEST_RETRY_S)
        again: Exception
        try:
            again = self.retry(exc=error, countdown=countdown, max_retries=None, throw=False)
        except Reject:
            # The broker or the result backend is away too: the message stays where it is.
            again = Reject(str(error), requeue=True)
        return again
