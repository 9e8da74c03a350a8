"""Logs: one line an event, to stderr, with the task that said it."""

from __future__ import annotations

import logging
import sys
import threading

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


def repeat_sparingly(*loggers: str) -> None:
    """Have each of `loggers` write at most one record a second of each kind. Call it once in a process."""
    for name in loggers:
        logging.getLogger(name).addFilter(_Sparingly())


class _Sparingly(logging.Filter):
    """Passes one record a second of each kind, which is the first line of the unformatted message.

    The next record that passes says how many were dropped before it.
    """

    _MOST_KINDS = 1_000

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._passed: dict[tuple[int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        kind = (record.levelno, str(record.msg).partition("\n")[0])
        with self._lock:
            passed_at, dropped = self._passed.get(kind, (0.0, 0))
            if passed_at <= record.created < passed_at + 1:
                self._passed[kind] = (passed_at, dropped + 1)
                return False
            if len(self._passed) >= self._MOST_KINDS:
                self._passed.clear()
            self._passed[kind] = (record.created, 0)
        if dropped:
            record.msg = f"{record.msg} ({dropped} more of these were not logged)"
        return True
