"""Leaves sessions to other workers, if this process lacks the agent or a tool of their turns.

While a deployment adds an agent or a tool, some workers do not have it yet. Such a worker releases the session without
counting an attempt, and publishes the session's wake-up again. The broker gives the wake-up to a waiting worker. A
worker that receives a wake-up for a session that it has just left drops it, so a wake-up visits each worker about once.
The sweeper then wakes the session again. If a worker's child process leaves a session, the worker remembers it, but
publishes no wake-up: each worker that receives it would start a child process.
"""

from __future__ import annotations

import logging
from uuid import UUID

from perdure.runtime import Runtime
from perdure.turns.lease import queries
from perdure.turns.lease.claim import Unequipped

log = logging.getLogger(__name__)


CHILD_S = 60.0
"""Seconds for which a worker remembers that a child of it has left a session: the start of a child is expensive."""


class Passing:
    """The sessions that this process, or a child of it, has just left to other workers.

    A session that this process has left itself is remembered for `PERDURE_TURN__SWEEP_S` seconds.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._until: dict[UUID, float] = {}

    def has_left(self, session_id: UUID) -> bool:
        """Whether the session was just left here, and its turn still waits for another worker."""
        if self._until.get(session_id, 0.0) <= self._runtime.clock.monotonic():
            return False
        given = {"session_id": session_id, "unknown_agent_s": self._runtime.settings.turn.unknown_agent_s}
        rows = self._runtime.database.run(queries.IS_UNEQUIPPED, given)
        return bool(rows and rows[0].unequipped)

    def leave(self, session_id: UUID, lacking: Unequipped, *, publish: bool) -> None:
        """Record that this process has left the session, and publish its wake-up; or that a child of it has left it."""
        log.warning("session %s is left to another worker: this one lacks %s", session_id, lacking.lacks)
        now = self._runtime.clock.monotonic()
        self._until = {each: until for each, until in list(self._until.items()) if until > now}
        self._until[session_id] = now + (self._runtime.settings.turn.sweep_s if publish else CHILD_S)
        if publish:
            self._runtime.wake.session(session_id, lacking.priority)
