"""Archived cases: brought back as they were, bit for bit.

A case that is archived stays in its table with another status, and as it was in the archive.
Restoring writes the archive's row back; that row stays, marked, and spares the case for some
days. What a keeper took over from it, it keeps.
"""

from __future__ import annotations

import logging

from perdure.casebank import queries
from perdure.database.engine import Executor
from perdure.errors import NotFound

log = logging.getLogger(__name__)


def restore(executor: Executor, case_id: str) -> None:
    """Make an archived case active again, as it was.

    Raises:
        NotFound: there is no such case, or it is not archived.
    """
    if not executor.run(queries.RESTORE, {"case_id": case_id}):
        raise NotFound("There is no such archived case.")
    log.info("case %s was restored", case_id)


def warn_of_archived(case_id: str) -> None:
    """Note that somebody asked for an archived case."""
    log.warning("the archived case %s was asked for; it can be restored", case_id)
