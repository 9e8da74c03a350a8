"""Shows in a chat that a turn runs: repeats the bot's typing indicator, and shows the progress of tools in a note.

A service shows an indicator only for a few seconds, so it is repeated. The progress of a tool is read from the turn's
event stream, and that of a Celery task from the database. Neither is shown while a turn waits for a person, a time or a
model. When the turn is settled, its note is removed.

One thread for each channel does this, in rounds of `LOOK_S` seconds, and only while turns are followed. A process that
ends removes its notes. After a kill, the notes stay as they are. In both cases, no process follows these turns further:
their indicators are not repeated.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.channels.services import queries
from perdure.channels.services.notes import Notes
from perdure.channels.services.protocol import MOST_NOTE_CHARS, Channel, Place
from perdure.errors import PerdureError, Unavailable, loggable
from perdure.events.progress import Progress, ProgressReader
from perdure.runtime import Runtime
from perdure.text.untrusted import first_line
from perdure.tools.progress import MAX_CHARS
from perdure.turns.outbox import DeliveryFailed

log = logging.getLogger(__name__)

MOST_SHOWN = 200
"""At most this many turns of a channel are followed. For each further turn, the indicator is shown only once."""

LOOK_S = 1.0
"""Seconds between two looks at the followed turns, if one of them runs."""

_IDLE_S = 5.0
"""The same, if all of them wait."""

_SHARE = 0.8
"""The fraction of `Channel.typing_s` after which the indicator is repeated."""

_TYPES = frozenset({"accepted", "running"})
"""The statuses of a turn for which the bot types."""

_MOST_LINES = 4
_CLOSE_S = 5.0


@dataclass(eq=False, slots=True)
class _Shown:
    """A followed turn. `runs` is false while it waits for anything else than a task or an agent."""

    place: Place
    types: bool
    notes: bool
    typed_at: float
    progress: Progress = field(default_factory=Progress)
    runs: bool = True


class Indicators:
    """The typing indicators and the notes of one channel. Thread-safe."""

    def __init__(self, runtime: Runtime, channel: Channel) -> None:
        self._runtime = runtime
        self._channel = channel
        self._notes = Notes(channel)
        self._shown: dict[UUID, _Shown] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._added = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, turn_id: UUID, place: Place, *, own: bool = True) -> bool:
        """Show the typing indicator now, and follow the turn until it is settled; returns whether the bot types.

        `own`: the message has a turn of its own. Only the process that accepted the first message of a turn shows notes
        about it, so that the chat never has two of them.
        """
        types = bool(self._channel.typing_s) and place.token is None  # the service shows that an interaction is pending
        if types:
            types = self._type(place)
        with self._lock:
            if self._closed.is_set() or turn_id in self._shown or not self._has_room():
                return types
            self._shown[turn_id] = _Shown(place, types, own, time.monotonic())
            self._added.set()
            if self._thread is None:
                name = f"typing on {self._channel.name}"
                self._thread = threading.Thread(target=self._keep_showing, name=name, daemon=True)
                self._thread.start()
        return types

    def close(self) -> None:
        """Stop following turns, and remove the notes; wait up to `_CLOSE_S` seconds for the thread."""
        self._closed.set()
        self._added.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)

    def _has_room(self) -> bool:
        """Whether another turn may be followed; makes room by the oldest turn that waits, if there is one."""
        if len(self._shown) < MOST_SHOWN:
            return True
        waiting = next((turn_id for turn_id, each in self._shown.items() if not each.runs), None)
        if waiting is not None:
            del self._shown[waiting]
        return waiting is not None

    def _keep_showing(self) -> None:
        url, settings = self._runtime.redis_url, self._runtime.settings
        reader = None if url is None else ProgressReader(url, settings.redis_prefix, self._runtime.clock)
        try:
            self._run(reader)
        finally:
            if reader is not None:
                reader.close()

    def _run(self, reader: ProgressReader | None) -> None:
        pause_s = min(LOOK_S, _SHARE * self._channel.typing_s or LOOK_S)
        while not self._closed.wait(pause_s):
            self._added.clear()
            with self._lock:
                shown = dict(self._shown)
            try:
                over = self._round(shown, reader)
            except Unavailable as error:
                log.info("indicators on %s are not repeated: %s", self._channel.name, error.message)
                continue
            except Exception:  # a channel's library may raise any error: the next round may succeed
                log.exception("indicators on %s failed", self._channel.name)
                continue
            with self._lock:
                for turn_id in over:
                    self._shown.pop(turn_id, None)
                if not self._shown and self._notes.is_empty():
                    self._thread = None
                    return
                waits = self._notes.is_empty() and not any(each.runs for each in self._shown.values())
            if waits and not self._closed.is_set():
                self._added.wait(_IDLE_S)
        self._notes.clear()

    def _round(self, shown: dict[UUID, _Shown], reader: ProgressReader | None) -> set[UUID]:
        """Repeat the indicators and change the notes that are due; returns the turns that are over."""
        rows = {row.turn_id: row for row in self._runtime.database.run(queries.FOLLOWED, {"turn_ids": list(shown)})}
        for turn_id, row in rows.items():
            each = shown[turn_id]
            each.runs = row.status in _TYPES or row.awaited is not None
            each.notes = each.notes and not row.joined
        now = time.monotonic()
        self._repeat([shown[turn_id] for turn_id, row in rows.items() if row.status in _TYPES], now)
        noted = {turn_id: each for turn_id, each in shown.items() if turn_id in rows and each.runs and each.notes}
        if reader is not None:
            reader.read([(turn_id, each.progress) for turn_id, each in noted.items() if _has_begun(rows[turn_id])])
        for turn_id, each in shown.items():
            if turn_id not in noted:
                self._notes.end(turn_id)
            elif text := _text(each.progress, rows[turn_id]):
                self._notes.want(turn_id, each.place, text)
        self._notes.update(now)
        return set(shown) - set(rows)

    def _repeat(self, typing: list[_Shown], now: float) -> None:
        """Show the typing indicator once in each of the places in which it is about to end."""
        places = {(each.place.chat, each.place.thread): each for each in typing if each.types}
        for each in places.values():
            if now - each.typed_at >= _SHARE * self._channel.typing_s:
                each.typed_at, each.types = now, self._type(each.place)

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


def _has_begun(row: Row[Any]) -> bool:
    return bool(row.status != "accepted")


def _text(progress: Progress, row: Row[Any]) -> str:
    """The text of a turn's note: a line for each of the newest calls; empty if none has reported."""
    awaited = [(tool, text) for tool, text in row.awaited or () if text is not None]
    calls = awaited or list(progress.calls.values())
    lines = [
        first_line(f"{tool}: {first_line(text, MAX_CHARS)}", MOST_NOTE_CHARS // _MOST_LINES - 1) for tool, text in calls
    ]
    return "\n".join(lines[-_MOST_LINES:])
