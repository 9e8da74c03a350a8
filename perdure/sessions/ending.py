"""Ends sessions that have a recorded request to end: summarises, cleans up and then ends each session.

    active ─▶ summarizing ─▶ ending ─▶ ended

Each arrow is a commit under the session's fencing token. After a crash another process resumes at the last state, and a
stale process writes nothing. The model is called between commits, never within a transaction. A session ends only when
all of its turns are settled. Messages that arrive after the request go to the next session at once.
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
from perdure.sessions.routing import title_of
from perdure.sessions.states import State
from perdure.sessions.summary import Summary, extract, summarise

log = logging.getLogger(__name__)

IDLE = "idle"
"""The reason for an end that is requested because of inactivity."""

MAX_ATTEMPTS = 3
"""Attempts to summarise with the model; after the last one, the summary is extractive."""

MAX_MESSAGES = 400
"""The number of newest messages that the summary covers."""

_OWNER = "ending"
_MOST_A_ROUND = 500


@dataclass(frozen=True, slots=True)
class Ended:
    """The session has ended, and waits for consolidation."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The summary failed, or a store that must be cleaned is unavailable; the sweeper tries again."""


@dataclass(frozen=True, slots=True)
class Released:
    """This process shuts down and has released the session: another process may continue at once."""


@dataclass(frozen=True, slots=True)
class NotDue:
    """No end is requested, a turn is unsettled, the session has ended, or another process is ending it."""


EndOutcome = Ended | Postponed | Released | NotDue


class Waker(Protocol):
    """Publishes hints that a session has work for a worker. Hints may be lost; the sweeper publishes them again."""

    def session(self, session_id: UUID, priority: int) -> bool:
        """Wake a worker to run the session's turns."""
        ...

    def ending(self, session_id: UUID) -> bool:
        """Wake a worker to end the session."""
        ...


@dataclass(frozen=True, slots=True)
class Requested:
    """A recorded request to end a session. After the commit, the caller passes a `Waker` to `wake`.

    `may_end` is true if no turn is unsettled, so that the end can begin. Otherwise the unsettled turns run first. If a
    turn waited for an approval, a task or a time, the request ended this wait. `freed` is then the priority of that
    turn, otherwise `None`.
    """

    session_id: UUID
    may_end: bool
    freed: int | None

    def wake(self, waker: Waker) -> None:
        """Wake a worker to end the session or to continue its turn. Does nothing while a turn is running."""
        if self.may_end:
            waker.ending(self.session_id)
        elif self.freed is not None:
            waker.session(self.session_id, self.freed)


class Hold(Protocol):
    """The lease of a session that is ending. The process's lease keeper renews the lease."""

    def step_within(self, seconds: float) -> None:
        """Begin a step of at most `seconds`; after that time the lease is no longer renewed."""
        ...

    def calling(self, call: ModelCall) -> AbstractContextManager[None]:
        """Within the block, abort `call` when its time is up, the process shuts down or the lease is lost."""
        ...


