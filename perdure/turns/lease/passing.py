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


class Passing:
    """The sessions that this process has left to other workers during the last `PERDURE_TURN__SWEEP_S` seconds."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._left: dict[UUID, float] = {}

    def has_left(self, session_id: UUID) -> bool:
        """Whether this process has just left the session, and the session's turn still waits for another worker.

        Raises:
            Unavailable: the database cannot be reached.
        """
        left_at = self._left.get(session_id)
        if left_at is None or self._has_passed(left_at):
            return False
        rows = self._runtime.database.run(queries.IS_UNEQUIPPED, {"session_id": session_id})
        return bool(rows and rows[0].unequipped)

    def leave(self, session_id: UUID, lacking: Unequipped, *, publish: bool) -> None:
        """Record that this process has left the session. With `publish`, also publish the session's wake-up."""
        log.warning("session %s is left to another worker: this one lacks %s", session_id, lacking.lacks)
        self._left = {each: at for each, at in list(self._left.items()) if not self._has_passed(at)}
        self._left[session_id] = self._runtime.clock.monotonic()
        if publish:
            self._runtime.wake.session(session_id, lacking.priority)

    def _has_passed(self, left_at: float) -> bool:
        return self._runtime.clock.monotonic() - left_at >= self._runtime.settings.turn.sweep_s
