"""Runs the channels that connect to their service: Discord's gateway, Slack's Socket Mode and Telegram's long polling.

For each channel, one process of the installation listens. That process holds an advisory lock of PostgreSQL. The other
processes try to take the lock every `_LOOK_S` seconds.

If the database connection that holds the lock breaks, the first process continues to listen, and a second process may
begin to listen. Both processes then listen until one of them restarts. Message ids deduplicate the messages that both
processes receive.

While the database is unavailable, the process retries the same update, so updates stay in order. If a file or a history
cannot be read, `Ingress` limits the attempts, so that the updates of other people arrive. The process retries a failed
connection to a service with exponential back-off.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from perdure.channels.services.ingress import Ingress
from perdure.channels.services.protocol import Channel, Update
from perdure.database.engine import Database
from perdure.errors import Unavailable

log = logging.getLogger(__name__)

_LOOK_S = 5.0
_AGAIN_S = 1.0
_LONGEST_PAUSE_S = 60.0


class Listening:
    """Listens on each of `channels` in a separate thread, from `start` to `stop`."""

    def __init__(self, database: Database, channels: Sequence[tuple[Channel, Ingress]]) -> None:
        self._database = database
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_listening, args=each, name=f"channel {each[0].name}", daemon=True)
            for each in channels
        ]

    @property
    def any(self) -> bool:
        return bool(self._threads)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether all threads run. A thread ends only with `stop`, or by a fault."""
        return all(thread.is_alive() for thread in self._threads)

    def stop(self, within_s: float) -> bool:
        """Request a stop and wait up to `within_s` seconds for each thread; returns whether all threads have ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join(within_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _keep_listening(self, channel: Channel, ingress: Ingress) -> None:
        pause_s = _AGAIN_S
        while not self._stop.is_set():
            try:
                with self._database.lock(f"perdure channel {channel.name}") as mine:
                    if mine:
                        log.info("listening on %s", channel.name)
                        began = time.monotonic()
                        try:
                            channel.listen(lambda update: self._take(ingress, update), self._stop)
                        finally:
                            if time.monotonic() - began > _LONGEST_PAUSE_S:
                                pause_s = _AGAIN_S
                        continue
                self._stop.wait(_LOOK_S)
            except Unavailable as error:
                log.warning("cannot listen on %s: %s; retrying in %g s", channel.name, error.message, pause_s)
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except Exception:  # a channel's library may raise any error: retry the connection
                log.exception("listening on %s failed; retrying in %g s", channel.name, pause_s)
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _take(self, ingress: Ingress, update: Update) -> None:
        while True:
            try:
                return ingress.take(update)
            except Unavailable as error:
                log.warning("an update is retried, and later ones wait: %s", error.message)
                if self._stop.wait(_AGAIN_S):
                    raise
