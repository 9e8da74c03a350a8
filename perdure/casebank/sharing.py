"""Sharing: an administrator lets a case that was made from one user's words enter everybody's prompts, or ends that.

Who did it and when stands in the case's history. A case without an author is everybody's anyway.
"""

from __future__ import annotations

import logging
from datetime import datetime

from perdure.casebank import queries
from perdure.database.engine import Executor
from perdure.errors import Conflict, NotFound

log = logging.getLogger(__name__)


def share(executor: Executor, case_id: str, by: str) -> datetime:
    """Share a case with all users of its bank; since when it is shared. Sharing it again changes nothing.

    Raises:
        NotFound: there is no such case.
        Conflict: the case has no author.
    """
    at = _set(executor, case_id, by, shared=True)
    if at is None:
        raise LookupError("a case that was shared has no time")
    return at


def unshare(executor: Executor, case_id: str, by: str) -> None:
    """Let a case enter its author's prompts only. Doing it again changes nothing.

    Raises:
        NotFound: there is no such case.
        Conflict: the case has no author.
    """
    _set(executor, case_id, by, shared=False)


def _set(executor: Executor, case_id: str, by: str, *, shared: bool) -> datetime | None:
    reason = f"{'shared with everybody' if shared else 'given back to its author'} by {by}"
    rows = executor.run(queries.SHARE, {"case_id": case_id, "shared": shared, "reason": reason, "by": by})
    if not rows:
        raise NotFound("There is no such case.")
    if rows[0].user_id is None:
        raise Conflict("The case has no author: it is everybody's already, and cannot be given back.")
    if rows[0].changed:
        log.info("case %s was %s", case_id, reason)
    at: datetime | None = rows[0].shared_at
    return at
