"""The notes of one channel: messages of chats that show the progress of turns' tools, and change in place.

A note is worth less than a reply, and both count towards the limits of the service. So notes have a share of their own
(`Channel.notes_a_second`), each note changes at most every `CHANGE_S` seconds, and all of them wait if the service asks
for a pause. A note that the service refuses is abandoned, and so is one whose first attempt is not confirmed, because
another attempt may show it twice.

Only this process knows the ids of its notes. If it is killed, they stay as they are, and no process changes them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from uuid import UUID

from perdure.channels.services.protocol import Channel, Place
from perdure.errors import PerdureError, loggable
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable

log = logging.getLogger(__name__)

CHANGE_S = 2.0
"""The least seconds between two changes of a note."""

GROUP_CHANGE_S = 6.0
"""The same in a group: Telegram permits 20 messages and changes a minute, and the replies are among them."""

_AGAIN_S = 5.0
_LEAST_BURST = 3.0
_MOST_REMOVALS = 3


@dataclass(eq=False, slots=True)
class _Note:
    """The note of one turn: the text to show, and the text, the id and the time of what is shown."""

    place: Place
    text: str
    shown: str = ""
    note_id: str | None = None
    changed_at: float = 0.0
    abandoned: bool = False
    removals: int = 0

    def is_due(self, now: float) -> bool:
        if self.abandoned or self.text == self.shown:
            return False
        pause_s = GROUP_CHANGE_S if self.place.group else CHANGE_S
        return self.note_id is None or now - self.changed_at >= pause_s


class Notes:
    """Shows notes on a channel. Not thread-safe. Each `now` is a time of the monotonic clock, in seconds."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._notes: dict[UUID, _Note] = {}
        self._over: list[_Note] = []
        """Notes to remove."""
        self._burst = max(_LEAST_BURST, channel.notes_a_second)
        self._calls = self._burst
        """The calls that the channel's share permits now, as of `_counted_at`."""
        self._counted_at = 0.0
        self._not_before = 0.0

    def want(self, turn_id: UUID, place: Place, text: str) -> None:
        """Show `text` in the turn's note, with the next `update` in which it is due."""
        note = self._notes.setdefault(turn_id, _Note(place, text))
        note.text = text

    def end(self, turn_id: UUID) -> None:
        """Remove the turn's note, with the next `update`."""
        note = self._notes.pop(turn_id, None)
        if note is not None and note.note_id is not None:
            self._over.append(note)

    def is_empty(self) -> bool:
        return not self._notes and not self._over

    def update(self, now: float) -> None:
        """Remove and change the notes that are due, as far as the limits permit: what waits longest first."""
        self._calls = min(self._burst, self._calls + (now - self._counted_at) * self._channel.notes_a_second)
        self._counted_at = now
        due = [*self._over, *sorted(self._due(now), key=lambda note: note.changed_at)]
        for note in due:
            if self._calls < 1 or now < self._not_before:
                return
            self._calls -= 1
            if note in self._over:
                self._remove(note, now)
            else:
                self._change(note, now)

    def clear(self) -> None:
        """Remove all notes now, because the process ends. After a failure, the other notes stay as they are."""
        for turn_id in list(self._notes):
            self.end(turn_id)
        while self._over and not self._remove(self._over[0], 0.0):
            pass

    def _due(self, now: float) -> list[_Note]:
        return [each for each in self._notes.values() if each.is_due(now)]

    def _change(self, note: _Note, now: float) -> None:
        text = note.text
        try:
            note.note_id = self._channel.show_note(note.place, text, note.note_id)
        except NotAsked as pause:
            self._pause(pause.retry_s, now)
        except Undeliverable as error:
            self._log("shown", error)
            note.abandoned = True
        except (DeliveryFailed, PerdureError) as error:
            self._log("shown", error)
            note.abandoned = note.note_id is None
            note.changed_at = now
            self._pause(_AGAIN_S, now)
        else:
            note.shown, note.changed_at = text, now

    def _remove(self, note: _Note, now: float) -> bool:
        """Remove a note; returns whether the service may fail for others, too."""
        note.removals += 1
        try:
            self._channel.remove_note(note.place, str(note.note_id))
        except Undeliverable as error:
            self._log("removed", error)
        except (DeliveryFailed, PerdureError) as error:
            self._log("removed", error)
            self._pause(error.retry_s if isinstance(error, NotAsked) else _AGAIN_S, now)
            if note.removals >= _MOST_REMOVALS:
                self._over.remove(note)
            return True
        self._over.remove(note)
        return False

    def _pause(self, seconds: float, now: float) -> None:
        """Make no calls for as long as the service asks, at least `_AGAIN_S` seconds."""
        self._not_before = now + max(seconds, _AGAIN_S)

    def _log(self, what: str, error: BaseException) -> None:
        log.info("a note on %s could not be %s: %s", self._channel.name, what, loggable(error))
