"""Repeats the bot's typing indicator while a turn runs, because a service shows an indicator only for a few seconds.

The indicator is not shown while a turn waits for approval or is parked (waits without a worker). After a restart, this
process no longer repeats the indicators of turns that were accepted before the restart. The thread that repeats
indicators runs only while a turn needs one.
"""

from __future__ import annotations

import logging
import threading
from uuid import UUID

from perdure.channels.services import queries
from perdure.channels.services.protocol import Channel, Place
from perdure.errors import PerdureError, Unavailable, loggable
from perdure.runtime import Runtime
from perdure.turns.outbox import DeliveryFailed

log = logging.getLogger(__name__)

MOST_SHOWN = 200
"""The indicator is repeated for at most this many turns of a channel. For each further turn, it is shown only once."""

_SHARE = 0.8
"""The fraction of `Channel.typing_s` after which the indicator is repeated."""

_CLOSE_S = 5.0


class TypingIndicators:
    """The typing indicators of one channel. Thread-safe."""

    def __init__(self, runtime: Runtime, channel: Channel) -> None:
        self._runtime = runtime
        self._channel = channel
        self._shown: dict[UUID, Place] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, turn_id: UUID, place: Place) -> None:
        """Show the indicator now, and repeat it until the turn is settled."""
        if not self._channel.typing_s or not self._type(place):
            return
        with self._lock:
            if len(self._shown) >= MOST_SHOWN or self._closed.is_set():
                return
            self._shown[turn_id] = place
            if self._thread is None:
                name = f"typing on {self._channel.name}"
                self._thread = threading.Thread(target=self._keep_showing, name=name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop repeating the indicators; wait up to `_CLOSE_S` seconds for the thread."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)

    def _keep_showing(self) -> None:
        while not self._closed.wait(_SHARE * self._channel.typing_s):
            with self._lock:
                shown = dict(self._shown)
            try:
                running = self._still_running(shown)
            except Unavailable as error:
                log.info("the typing indicator on %s is not repeated: %s", self._channel.name, error.message)
                continue
            over = set(shown) - set(running)
            places = {(shown[each].chat, shown[each].thread): each for each, runs in running.items() if runs}
            over |= {each for each in places.values() if not self._type(shown[each])}
            with self._lock:
                for turn_id in over:
                    self._shown.pop(turn_id, None)
                if not self._shown:
                    self._thread = None
                    return

    def _still_running(self, shown: dict[UUID, Place]) -> dict[UUID, bool]:
        """For each unsettled turn in `shown`, whether the turn's status is `accepted` or `running`."""
        rows = self._runtime.database.run(queries.RUNNING, {"turn_ids": list(shown)})
        return {row.turn_id: row.status in {"accepted", "running"} for row in rows}

    def _type(self, place: Place) -> bool:
        """Show the indicator once; returns `False` if the service failed to show it or `close` has been called."""
        if self._closed.is_set():
            return False
        try:
            self._channel.typing(place)
        except (DeliveryFailed, PerdureError) as error:
            log.info("the typing indicator on %s could not be shown: %s", self._channel.name, loggable(error))
            return False
        return True
