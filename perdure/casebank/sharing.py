"""Sharing: an administrator makes a user's case available to all users of the case's bank in the same tenant.

`unshare` restricts the case to its author again. The case's history records who shared or unshared the case, and when.
"""

from __future__ import annotations

import logging
from datetime import datetime

from perdure.casebank import queries
from perdure.database.engine import Executor
from perdure.errors import Conflict, NotFound

log = logging.getLogger(__name__)


def share(executor: Executor, case_id: str, by: str) -> datetime:
    """Share a case with all users of its bank in the author's tenant. Idempotent.

    Returns the time when the case was shared.

    Raises:
        NotFound: there is no such case.
        Conflict: the case has no author.
    """
    at = _set(executor, case_id, by, shared=True)
    if at is None:
        raise LookupError(f"case {case_id} was shared but has no shared_at")
    return at


def unshare(executor: Executor, case_id: str, by: str) -> None:
    """Restrict a case to its author: the case no longer enters the prompts of other users. Idempotent.

    Raises:
        NotFound: there is no such case.
        Conflict: the case has no author.
    """
    _set(executor, case_id, by, shared=False)


def _set(executor: Executor, case_id: str, by: str, *, shared: bool) -> datetime | None:
    reason = f"{'shared with all users of its bank' if shared else 'restricted to its author'} by {by}"
    rows = executor.run(queries.SHARE, {"case_id": case_id, "shared": shared, "reason": reason, "by": by})
    if not rows:
        raise NotFound("There is no such case.")
    if rows[0].user_id is None:
        raise Conflict("The case has no author: all users may see it, and it cannot be restricted to one.")
    if rows[0].changed:
        log.info("case %s was %s", case_id, reason)
    at: datetime | None = rows[0].shared_at
    return at