@dataclass(frozen=True, slots=True)
class Ender:
    """Ends sessions.

    `timeout_s` limits the model call that writes the summary. `holding` returns a context manager that renews the
    session's lease. `clean` removes the session's data outside PostgreSQL under the session's fence; it is idempotent.
    """

    database: Database
    clock: Clock
    model: Model
    timeout_s: float
    lease_s: float
    holding: Callable[[UUID, Fence], AbstractContextManager[Hold]]
    clean: Callable[[UUID, Fence], None]

    def end(self, session_id: UUID) -> EndOutcome:
        """Summarise, clean up and end the session. Continues from the state that an earlier attempt reached.

        Raises:
            Unavailable: the database cannot be reached; the sweeper tries again.
        """
        parameters = {"session_id": session_id, "owner": _OWNER, "lease_s": self.lease_s}
        rows = self.database.run(queries.CLAIM_ENDING, parameters)
        if not rows:
            return NotDue()
        fence = Fence(rows[0].token, rows[0].nonce)
        with self.holding(session_id, fence) as hold:
            return self._end(session_id, fence, rows[0], hold)

    def _end(self, session_id: UUID, fence: Fence, claim: Row[Any], hold: Hold) -> EndOutcome:
        state, attempt, tenure = claim.state, claim.end_attempts, fence.on(session_id)
        if state == State.SUMMARIZING:
            try:
                summary = self._summary(session_id, attempt, hold)
            except CallAborted:
                released = self.database.run(queries.RELEASE_ENDING, {**tenure, "forgiven": True})
                return Released() if released else NotDue()  # not released: another claim aborted the call
            if summary is None:
                self.database.run(queries.RELEASE_ENDING, {**tenure, "forgiven": False})
                return Postponed()
            saved = {"summary": summary.text, "key_topics": list(summary.key_topics), "extractive": summary.extractive}
            saved["title"] = title_of(summary.text)
            if not self.database.run(queries.SAVE_SUMMARY, {**tenure, **saved}):
                return NotDue()
        if not self._cleaned(session_id, fence):
            self.database.run(queries.RELEASE_ENDING, {**tenure, "forgiven": False})
            return Postponed()
        return Ended() if self.database.run(queries.FINISH_ENDING, tenure) else NotDue()

    def _cleaned(self, session_id: UUID, fence: Fence) -> bool:
        """Run `clean`. Returns False if data outside PostgreSQL remains: the session cannot end yet."""
        try:
            self.clean(session_id, fence)
        except Unavailable as error:
            log.warning("session %s cannot end yet: %s", session_id, error.message)
            return False
        return True

    def _summary(self, session_id: UUID, attempt: int, hold: Hold) -> Summary | None:
        """The summary; None if the model failed and attempts remain.

        Raises:
            CallAborted: the process shuts down, or has lost the session.
        """
        conversation = read_conversation(self.database, session_id, MAX_MESSAGES)
        if not conversation:
            return Summary("", (), extractive=True)
        if attempt > MAX_ATTEMPTS:  # the process of the last attempt died
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
    """Request the end of a session. A repeated request keeps the first reason.

    Raises:
        NotFound: there is no such session.
        Conflict: the session has ended.
    """
    rows = executor.run(queries.REQUEST_END, {"session_id": session_id, "reason": reason})
    if rows:
        return Requested(session_id, rows[0].may_end, rows[0].freed)
    if not executor.run(queries.READ, {"session_id": session_id}):
        raise NotFound("There is no such session.")
    raise Conflict("That session has ended already.")


def leave(executor: Executor, session_id: UUID, channel: str, idle_s: float) -> Requested | None:
    """Request the end of a session whose user leaves `channel`, unless another channel is in use.

    A channel is in use if it has an unsettled turn, or a turn that was settled in the last `idle_s` seconds. Returns
    `None` if this call requested no end.
    """
    parameters = {"session_id": session_id, "channel": channel, "idle_s": idle_s, "reason": f"left {channel}"}
    rows = executor.run(queries.LEAVE, parameters)
    return Requested(session_id, rows[0].may_end, rows[0].freed) if rows else None


def expire_idle(database: Database, idle_s: float) -> list[UUID]:
    """Request the end of sessions without activity for `idle_s` seconds; returns their ids."""
    ahead = database.run(queries.COUNT_FROM_NOW, {})
    if ahead:
        log.warning(
            "the clock was set back: the last activity of %d sessions was in the future, and is set to now", len(ahead)
        )
    expired: list[UUID] = []
    while True:
        rows = database.run(queries.EXPIRE_IDLE, {"idle_s": idle_s, "most": _MOST_A_ROUND, "reason": IDLE})
        expired += [row.session_id for row in rows]
        if len(rows) < _MOST_A_ROUND:
            return expired


def endings_due(database: Database, most: int, backoff_s: float, lease_s: float) -> list[UUID]:
    """Return at most `most` sessions that are to end and that no worker has claimed.

    Records that a worker is woken for these sessions, so that the pause before the next wake-up doubles.
    """
    rows = database.run(queries.ENDINGS_DUE, {"most": most, "backoff_s": backoff_s, "lease_s": lease_s})
    return [row.session_id for row in rows]


def read_conversation(executor: Executor, session_id: UUID, most: int) -> list[Message]:
    """The newest `most` messages of a session, oldest first."""
    rows: Any = executor.run(queries.NEWEST_MESSAGES, {"session_id": session_id, "most": most})
    return [Message(Role(row.role), row.content) for row in reversed(rows)]
