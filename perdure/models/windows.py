"""The windows of models, as far as a prompt that was too long has shown them.

If a provider refuses a prompt as too long and accepts a smaller one, the refused size is an upper bound of the model's
window. All workers use it for a week, or until the model accepts a prompt of that size: the refusal had another reason,
or the prompt's text had more tokens than estimated. Each worker reads the table once a minute. A size is an estimate of
the tokens, as in the budgets of prompts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from perdure.clock import Clock
from perdure.database.engine import Database, Statement
from perdure.errors import Unavailable, loggable

log = logging.getLogger(__name__)

SMALLEST = 1_000
"""No window is smaller: a refusal of such a short prompt has another reason."""

_READ_EVERY_S = 60.0
_DAYS = 7
_MOST = 1_000

_KNOWN = "learned_at > perdure_now() - make_interval(days => %(days)s)"

READ = Statement(
    "windows.read",
    f"SELECT model, tokens FROM model_windows WHERE {_KNOWN} ORDER BY learned_at DESC LIMIT %(most)s",  # noqa: S608 (constants)
    writes=False,
)

LEARN = Statement(
    "windows.learn",
    f"""
    INSERT INTO model_windows AS w (model, tokens, learned_at) VALUES (%(model)s, %(tokens)s, perdure_now())
    ON CONFLICT (model) DO UPDATE
    SET tokens = CASE WHEN w.{_KNOWN} THEN least(w.tokens, excluded.tokens) ELSE excluded.tokens END,
        learned_at = excluded.learned_at
    """,  # noqa: S608 (constants)
)

FORGET = Statement(
    "windows.forget",
    "DELETE FROM model_windows WHERE model = %(model)s AND tokens <= %(tokens)s",
)


class LearnedWindows:
    """The learned windows, as this process last read them. Thread-safe."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}
        self._read_at: float | None = None

    def of(self, model: str) -> int | None:
        """The learned window of the model in tokens; `None`: no prompt was too long for it. Reads once a minute.

        Raises:
            Unavailable: the database cannot be reached.
        """
        now = self._clock.monotonic()
        with self._lock:
            is_due = self._read_at is None or now - self._read_at >= _READ_EVERY_S
            if is_due:
                self._read_at = now  # the other threads go on with what is known
        if is_due:
            rows = self._database.run(READ, {"days": _DAYS, "most": _MOST})
            self._known = {row.model: row.tokens for row in rows}
        return self._known.get(model)

    def learn(self, model: str, tokens: int) -> None:
        """Record that a prompt of `tokens` tokens was too long for the model, and a smaller one was not.

        Raises:
            Unavailable: the database cannot be reached.
        """
        if tokens < SMALLEST or tokens >= self._known.get(model, tokens + 1):
            return
        log.warning("a prompt of about %d tokens is too long for %s: its next prompts are smaller", tokens, model)
        self._database.run(LEARN, {"model": model, "tokens": tokens, "days": _DAYS})
        self._known = {**self._known, model: tokens}

    def forget(self, model: str, tokens: int) -> None:
        """Forget the window of the model if it is not greater than `tokens`, because such a prompt was accepted.

        Raises:
            Unavailable: the database cannot be reached.
        """
        if tokens < self._known.get(model, tokens + 1):
            return
        log.warning("a prompt of about %d tokens is not too long for %s: its next prompts may be larger", tokens, model)
        self._database.run(FORGET, {"model": model, "tokens": tokens})
        self._known = {name: size for name, size in self._known.items() if name != model}

    def has(self, model: str) -> bool:
        """Whether this process knows a learned window of the model."""
        return model in self._known


class Lesson:
    """What the prompts of one turn tell about the window of its model."""

    def __init__(self, windows: LearnedWindows, model: str) -> None:
        self._windows = windows
        self._model = model
        self._refused: int | None = None

    def refused(self, tokens: int | None) -> None:
        """A prompt was too long for the model. `None`: its size is not known."""
        self._refused = tokens

    def accepted(self, size: Callable[[], int | None]) -> None:
        """The model itself has answered a prompt. What cannot be written now is not learned."""
        refused, self._refused = self._refused, None
        try:
            if refused is not None:
                self._windows.learn(self._model, refused)
            elif self._windows.has(self._model) and (tokens := size()) is not None:
                self._windows.forget(self._model, tokens)
        except Unavailable as error:
            log.warning("the window of %s is not recorded: %s", self._model, loggable(error))
