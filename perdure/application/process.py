"""The parts of perdure that one process of an application uses: settings, a publisher, a database."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from functools import cached_property

from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.errors import Unavailable
from perdure.settings import Settings
from perdure.turns.reading import SettlementWatch
from perdure.workers.assembly import Addresses, addresses, database_address, open_database
from perdure.workers.installed.queues import broker_url, installed, publisher
from perdure.workers.publish.background import BackgroundWaker

log = logging.getLogger(__name__)

_lock = threading.Lock()
_parts: dict[int, Parts] = {}


class Parts:
    """Made at first use. A forked child makes its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = SystemClock()

    @cached_property
    def database(self) -> Database:
        """Perdure's database, on connections of its own.

        Raises:
            Unavailable: `PERDURE_DATABASE_URL` is unset, and no embedded PostgreSQL runs.
        """
        return open_database(self.settings, database_address(self.settings))

    @cached_property
    def watch(self) -> SettlementWatch:
        """Waits for settled turns."""
        return SettlementWatch(self.database)

    @cached_property
    def _waker(self) -> BackgroundWaker | None:
        try:
            if (app := installed()) is None:
                waker = BackgroundWaker(self.settings, addresses(self.settings, database=False))
            else:
                where = Addresses("postgresql://", "", broker_url(app))
                waker = BackgroundWaker(self.settings, where, publisher(app))
        except Unavailable as error:
            log.warning("%s Messages are routed by the sweeper.", error.message)
            return None
        atexit.register(waker.close)
        return waker

    def wake(self, *users: str) -> None:
        """Wake workers to route the messages of users, given by their keys. Does not wait for the broker."""
        if (waker := self._waker) is not None:
            for user in users:
                waker.publish("turns.route", {"user": user}, queue="ingress")


def parts() -> Parts:
    """This process's parts.

    Raises:
        SettingsError: a setting is invalid.
    """
    pid = os.getpid()
    with _lock:
        if pid not in _parts:
            _parts.clear()  # a parent's, whose connections are the parent's
            _parts[pid] = Parts(Settings.load())
        return _parts[pid]
