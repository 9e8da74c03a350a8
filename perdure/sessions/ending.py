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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Row

from perdure.clock import Clock
from perdure.database.engine import Database, Executor
from perdure.database.fencing import Fence
from perdure.errors import Conflict, NotFound, PerdureError, Unavailable, loggable
from perdure.models.protocol import CallAborted, Message, Model, ModelCall, Role
from perdure.sessions import queries
from perdure.sessions.states import State
from perdure.sessions.summary import Summary, extract, summarise

log = logging.getLogger(__name__)

IDLE = "idle"
"""The reason for an end that nobody asked for."""

MAX_ATTEMPTS = 3
"""Attempts at a summary by the model; then it is extractive."""

MAX_MESSAGES = 400
"""Messages, the newest, that a summary is made of."""

_OWNER = "ending"
_MOST_A_ROUND = 500


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is over, and waits to be consolidated."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """There is no summary yet, or what is to be cleaned cannot be reached; it is tried again."""


@dataclass(frozen=True, slots=True)
class HandedOn:
    """This process shuts down, and has given the session back as it was: somebody else may go on at once."""


@dataclass(frozen=True, slots=True)
class NotDue:
    """Not asked to end, not yet to be, ended already, or being ended elsewhere."""


Outcome = Ended | Postponed | HandedOn | NotDue


class Waker(Protocol):
    """Whoever hears that a session may go on. Hints, which may be lost: the sweeper issues them again."""

    def session(self, session_id: UUID, priority: int) -> bool:
        """It has turns to run."""
        ...

    def ending(self, session_id: UUID) -> bool:
        """It has none left, and is to end."""
        ...


@dataclass(frozen=True, slots=True)
class Requested:
    """An end is asked for. Whoever asked is to wake those whom that sets free, once it is committed.

    `may_end` says that it can begin now, else the session's turns are run first; `freed` is the priority
    of the one that waited for a person and waits no more.
    """

    session_id: UUID
    may_end: bool
    freed: int | None

    def wake(self, waker: Waker) -> None:
        """Have a worker end the session, or go on with its turn; where a turn runs, its runner sees to both."""
        if self.may_end:
            waker.ending(self.session_id)
        elif self.freed is not None:
            waker.session(self.session_id, self.freed)


class Hold(Protocol):
    """What ending a session knows of its lease, which somebody else keeps."""

    def step_within(self, seconds: float) -> None:
        """The step that begins now ends within `seconds`; later, its lease is not renewed."""
        ...

    def calling(self, call: ModelCall) -> AbstractContextManager[None]:
        """Have `call` ended when its time is up or the process shuts down."""
        ...


@dataclass(frozen=True, slots=True)
class Ender:
    """What ending a session takes.

    A summary may take the model `timeout_s`. `holding` keeps the lease that was taken under a fence;
    `clean`, given the session and that fence, removes what is kept of it outside PostgreSQL, and may be
    called again after a crash.
    """

    database: Database
    clock: Clock
    model: Model
    timeout_s: float
    lease_s: float
    holding: Callable[[UUID, Fence], AbstractContextManager[Hold]]
    clean: Callable[[UUID, Fence], None]

    def end(self, session_id: UUID) -> Outcome:
        """Take the session to its end, from wherever it stands.

        Raises:
            Unavailable: the database cannot be reached; it goes on later.
        """
        asked = {"session_id": session_id, "owner": _OWNER, "lease_s": self.lease_s}
        rows = self.database.run(queries.CLAIM_ENDING, asked)
        if not rows:
            return NotDue()
        fence = Fence(rows[0].token, rows[0].nonce)
        with self.holding(session_id, fence) as hold:
            return self._end(session_id, fence, rows[0], hold)

    def _end(self, session_id: UUID, fence: Fence, claim: Row[Any], hold: Hold) -> Outcome:
        state, attempt, tenure = claim.state, claim.end_attempts, fence.on(session_id)
        if state == State.SUMMARIZING:
            try:
                summary = self._summary(session_id, attempt, hold)
            except CallAborted:
                given_back = self.database.run(queries.RELEASE_ENDING, {**tenure, "forgiven": True})
                return HandedOn() if given_back else NotDue()  # or it was somebody's claim that ended the call
            if summary is None:
                self.database.run(queries.RELEASE_ENDING, {**tenure, "forgiven": False})
                return Postponed()
            saved = {"summary": summary.text, "key_topics": list(summary.key_topics), "extractive": summary.extractive}
            if not self.database.run(queries.SAVE_SUMMARY, {**tenure, **saved}):
                return NotDue()
        if not self._cleaned(session_id, fence):
            self.database.run(queries.RELEASE_ENDING, {**tenure, "forgiven": False})
            return Postponed()
        return Ended() if self.database.run(queries.FINISH_ENDING, tenure) else NotDue()

    def _cleaned(self, session_id: UUID, fence: Fence) -> bool:
        """Whether all that is kept outside PostgreSQL is gone. A session never ends with something left."""
        try:
            self.clean(session_id, fence)
        except Unavailable as error:
            log.warning("session %s cannot end yet: %s", session_id, error.message)
            return False
        return True

    def _summary(self, session_id: UUID, attempt: int, hold: Hold) -> Summary | None:
        """The summary; None if the model failed and is to be asked again.

        Raises:
            CallAborted: the process shuts down, or has lost the session.
        """
        conversation = read_conversation(self.database, session_id, MAX_MESSAGES)
        if not conversation:
            return Summary("", (), extractive=True)
        if attempt > MAX_ATTEMPTS:  # the last one ended with its process
            return extract(conversation)
        call = ModelCall(self.clock, self.timeout_s)
        hold.step_within(self.timeout_s)
        try:
            with hold.calling(call):
                return summarise(self.model, call, conversation)
        except CallAborted:
            raise
        except PerdureError as error:
            log.warning("session %s could not be summarised (attempt %d): %s", session_id, attempt, loggable(error))
            return extract(conversation) if attempt == MAX_ATTEMPTS else None


def request_end(executor: Executor, session_id: UUID, reason: str) -> Requested:
    """Ask for a session to end.

    Asking again while it has not ended changes nothing: the first reason stays.

    Raises:
        NotFound: there is no such session.
        Conflict: it has ended.
    """
    rows = executor.run(queries.REQUEST_END, {"session_id": session_id, "reason": reason})
    if rows:
        return Requested(session_id, rows[0].may_end, rows[0].freed)
    if not executor.run(queries.READ, {"session_id": session_id}):
        raise NotFound("There is no such session.")
    raise Conflict("That session has ended already.")


def leave(executor: Executor, session_id: UUID, channel: str, idle_s: float) -> Requested | None:
    """Ask for a session to end that its user leaves, unless another channel was used within `idle_s` seconds.

    Returns None where that was not asked for, or had been before.
    """
    parameters = {"session_id": session_id, "channel": channel, "idle_s": idle_s, "reason": f"left {channel}"}
    rows = executor.run(queries.LEAVE, parameters)
    return Requested(session_id, rows[0].may_end, rows[0].freed) if rows else None


def expire_idle(database: Database, idle_s: float) -> list[UUID]:
    """Ask for the sessions to end in which nothing happened for `idle_s` seconds; returns them."""
    ahead = database.run(queries.COUNT_FROM_NOW, {})
    if ahead:
        log.warning("the clock was set back: %d sessions were used in the future, and idle from now on", len(ahead))
    found: list[UUID] = []
    while True:
        rows = database.run(queries.EXPIRE_IDLE, {"idle_s": idle_s, "most": _MOST_A_ROUND, "reason": IDLE})
        found += [row.session_id for row in rows]
        if len(rows) < _MOST_A_ROUND:
            return found


def endings_due(database: Database, most: int, backoff_s: float, lease_s: float) -> list[UUID]:
    """Sessions that should be ending and that nobody is at work on; at most `most`."""
    rows = database.run(queries.ENDINGS_DUE, {"most": most, "backoff_s": backoff_s, "lease_s": lease_s})
    return [row.session_id for row in rows]


def read_conversation(executor: Executor, session_id: UUID, most: int) -> list[Message]:
    """The newest `most` messages of a session, oldest first."""
    rows: Any = executor.run(queries.NEWEST_MESSAGES, {"session_id": session_id, "most": most})
    return [Message(Role(row.role), row.content) for row in reversed(rows)]
