"""The daily retention task."""

from __future__ import annotations

import logging

from perdure.retention import retain as delete_old
from perdure.tasks.task import declare
from perdure.tasks.timetable import ScheduledTask

log = logging.getLogger(__name__)


@declare("maintenance.retain", base=ScheduledTask, ignore_result=False)
def retain(self: ScheduledTask) -> dict[str, int]:
    """Delete the rows whose retention period has passed; returns the number of deleted rows by kind."""
    process = self.process
    runtime = process.runtime
    deleted = delete_old(runtime.database, lambda: not process.leaving.is_set(), runtime.settings.retention)
    log.info("retention deleted: %s", ", ".join(f"{count} {what}" for what, count in deleted.items()))
    return deleted
