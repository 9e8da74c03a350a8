"""The Celery applications of this process to which perdure was added, and their agents.

The agents are loaded after setting up the application that they belong to, as Celery sets it up for a worker.

The module of `PERDURE_AGENTS` may need its application: models of Django need `django.setup()`, which Celery's fixup
for Django calls, and other applications use a loader of their own or the signal `import_modules`. In a worker of the
application, Celery has set the application up. All other processes that load the agents do it here.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakSet

from celery import Celery

from perdure.adapters.adopt import collect
from perdure.agents import Agents
from perdure.errors import SettingsError
from perdure.text.untrusted import error_summary

_installed: WeakSet[Celery] = WeakSet()
"""The applications of this process to which `perdure.install` added perdure."""


def note(app: Celery) -> bool:
    """Record that perdure is added to `app`; returns False if `app` is already recorded."""
    is_new = app not in _installed
    _installed.add(app)
    return is_new


def forget(app: Celery) -> None:
    _installed.discard(app)


def installed() -> Celery | None:
    """The application of this process to which perdure was added; `None` unless there is exactly one."""
    found = list(_installed)
    return found[0] if len(found) == 1 else None


def load_agents(path: str) -> Agents:
    """Set up the application of the module `path`, import the module, and collect its agents.

    The application is the one to which the module, or a package that contains it, adds perdure. If there is none, the
    environment decides: `DJANGO_SETTINGS_MODULE` and `CELERY_LOADER` have their effects.

    Raises:
        SettingsError: the application cannot be set up, or see `Agents.from_module`.
    """
    package = path.rpartition(".")[0]
    if package:
        with suppress(Exception):  # `from_module` imports the package again, and reports the error
            importlib.import_module(package)
    _set_up()
    try:
        agents = Agents.from_module(path, collect)
    except SettingsError:
        if not _set_up():  # the module may have imported its application before the import failed
            raise
        return Agents.from_module(path, collect)
    _set_up()
    return agents


def _set_up() -> bool:
    """Set up the applications of this process; returns whether one of them was not set up before.

    Raises:
        SettingsError: an application cannot be set up.
    """
    fresh = [app for app in list(_installed) or [_bare()] if not app.loader.worker_initialized]
    for app in fresh:
        try:
            app.loader.init_worker()
        except Exception as error:
            raise SettingsError(
                f"the Celery application {app.main!r} cannot be set up: {error_summary(error)}"
            ) from error
    return bool(fresh)


class _Bare(Celery):  # type: ignore[misc]  # celery carries no types
    def set_default(self) -> None:
        """Do nothing. Celery's fixup for Django would make this the default application of the process."""


@cache
def _bare() -> Any:
    """An application without settings. Its fixups and its loader are those of the environment."""
    return _Bare("perdure", set_as_current=False)
