"""`perdure.install(app)`: adds perdure to an application's own Celery application.

`install` opens no connection, starts no thread, and loads no task: only a worker of perdure loads the tasks. Any
process may publish them by name. The application may be configured after `install`, since perdure's parts are added
later: queues and routes when Celery creates those of the application, beat's entries when beat starts.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from perdure.application.queues import add_queues
from perdure.application.schedule import add_entries
from perdure.errors import SettingsError
from perdure.host import forget, note
from perdure.settings import Settings
from perdure.text import declarations
from perdure.tools.around import AroundCall, set_around_call


def install(app: Celery, *, around_call: AroundCall | None = None) -> None:
    """Add perdure's queues, routes, beat entries and boot step for workers to `app`. Idempotent.

    `around_call` is a function that returns a context manager, such as Flask's `app.app_context`. perdure enters it
    around each call of a tool, a probe, a hook, an approver and the gateway's `authenticate` in this process. Django's
    connections are closed without it.

    `celery -A MODULE worker -Q turns,ingress,deliveries,sessions,memory,maintenance -P threads -c 100` then starts a
    worker of perdure. The worker reads perdure's settings from the environment, and uses the application's broker.

    Raises:
        SettingsError: a setting or `around_call` is invalid. If the application has a queue with the name of one of
            perdure's queues, the error is raised when Celery creates the queues. If the application has a task with the
            name of one of perdure's tasks, the error is raised when a worker of perdure starts.

    Example:
        >>> app = Celery("shop", broker="redis://localhost")
        >>> install(app)
        >>> sorted(app.amqp.queues)
        ['celery', 'deliveries', 'ingress', 'maintenance', 'memory', 'sessions', 'turns']
    """
    declarations.require(isinstance(app, Celery), "perdure.install()", "app", app, "a Celery application")
    settings = Settings.load()
    if around_call is not None:
        set_around_call(around_call)
    if not note(app):
        return
    try:
        add_queues(app)
        add_entries(app, settings)
    except BaseException:
        forget(app)
        raise
    app.perdure = NotAWorker()
    app.perdure_settings = settings
    app.steps["worker"].add("perdure.application.step:InstalledStep")


class NotAWorker:
    """The value of `app.perdure` in a process that is not a worker of perdure."""

    def __call__(self) -> Any:
        """Refuse to run a task.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            "this process is no worker of perdure, so it cannot run perdure's tasks: start one with "
            "`celery -A MODULE worker -Q turns,ingress,deliveries,sessions,memory,maintenance -P threads`"
        )
