"""Tasks that are no hints survive an outage of the database, however long."""

from __future__ import annotations

from celery import Celery
from celery.exceptions import Retry

from perdure.errors import Unavailable
from perdure.tasks.task import PerdureTask

MANY = 1_000


class _Submission(PerdureTask):
    name = "turns.submit"
    hint = False

    def run(self, **message: object) -> None:
        """Accept nothing."""


def test_a_submission_is_retried_without_a_limit() -> None:
    """Celery's default is three retries: an outage of eight seconds would lose the message."""
    app = Celery("retried", broker="memory://", backend="cache+memory://", set_as_current=False)
    task = app.register_task(_Submission())
    task.push_request(id="submitted", retries=MANY, called_directly=False, args=(), kwargs={"text": "hello"})
    try:
        again = task._retry_or_ignore(Unavailable("The database cannot be reached."))
    finally:
        task.pop_request()
        app.close()
    assert isinstance(again, Retry)
