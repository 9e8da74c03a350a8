"""Restores archived cases, bit for bit.

An archived case keeps its row in `cases`, with the status `archived`, and has a copy in `case_archive`. Restoring
writes the copy back to `cases`, and protects the case from pruning for `recent_access_days`. If the case was merged as
a duplicate into another case, the other case keeps the counts that it absorbed.
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
    log.warning("the archived case %s was requested; `perdure cases restore` makes it active again", case_id)
