"""How a session ends: requested, summarised, cleaned up, ended.

    active ─▶ summarizing ─▶ ending ─▶ ended

Each arrow is a commit under the session's fencing token, so that a crash in between is
resumed where it was and a stale process writes nothing. The model is called between two
commits, never inside one. A session ends only with no unsettled turn; later messages go to
the next session, which waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.errors import Conflict, NotFound, PerdureError, Unavailable
from perdure.models.protocol import Message, Model, Role
from perdure.sessions import queries
from perdure.sessions.summary import Summary, extract, summarise

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Attempts at a summary by the model; then it is extractive."""

MAX_MESSAGES = 400
"""Messages, the newest, that a summary is made of."""

_MARGIN_S = 15.0
_MOST_A_ROUND = 500


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is over, and waits to be consolidated."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The model could not summarise; it is tried again."""


@dataclass(frozen=True, slots=True)
class NotDue:
    """Not asked to end, not yet to be, ended already, or being ended elsewhere."""


Outcome = Ended | Postponed | NotDue


@dataclass(frozen=True, slots=True)
class Ender:
    """What ending a session takes. `clean` removes what is kept of it outside PostgreSQL."""

    database: Database
    clock: Clock
    model: Model
    timeout_s: float
    clean: Callable[[UUID], None]

    def end(self, session_id: UUID) -> Outcome:
        """Take the session to its end, from wherever it stands.

        Raises:
            Unavailable: the database or what is to be cleaned cannot be reached; it goes on later.
        """
        rows = self.database.run(
            queries.CLAIM_ENDING, {"session_id": session_id, "lease_s": self.timeout_s + _MARGIN_S}
        )
        if not rows:
            return NotDue()
        tenure = {"session_id": session_id, "token": rows[0].token}
        if rows[0].state == "summarizing":
            summary = self._summary(session_id, attempt=rows[0].end_attempts)
            if summary is None:
                self.database.run(queries.RELEASE_ENDING, tenure)
                return Postponed()
            saved = {"summary": summary.text, "key_topics": list(summary.key_topics), "extractive": summary.extractive}
            if not self.database.run(queries.SAVE_SUMMARY, {**tenure, **saved}):
                return NotDue()
        self.clean(session_id)
        return Ended() if self.database.run(queries.FINISH_ENDING, tenure) else NotDue()

    def _summary(self, session_id: UUID, attempt: int) -> Summary | None:
        conversation = read_conversation(self.database, session_id, MAX_MESSAGES)
        if not conversation:
            return Summary("", (), extractive=True)
        if attempt > MAX_ATTEMPTS:
            return extract(conversation)
        try:
            return summarise(self.model, self.clock, self.timeout_s, conversation)
        except Unavailable:
            raise
        except PerdureError as error:
            log.warning("session %s could not be summarised (attempt %d): %s", session_id, attempt, error.message)
            return extract(conversation) if attempt == MAX_ATTEMPTS else None


def request_end(database: Database, session_id: UUID, reason: str) -> bool:
    """Ask for a session to end; whether it can begin to now (else its turns are run first).

    Raises:
        NotFound: there is no such session.
        Conflict: it has ended, or is ending.
    """
    rows = database.run(queries.REQUEST_END, {"session_id": session_id, "reason": reason})
    if rows:
        return bool(rows[0].unsettled == 0)
    if not database.run(queries.READ, {"session_id": session_id}):
        raise NotFound("There is no such session.")
    raise Conflict("That session has ended already.")


def expire_idle(database: Database, idle_s: float) -> list[UUID]:
    """Ask for the sessions to end in which nothing happened for `idle_s` seconds; returns them."""
    rows = database.run(queries.EXPIRE_IDLE, {"idle_s": idle_s, "most": _MOST_A_ROUND})
    return [row.session_id for row in rows]


def endings_due(database: Database, most: int, backoff_s: float) -> list[UUID]:
    """Sessions that should be ending and that nobody is at work on."""
    rows = database.run(queries.ENDINGS_DUE, {"most": most, "backoff_s": backoff_s})
    return [row.session_id for row in rows]


def read_conversation(database: Database, session_id: UUID, most: int) -> list[Message]:
    """The newest `most` messages of a session, oldest first."""
    rows: Any = database.run(queries.NEWEST_MESSAGES, {"session_id": session_id, "most": most})
    return [Message(Role(row.role), row.content) for row in reversed(rows)]
