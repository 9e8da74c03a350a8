"""A user's share of the workers: at most `PERDURE_TURN__USER_CONCURRENCY` turns of one user run concurrently.

Each running turn takes one of its user's places. If no place is free, a session is queued, either when a message for
the session is accepted or when a worker tries to claim the session. No wake-up is published for a queued session, and
a queued session occupies no worker thread. Therefore a user who sends many messages does not delay other users.

A runner that frees a place calls `admit_next` after its commit. The sweeper admits the sessions that `admit_next`
missed: a place may become free while a session is being queued, and a process may crash before it publishes the
wake-up.
"""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.database.engine import Executor
from perdure.errors import Unavailable
from perdure.runtime import Runtime
from perdure.turns.lease import queries

log = logging.getLogger(__name__)

MOST_USERS = 2_000
"""The most users whose queued sessions one round of the sweeper considers. The next round considers the next users."""


def admit_next(runtime: Runtime, user_id: UserKey) -> None:
    """Admit and wake the user's next queued session, if the user has a free place."""
    limits = runtime.settings.turn
    given = {"user_id": user_id, "user_concurrency": limits.user_concurrency, "aging_s": limits.priority_aging_s}
    try:
        rows = runtime.database.run(queries.ADMIT, given)
    except Unavailable as error:
        log.warning("the user's next queued session is left to the sweeper: %s", error.message)
        return
    for row in rows:
        wake = runtime.wake.drain if row.is_drainable else runtime.wake.session
        wake(row.session_id, row.priority)


def admit_due(executor: Executor, user_concurrency: int, most: int, aging_s: float) -> list[Row[Any]]:
    """Admit up to `most` queued sessions of users with free places, with an equal share for each user.

    Returns the sessions (`session_id`) with their effective `priority`, and whether any drain takes them
    (`is_drainable`). The caller must wake the sessions.
    """
    given = {"user_concurrency": user_concurrency, "most": most, "most_users": MOST_USERS, "aging_s": aging_s}
    return list(executor.run(queries.ADMIT_DUE, given))
