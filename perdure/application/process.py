"""The parts of perdure that one process of an application uses: settings, a publisher of wake-ups, a database."""

from __future__ import annotations

import atexit
import heapq
import logging
import os
import threading
import time
from functools import cached_property

from perdure.access.tenants import UserKey
from perdure.application.queues import broker_url, publisher
from perdure.assembly import Addresses, addresses, database_address, open_database
from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.errors import loggable
from perdure.host import installed
from perdure.settings import Settings
from perdure.turns.reading import SettlementWatch
from perdure.workers.publish.background import BackgroundWaker

log = logging.getLogger(__name__)

_lock = threading.Lock()
_parts: dict[int, Parts] = {}

_LATER_S = (0.02, 0.5)
"""The delays, in seconds, of two wake-ups. The second is for a commit that takes longer than the first delay."""


class Parts:
    """Settings, and a publisher and a database that are opened on first use. A forked child creates its own `Parts`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = SystemClock()
        self._publishing: BackgroundWaker | None = None
        self._changed = threading.Condition()
        self._later: list[tuple[float, tuple[UserKey, ...]]] = []
        self._thread: threading.Thread | None = None

    @cached_property
    def database(self) -> Database:
        """Perdure's database, on a connection pool separate from the application's.

        Raises:
            Unavailable: `PERDURE_DATABASE_URL` is unset, and no embedded PostgreSQL runs.
        """
        return open_database(self.settings, database_address(self.settings))

    @cached_property
    def watch(self) -> SettlementWatch:
        return SettlementWatch(self.database)

    @property
    def waker(self) -> BackgroundWaker | None:
        """The publisher of wake-ups. If it cannot be created, logs the error and returns `None`."""
        if self._publishing is not None:
            return self._publishing
        try:
            if (app := installed()) is None:
                waker = BackgroundWaker(self.settings, addresses(self.settings, database=False))
            else:
                where = Addresses("postgresql://", "", broker_url(app))
                waker = BackgroundWaker(self.settings, where, publisher(app))
        except Exception as error:  # noqa: BLE001 (the message is committed; the application's commit must not fail)
            log.warning("%s Messages are routed by the sweeper.", loggable(error))
            return None
        atexit.register(waker.close)
        self._publishing = waker
        return waker

    def wake(self, *users: UserKey) -> None:
        """Publish a wake-up (a `turns.route` task) for each user key. Does not wait for the broker. Never raises."""
        try:
            if (waker := self.waker) is not None:
                for user in users:
                    waker.publish("turns.route", {"user": user}, queue="ingress")
        except Exception:
            log.exception("a wake-up is not published; the sweeper routes the messages")

    def wake_soon(self, *users: UserKey) -> None:
        """Call `wake` in a thread after each delay in `_LATER_S`, for messages that commit soon. Never raises."""
        if not users:
            return
        try:
            with self._changed:
                for seconds in _LATER_S:
                    heapq.heappush(self._later, (time.monotonic() + seconds, users))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._wake_later, name="perdure-wake", daemon=True)
                    self._thread.start()
                self._changed.notify()
        except RuntimeError as error:  # no thread can be started
            self._thread = None
            log.warning("a wake-up is not published (%s); the sweeper routes the messages", loggable(error))

    def _wake_later(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._later)
                wait_s = self._later[0][0] - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                _, users = heapq.heappop(self._later)
            self.wake(*users)


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 (a fork may have copied it while another thread held it)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def parts() -> Parts:
    """The `Parts` of this process, created on the first call.

    Raises:
        SettingsError: a setting is invalid.
    """
    pid = os.getpid()
    with _lock:
        if pid not in _parts:
            _parts.clear()  # after a fork: the parent's `Parts`, whose connections a child must not use
            _parts[pid] = Parts(Settings.load())
        return _parts[pid]
