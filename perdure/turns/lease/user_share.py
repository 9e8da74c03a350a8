"""A user's share of the fleet: at most `PERDURE_TURN__USER_CONCURRENCY` turns of one user run concurrently.

The user's further sessions are queued: no wake-up is published for them and they occupy no worker thread, so one user's
many messages do not delay other users. If the user has no free place, a session is queued when a message for it is
accepted or a worker tries to claim it. A runner that frees a place calls `admit_next` after its commit. The sweeper
admits sessions that `admit_next` missed: a place may be freed while a session is being queued, and a process may crash
before it publishes the wake-up.
"""

from __future__ import annotations

import logging
from uuid import UUID

from perdure.database.engine import Executor
from perdure.errors import Unavailable
from perdure.runtime import Runtime
from perdure.turns.lease import queries

log = logging.getLogger(__name__)

MOST_USERS = 2_000
"""The most users whose queued sessions one round of the sweeper considers."""


def admit_next(runtime: Runtime, user_id: str) -> None:
    """Wake the user's next queued session, if the user has a free place."""
    given = {"user_id": user_id, "user_concurrency": runtime.settings.turn.user_concurrency}
    try:
        rows = runtime.database.run(queries.ADMIT, given)
    except Unavailable as error:
        log.warning("the user's next queued session is left to the sweeper: %s", error.message)
        return
    for row in rows:
        runtime.wake.session(row.session_id, row.priority)


def admit_due(executor: Executor, user_concurrency: int, most: int) -> list[tuple[UUID, int]]:
    """Admit up to `most` queued sessions of users with free places; returns them with their priorities, to be woken."""
    given = {"user_concurrency": user_concurrency, "most": most, "most_users": MOST_USERS}
    return [(row.session_id, row.priority) for row in executor.run(queries.ADMIT_DUE, given)]
