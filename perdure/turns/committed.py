"""The committed state of a turn, for streaming clients: its messages so far, its status and its error."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from perdure.database.engine import Executor
from perdure.database.paging import PAGE_BYTES, PAGE_ROWS
from perdure.events.event import EventId
from perdure.sessions.reading import message_body
from perdure.turns import queries
from perdure.turns.reading import SETTLED, read_turn


@dataclass(frozen=True, slots=True)
class Committed:
    """A turn's state. `turn` is the body of `GET /v1/turns/{id}`: of another turn, if the turn's message joined it.

    `messages` is a page of the turn's `total` messages: it omits the first `after`, and may omit some at the end. Its
    form is that of `GET /v1/sessions/{id}/messages`.
    """

    turn: dict[str, Any]
    after: int
    messages: list[dict[str, Any]]
    total: int

    @property
    def turn_id(self) -> UUID:
        return UUID(self.turn["turn_id"])

    @property
    def count(self) -> int:
        """The number of the turn's messages up to the end of the page."""
        return self.after + len(self.messages)

    @property
    def is_last(self) -> bool:
        """Whether the page ends with the turn's last message."""
        return self.count >= self.total

    @property
    def settled(self) -> bool:
        return self.turn["status"] in SETTLED

    @property
    def error_id(self) -> EventId | None:
        """The id of a settled turn's `error` event; `None` if the turn has no error, or is not settled."""
        return EventId(self.total + 1) if self.settled and self.turn["error"] is not None else None

    @property
    def done_id(self) -> EventId:
        """The id of a settled turn's `done` event."""
        return EventId(self.total + (2 if self.error_id else 1))


def read_committed(executor: Executor, turn_id: UUID, after: int = 0) -> Committed:
    """Read a turn and a page of its messages after the first `after`: `PAGE_BYTES`, or one longer message.

    If the turn's message joined another turn, reads that turn.

    If the turn has fewer than `after` messages, the result's `after` is the number of the turn's messages.

    Raises:
        NotFound: there is no such turn.
    """
    # The turn is read before its messages. So if the turn is settled, the last page is complete.
    turn = read_turn(executor, turn_id)
    given = {"turn_id": UUID(turn["turn_id"]), "after": after, "most": PAGE_ROWS, "most_bytes": PAGE_BYTES}
    rows = executor.run(queries.MESSAGES_OF_TURN, given)
    total = rows[0].total if rows else 0
    messages = [message_body(row) for row in rows if row.seq is not None]
    return Committed(turn, min(after, total), messages, total)


def states_of(executor: Executor, turn_ids: Collection[UUID]) -> dict[UUID, tuple[object, ...]]:
    """For each turn, a value that changes whenever the turn's state or messages change."""
    rows = executor.run(queries.STATES, {"turn_ids": list(turn_ids)})
    return {row.turn_id: (row.status, row.attempts, row.tick, row.not_before, row.progress) for row in rows}
