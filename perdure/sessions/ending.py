"""Ends sessions whose end was requested: summarises each, deletes its data outside PostgreSQL, and marks it ended.

    active ─▶ summarizing ─▶ ending ─▶ ended

Each arrow is a commit under the session's fencing token. After a crash, another process resumes from the last committed
state. A process with a stale token writes nothing. The model is called between commits, never within a transaction. A
session ends only when all of its turns are settled. Messages that arrive after the request for the end go to the next
session at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Row

from perdure.clock import Clock
from perdure.database.engine import Database, Executor
from perdure.database.fencing import Fence
from perdure.errors import OF_INPUT, Conflict, NotFound, PerdureError, Unavailable, loggable
from perdure.models.protocol import CallAborted, Message, Model, ModelCall, Role
from perdure.sessions import queries
from perdure.sessions.states import State
from perdure.sessions.summary import Summary, extract, summarise

log = logging.getLogger(__name__)

IDLE = "idle"
"""The reason that `expire_idle` records for the end of an inactive session."""

MAX_ATTEMPTS = 3
"""The maximum number of attempts to summarise with the model. If all fail, the summary is an extract."""

MAX_MESSAGES = 400
"""The summary covers at most this number of the session's newest messages."""

_EMPTY = Summary("", (), extractive=True)
"""Of a session without messages, or in which an agent answers another: no prompt quotes it."""

_OWNER = "ending"
_MOST_A_ROUND = 500


@dataclass(frozen=True, slots=True)
class Ended:
    """The session has ended, and waits for consolidation."""


@dataclass(frozen=True, slots=True)
class EndPostponed:
    """The summary failed, or a store that must be cleaned is unavailable; the sweeper tries again."""


@dataclass(frozen=True, slots=True)
class Released:
    """This process is shutting down and has released the session. Another process may continue at once."""


@dataclass(frozen=True, slots=True)
class EndNotDue:
    """No end is requested, a turn is unsettled, the session has ended, or another process is ending it."""


EndOutcome = Ended | EndPostponed | Released | EndNotDue


class EndWaker(Protocol):
    """Publishes hints that a session has work for a worker. Hints may be lost; the sweeper publishes them again."""

    def session(self, session_id: UUID, priority: int) -> bool:
        """Wake a worker to run the session's turns."""
        ...

    def ending(self, session_id: UUID) -> bool:
        """Wake a worker to end the session."""
        ...


@dataclass(frozen=True, slots=True)
class Requested:
    """A recorded request to end a session. After the commit, the caller must call `wake`.

    `may_end` is true if the session has no unsettled turn. Otherwise the unsettled turns run before the session ends.
    If a turn waited for an approval, a task or a time, the request ended the wait, and `freed` is the turn's priority.
    If no turn waited, `freed` is `None`.
    """

    session_id: UUID
    may_end: bool
    freed: int | None

    def wake(self, waker: EndWaker) -> None:
        """Wake a worker to end the session, or to continue the turn that waited.

        Does nothing if the session has unsettled turns and none of them waited.
        """
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
        """A context manager that aborts `call` if its time is up, the process shuts down or the lease is lost."""
        ...


@dataclass(frozen=True, slots=True)
class Ender:
    """Ends sessions.

    `timeout_s` limits the model call that writes the summary. `holding` returns a context manager that renews the
    session's lease. `clean` deletes the session's data outside PostgreSQL, under the session's fence. `clean` is
    idempotent.
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
            return EndNotDue()
        fence = Fence(rows[0].token, rows[0].nonce)
        with self.holding(session_id, fence) as hold:
            return self._end(session_id, fence, rows[0], hold)

    def _end(self, session_id: UUID, fence: Fence, claim: Row[Any], hold: Hold) -> EndOutcome:
        state, attempt, tenure = claim.state, claim.end_attempts, fence.on(session_id)
        if state == State.SUMMARIZING:
            try:
                summary = _EMPTY if claim.answers_call else self._summary(session_id, attempt, hold)
            except CallAborted:
                released = self.database.run(queries.RELEASE_ENDING, {**tenure, "forgiven": True})
                return Released() if released else EndNotDue()  # not released: another process has claimed the session
            if summary is None:
                self.database.run(queries.RELEASE_ENDING, {**tenure, "forgiven": False})
                return EndPostponed()
            saved = {"summary": summary.text, "key_topics": list(summary.key_topics), "extractive": summary.extractive}
            saved["title"] = summary.title
            if not self.database.run(queries.SAVE_SUMMARY, {**tenure, **saved}):
                return EndNotDue()
        if not self._cleaned(session_id, fence):
            self.database.run(queries.RELEASE_ENDING, {**tenure, "forgiven": False})
            return EndPostponed()
        return Ended() if self.database.run(queries.FINISH_ENDING, tenure) else EndNotDue()

    def _cleaned(self, session_id: UUID, fence: Fence) -> bool:
        """Run `clean`. Returns False if a store is unavailable; the session cannot end until `clean` succeeds."""
        try:
            self.clean(session_id, fence)
        except Unavailable as error:
            log.warning("session %s cannot end yet: %s", session_id, loggable(error))
            return False
        return True

    def _summary(self, session_id: UUID, attempt: int, hold: Hold) -> Summary | None:
        """The summary; None if the model failed and attempts remain.

        Raises:
            CallAborted: the process shuts down, or has lost the session's lease.
        """
        conversation = read_conversation(self.database, session_id, MAX_MESSAGES)
        if not conversation:
            return _EMPTY
        if attempt > MAX_ATTEMPTS:  # the process that made the last attempt died
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
            final = attempt == MAX_ATTEMPTS or isinstance(error, OF_INPUT)
            return extract(conversation) if final else None


def request_end(executor: Executor, session_id: UUID, reason: str) -> Requested:
    """Request the end of a session. A repeated request keeps the reason of the first request.

    Raises:
        NotFound: there is no such session.
        Conflict: the session has ended.
    """
    requested = request_ends(executor, [session_id], reason)
    if requested:
        return requested[0]
    if not executor.run(queries.READ, {"session_id": session_id}):
        raise NotFound("There is no such session.")
    raise Conflict("That session has ended already.")


def request_ends(executor: Executor, session_ids: Sequence[UUID], reason: str) -> list[Requested]:
    """Request the end of those of the sessions that have not ended."""
    rows = executor.run(queries.REQUEST_END, {"session_ids": list(session_ids), "reason": reason})
    return [Requested(row.session_id, row.may_end, row.freed) for row in rows]


def leave(executor: Executor, session_id: UUID, channel: str, idle_s: float) -> Requested | None:
    """Request the end of a session whose user leaves `channel`, unless the session is in use on another channel.

    The session is in use on a channel if it has an unsettled turn there, or a turn that was settled there in the last
    `idle_s` seconds. Returns `None` if this call requested no end.
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
    """The ids of at most `most` sessions whose end is due and that no worker has claimed.

    The caller must wake a worker for each session. This call records the wake-ups, because the pause before a session's
    next wake-up doubles each time.
    """
    rows = database.run(queries.ENDINGS_DUE, {"most": most, "backoff_s": backoff_s, "lease_s": lease_s})
    return [row.session_id for row in rows]


def read_conversation(executor: Executor, session_id: UUID, most: int) -> list[Message]:
    """The newest `most` messages of a session, oldest first."""
    rows: Any = executor.run(queries.NEWEST_MESSAGES, {"session_id": session_id, "most": most})
    return [Message(Role(row.role), row.content) for row in reversed(rows)]
