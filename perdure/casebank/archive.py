"""Restores archived cases, bit for bit.

An archived case keeps its row in `cases` with another status, and has a copy in `case_archive`. Restoring writes the
copy back and marks it as restored, which protects the case from pruning for `recent_access_days`. If the case was
merged into a keeper as a duplicate, the keeper also retains the counts that it absorbed.
"""

from __future__ import annotations

import logging

from perdure.casebank import queries
from perdure.database.engine import Executor
from perdure.errors import NotFound

log = logging.getLogger(__name__)


def restore(executor: Executor, case_id: str) -> None:
    """Make an archived case active again.

    Raises:
        NotFound: there is no such case, or it is not archived.
    """
    if not executor.run(queries.RESTORE, {"case_id": case_id}):
        raise NotFound("There is no such archived case.")
    log.info("case %s was restored", case_id)


def warn_of_archived(case_id: str) -> None:
    """Log that an archived case was read or found."""
    log.warning("the archived case %s was requested; `perdure cases restore` makes it active again", case_id)
