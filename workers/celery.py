"""The application for `celery -A perdure worker|beat|inspect|flower`."""

from __future__ import annotations

from celery import Celery

from perdure.assembly import addresses, check
from perdure.schedules.beat import configure_beat
from perdure.settings import Settings
from perdure.workers import control as _control  # noqa: F401 (registers the command `inspect perdure`)
from perdure.workers.celery_application import make_app
from perdure.workers.flower import settings as flower
from perdure.workers.lifecycle import follow
from perdure.workers.shutdown import beat
from perdure.workers.shutdown.start_failure import exit_unless_startable
from perdure.workers.threads import require_named_threads

_CHECKED = frozenset({"worker", "beat", "flower"})
"""The commands that check the settings. Other commands, such as `inspect`, need only the broker."""


def _make() -> Celery:
    """Make the application for the `celery` subcommand that this process runs.

    Raises:
        SettingsError: a setting is invalid, or a worker's pool has no threads.
        Unavailable: a server's address is not set, and the embedded server does not run.
    """
    require_named_threads()
    settings = Settings.load()
    command = flower.command()
    if command in _CHECKED:
        is_worker = command == "worker"
        check(settings, asks_models=is_worker, asks_embedder=is_worker, signs=is_worker)
    if command == "flower":
        flower.check_environment()
    where = addresses(settings, database=(command or flower.STARTED.get()) != "flower")
    made = make_app(settings, where)
    follow(made, settings, where)
    beat.follow(settings, where.database_url)
    configure_beat(made, settings)
    flower.follow(made, settings)
    return made


with exit_unless_startable():
    app = _make()
