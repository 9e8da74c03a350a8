"""Restores archived cases, bit for bit.

An archived case keeps its row in `cases`, with the status `archived`, and has a copy in `case_archive`. Restoring
writes the copy back to `cases`, and protects the case from pruning for `recent_access_days`. If the case was merged as
a duplicate into another case, the other case keeps the counts that it absorbed. If the case has no vector of the
installation's embedder, it is embedded, so that searches find it.
"""

from __future__ import annotations

import logging

from perdure.casebank import queries
from perdure.casebank.embedding import embed_now
from perdure.database.engine import Executor
from perdure.errors import NotFound
from perdure.models.embedders.protocol import Embedder

log = logging.getLogger(__name__)


def restore(executor: Executor, case_id: str, embedder: Embedder | None = None) -> None:
    """Make an archived case active again, and embed it with `embedder` if its vector is missing or of a former one.

    Raises:
        NotFound: there is no such case, or it is not archived.
    """
    named = {"case_id": case_id, "embedder": None if embedder is None else embedder.name}
    rows = executor.run(queries.RESTORE, named)
    if not rows:
        raise NotFound("There is no such archived case.")
    log.info("case %s was restored", case_id)
    if embedder is not None and rows[0].lacks_vector:
        embed_now(executor, embedder, case_id, rows[0].query)


def warn_of_archived(case_id: str) -> None:
    log.warning("the archived case %s was requested; `perdure cases restore` makes it active again", case_id)
