"""Where `celery -A workers worker|beat|inspect|flower` finds the application."""

from __future__ import annotations

from celery import Celery

from perdure.schedules.beat import configure_beat
from perdure.settings import Settings
from perdure.workers import control as _control  # noqa: F401 (`celery inspect` knows a command once it is imported)
from perdure.workers.application import make_app
from perdure.workers.assembly import addresses, check
from perdure.workers.flower import settings as flowering
from perdure.workers.lifecycle import follow
from perdure.workers.shutdown import beat
from perdure.workers.shutdown.start_failure import exit_unless_startable

_CHECKED = frozenset({"worker", "beat", "flower"})
"""The commands that start a process of the installation. `inspect` and the like need the broker alone."""


def _make() -> Celery:
    """The application for the command that imports this module.

    Raises:
        SettingsError: a setting is wrong.
        Unavailable: an embedded server is meant and does not run.
    """
    settings = Settings.load()
    command = flowering.command()
    if command in _CHECKED:
        check(settings, asks_models=command == "worker", asks_embedder=command == "worker")
    if command == "flower":
        flowering.check_environment()
    where = addresses(settings, database=(command or flowering.STARTED.get()) != "flower")
    made = make_app(settings, where)
    follow(made, settings, where)
    beat.follow(settings.shutdown, where.database_url)
    configure_beat(made, settings)
    flowering.follow(made, settings)
    return made


with exit_unless_startable():
    app = _make()
