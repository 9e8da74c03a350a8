"""Logs: one line an event, to stderr, with the task that said it."""

from __future__ import annotations

import logging
import sys

from tasks.task import current_task

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(task)s %(message)s"


# Celery tells of each task twice; what became of its turn is said once, by the domain.
_CHATTY = ("alembic", "celery.app.trace", "celery.worker.strategy", "httpcore2", "httpx2", "kombu", "openai")


class _WithTask(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.task = current_task.get()
        return True


def configure(level: int = logging.INFO) -> None:
    """Send this process's log to stderr. Called once, by whoever starts the process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(_WithTask())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
