"""Logging to stderr: one line for each event, with the task that logged it.

A log outlives the erasure of a user, so no line may contain a user's text. An exception is logged with its stack frames
and its type. The exception's message is logged only if this message cannot quote the arguments of a tool, a hook or an
SQL statement (`perdure.errors.loggable`).

With `PERDURE_LOG__FORMAT=json`, a line is a JSON object: `time`, `level`, `logger`, `message`, the ids of the task, the
session and the turn where the thread works for one, `exception` with the stack frames, and the facts of the event.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from perdure.errors import loggable
from perdure.observe import current
from perdure.tasks import current_task

if TYPE_CHECKING:
    from perdure.settings import LogFormat

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(task)s %(message)s"


# At INFO, Celery logs each task twice, and its beat each task once, although perdure itself logs each turn's outcome.
# HTTP clients and the SDKs over them log each request with its URL, which may contain a token.
_WARNINGS_ONLY = (
    "alembic", "celery.app.trace", "celery.beat", "celery.worker.strategy", "kombu",
    "aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3", "websocket", "websockets",
    "anthropic", "boto3", "botocore", "google_genai", "groq", "huggingface_hub", "mcp", "mistralai", "openai",
    "slack_sdk", "telegram", "xai_sdk",
)  # fmt: skip


class _WithTask(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.task = current_task.get()
        return True


def configure(level: int = logging.INFO, form: LogFormat | None = None) -> None:
    """Send this process's log to stderr, by default as text. Call this when the process starts."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _WithoutTexts(_FORMAT))
    handler.addFilter(_WithTask())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _WARNINGS_ONLY:
        logging.getLogger(name).setLevel(logging.WARNING)
    threading.excepthook = _log_uncaught


class _WithoutTexts(logging.Formatter):
    def formatException(self, ei: Any) -> str:  # noqa: N802 (the standard library's name)
        return "\n".join(_traced(ei[1]))


class _Json(_WithoutTexts):
    """One JSON object a line. `facts` of a record, a dictionary, are members of the object."""

    def format(self, record: logging.LogRecord) -> str:
        task, _, task_id = str(getattr(record, "task", "-")).partition("[")
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **({} if task == "-" else {"task": task, "task_id": task_id.rstrip("]")}),
            **current.ids(),
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _traced(error: BaseException | None) -> list[str]:
    """The lines of a traceback as Python prints it, causes first, but with the messages from `loggable`."""
    lines: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        members = [line for each in getattr(error, "exceptions", ()) for line in _traced(each)]
        lines = [*_frames(error.__traceback__), loggable(error), *(f"  | {line}" for line in members), *lines]
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is not None:
            how = "The above caused the following:" if error.__cause__ else "While that was handled:"
            lines = ["", how, "", *lines]
        error = before
    return lines


def _frames(trace: TracebackType | None) -> list[str]:
    return ["Traceback (most recent call last):", "".join(traceback.format_tb(trace)).rstrip()] if trace else []


def _log_uncaught(ended: threading.ExceptHookArgs) -> None:
    """Log the error that ended a thread. By default, Python prints the error's message, which may quote a user."""
    if ended.exc_type is SystemExit or ended.exc_value is None:
        return
    name = ended.thread.name if ended.thread else "?"
    logging.getLogger(__name__).error("the thread %s ended", name, exc_info=ended.exc_value)


def repeat_sparingly(*loggers: str) -> None:
    """Limit each of `loggers` to one record per second and kind (see `_OncePerSecond`). Call this once in a process."""
    for name in loggers:
        logging.getLogger(name).addFilter(_OncePerSecond())


class _OncePerSecond(logging.Filter):
    """Passes one record per second and kind. A kind is a level and the first line of an unformatted message.

    If records of a kind were dropped, the next record of that kind states how many.
    """

    _MOST_KINDS = 1_000

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._passed: dict[tuple[int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
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
