"""The wake-ups that a round of the sweeper publishes: for due sessions, endings and deliveries.

Of each kind, a round publishes at most `most` wake-ups at first, and further ones as workers take those. So a backlog
is woken at the speed of the workers, and without workers the broker's queues stay short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from perdure.runtime import Runtime
from perdure.sessions.ending import endings_due
from perdure.turns import outbox, queries
from perdure.turns.lease import queries as lease_queries
from perdure.turns.lease import user_share, wait_for_model
from perdure.turns.lease.pace import Paces

T = TypeVar("T")


class WakeSource(Protocol[T]):
    """What may be due: sessions, endings or deliveries."""

    def find(self, most: int) -> tuple[list[T], bool]:
        """What is due, at most `most`, and whether more is probably due. Counts the wake-ups as published."""
        ...

    def publish(self, one: T, /) -> bool:
        """Publish the wake-up of `one`; returns whether the broker accepted it."""
        ...

    def requeue(self, refused: list[T]) -> None:
        """Undo `find` for what the broker refused."""
        ...

    def untaken(self, pending: list[T]) -> list[T]:
        """What no worker has taken among `pending`, whose wake-ups were published."""
        ...


@dataclass(slots=True)
class Wakes(Generic[T]):
    """The wake-ups of one kind during a round.

    Attributes:
        source: What may be due.
        most: The most published wake-ups that no worker has taken.
        published: The number of published wake-ups.
        refused: The number of wake-ups that the broker refused.
        is_full: Whether more is probably due.
    """

    source: WakeSource[T]
    most: int
    published: int = 0
    refused: int = 0
    is_full: bool = False
    _pending: list[T] = field(default_factory=list)

    def wake(self) -> None:
        """Publish wake-ups, if workers have taken most of the earlier ones."""
        if self._pending:
            self._pending = self.source.untaken(self._pending)
        room = self.most - len(self._pending)
        if self._pending and room <= self.most // 4:
            return
        found, self.is_full = self.source.find(room)
        begun = sum(1 for _ in takewhile(self.source.publish, found))
        if found[begun:]:
            self.source.requeue(found[begun:])
        self._pending += found[:begun]
        self.published += begun
        self.refused += len(found) - begun


class _Sessions:
    """What the sources of sessions share: which sessions no worker has taken."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked_at: datetime | None = None

    def _note_time(self) -> None:
        """Remember the time before the wake-ups are published, after which a worker may change a session's row."""
        self._asked_at = self._runtime.database.run(queries.NOW, {})[0].now

    def _untaken(self, sessions: list[UUID]) -> set[UUID]:
        given = {
            "session_ids": sessions,
            "asked_at": self._asked_at,
            "lease_s": self._runtime.settings.turn.lease_s,
        }
        return {row.session_id for row in self._runtime.database.run(queries.UNTAKEN, given)}


@dataclass(frozen=True, slots=True)
class _Due:
    """A session whose turn is woken, with its effective priority. `drains`: any drain takes the session."""

    session_id: UUID
    priority: int
    drains: bool = False


class _Turns(_Sessions):
    """Sessions whose turns are woken."""

    def publish(self, one: _Due, /) -> bool:
        wake = self._runtime.wake.drain if one.drains else self._runtime.wake.session
        return wake(one.session_id, one.priority)

    def requeue(self, refused: list[_Due]) -> None:
        self._runtime.database.run(queries.UNWAKE, {"session_ids": [each.session_id for each in refused]})

    def untaken(self, pending: list[_Due]) -> list[_Due]:
        """See `WakeSource.untaken`."""
        left = self._untaken([each.session_id for each in pending])
        return [each for each in pending if each.session_id in left]


class DueSessions(_Turns):
    """Sessions whose turn no worker runs. `turns`: whether turns run.

    While enough wake-ups wait at the broker, a round wakes only the first one of those that any drain takes. It starts
    a drain even if the messages that wait start none, for example because another application has published them.
    """

    def __init__(self, runtime: Runtime, paces: Paces, *, turns: bool) -> None:
        super().__init__(runtime)
        self._paces = paces
        self._turns = turns
        self._has_woken_first = False

    def find(self, most: int) -> tuple[list[_Due], bool]:
        """The due sessions; see `WakeSource.find`."""
        limits, database = self._runtime.settings.turn, self._runtime.database
        now = self._runtime.clock.now()
        self._paces.observe(now)
        drained = self._runtime.wake.has_enough()
        rows = database.run(
            queries.WAKE_DUE,
            {
                "most": most if self._turns else 0,
                "most_paced": wait_for_model.MOST_A_ROUND,
                "paces": self._paces.rooms(),
                "backoff_s": limits.sweep_s,
                "lease_s": limits.lease_s,
                "aging_s": limits.priority_aging_s,
                "drained": drained,
            },
        )
        parked: dict[str, list[UUID]] = {}
        for row in rows:
            if row.model is not None:
                parked.setdefault(row.model, []).append(row.session_id)
        is_full = self._paces.wake(parked, now)
        due = [_Due(row.session_id, row.priority) for row in rows]
        is_full = is_full or len(due) >= most
        if drained and self._turns and not self._has_woken_first:
            self._has_woken_first = True
            rows = database.run(lease_queries.NEXT_DUE, {"aging_s": limits.priority_aging_s})
            due += [_Due(row.session_id, row.priority) for row in rows]
        if is_full and due:
            self._note_time()
        return due, is_full


class QueuedSessions(_Turns):
    """Queued sessions of users with free places. `turns`: whether turns run."""

    def __init__(self, runtime: Runtime, *, turns: bool) -> None:
        super().__init__(runtime)
        self._turns = turns

    def find(self, most: int) -> tuple[list[_Due], bool]:
        """Admit the sessions; see `WakeSource.find`."""
        if not self._turns:
            return [], False
        limits = self._runtime.settings.turn
        rows = user_share.admit_due(self._runtime.database, limits.user_concurrency, most, limits.priority_aging_s)
        due = [_Due(row.session_id, row.priority, drains=row.is_drainable) for row in rows]
        if len(due) >= most:
            self._note_time()
        return due, len(due) >= most


class DueEndings(_Sessions):
    """Sessions whose end was requested and that have no unsettled turn."""

    def find(self, most: int) -> tuple[list[UUID], bool]:
        """See `WakeSource.find`."""
        limits = self._runtime.settings.turn
        due = endings_due(self._runtime.database, most, limits.sweep_s, limits.lease_s)
        if len(due) >= most:
            self._note_time()
        return due, len(due) >= most

    def publish(self, one: UUID, /) -> bool:
        return self._runtime.wake.ending(one)

    def requeue(self, refused: list[UUID]) -> None:
        self._runtime.database.run(queries.UNWAKE, {"session_ids": refused})

    def untaken(self, pending: list[UUID]) -> list[UUID]:
        """See `WakeSource.untaken`."""
        left = self._untaken(pending)
        return [each for each in pending if each in left]


class DueDeliveries:
    """Deliveries that are due, with an equal share for each service."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def find(self, most: int) -> tuple[list[UUID], bool]:
        """See `WakeSource.find`."""
        due = outbox.due(self._runtime.database, most, self._runtime.settings.turn.sweep_s)
        return due, len(due) >= most

    def publish(self, one: UUID, /) -> bool:
        return self._runtime.wake.delivery(one)

    def requeue(self, refused: list[UUID]) -> None:
        outbox.requeue(self._runtime.database, refused)

    def untaken(self, pending: list[UUID]) -> list[UUID]:
        return outbox.untaken(self._runtime.database, pending)
