"""Runs the parallel input guards of a turn while its model is called, and holds the model's text back until they allow.

Each guard runs in a thread. The first one that refuses cancels the call of the model. The turn's thread waits for the
verdicts before it commits what the model has answered. Only this thread sets the deadline of the step, which is that of
the model's call at first.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perdure.errors import PerdureError
from perdure.events.writer import TurnEvents
from perdure.guards import Guard
from perdure.models.protocol import ModelCall, Usage
from perdure.turns.calls.run_calls import Interrupted
from perdure.turns.lease.tenure import TurnScope
from perdure.turns.outcome import Failed
from perdure.turns.run.turn_hooks import TurnHooks, allowed

_POLL_S = 0.1
"""Seconds between two checks whether the turn must stop."""


class Refused(Exception):
    """A guard refused the user's message while the model was called. `failed` is the turn's end."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.error.message)
        self.failed = failed


class HeldText:
    """The text that the model streams: shown at once, or held until `release`. `is_shown` is false if it never is.

    `streamed_chars` counts the characters since the last committed step.
    """

    def __init__(self, events: TurnEvents, *, is_shown: bool, is_held: bool) -> None:
        self._events = events
        self._is_shown = is_shown
        self._is_held = is_held
        self._lock = threading.Lock()
        self._held: list[str] = []
        self.streamed_chars = 0

    @property
    def held(self) -> str:
        """The text that is held at present."""
        with self._lock:
            return "".join(self._held)

    def delta(self, text: str) -> None:
        with self._lock:
            self.streamed_chars += len(text)
            if self._is_held:
                self._held.append(text)
            elif self._is_shown:
                self._events.delta(text)

    def rewind(self) -> None:
        with self._lock:
            if not self._is_held:
                self._events.rewind()
            self._held = []

    def release(self) -> None:
        """Show the text that is held, and all later text at once."""
        with self._lock:
            text, self._held, self._is_held = "".join(self._held), [], False
            if text and self._is_shown:
                self._events.delta(text)


class ParallelGuards:
    """The parallel input guards of the turn at hand.

    Attributes:
        usage: What the guards used, as far as they have reported it.
    """

    def __init__(self, scope: TurnScope, hooks: TurnHooks, text: HeldText) -> None:
        self.usage: Usage | None = None
        self._scope = scope
        self._hooks = hooks
        self._text = text
        self._guards = [each for each in hooks.agent.guards if each.parallel]
        self._lock = threading.Lock()
        self._undecided = 0
        self._shows_at_once = True
        self._refusal: PerdureError | None = None
        self._call: ModelCall | None = None
        self._changed = threading.Condition(self._lock)

    @property
    def has_refused(self) -> bool:
        return self._refusal is not None

    def start(self, *, shows_at_once: bool) -> None:
        """Start the guards. With `shows_at_once`, the text is released as soon as all of them allow."""
        self._shows_at_once, self._undecided, self._refusal = shows_at_once, len(self._guards), None
        asked = self._hooks.transcript.asked
        for guard in self._guards:
            work: Callable[..., None] = contextvars.copy_context().run
            name = f"perdure-guard-{guard.name[:40]}"
            threading.Thread(target=work, args=(self._run, guard, asked), name=name, daemon=True).start()

    @contextmanager
    def over(self, call: ModelCall) -> Iterator[None]:
        """Within the block, a refusal aborts `call`."""
        with self._lock:
            self._call = call
            refused = self._refusal is not None
        if refused:
            call.abort()
        try:
            yield
        finally:
            with self._lock:
                self._call = None

    def wait(self) -> PerdureError | None:
        """Wait until all guards have allowed the message, or one has refused it; returns the refusal.

        Raises:
            Interrupted: the turn must stop.
        """
        self._scope.step_within(max(map(self._hooks.guard_s, self._guards)))
        with self._changed:
            while self._undecided and self._refusal is None:
                if self._scope.stopping.is_set():
                    raise Interrupted
                self._changed.wait(_POLL_S)
            return self._refusal

    def _run(self, guard: Guard, asked: str) -> None:
        refusal: PerdureError | None = None
        usage: Usage | None = None
        try:
            verdict = self._hooks.judge(guard, asked, stopping=self._scope.stopping)
            usage = verdict.usage
            allowed(verdict, asked)
        except PerdureError as error:
            refusal = error
        with self._changed:
            self._undecided -= 1
            if usage is not None:
                self.usage = usage if self.usage is None else self.usage + usage
            self._refusal = self._refusal or refusal
            call = None if self._refusal is None else self._call
            shows = not self._undecided and self._refusal is None and self._shows_at_once
            self._changed.notify_all()
        if call is not None:
            call.abort()
        if shows:
            self._text.release()
