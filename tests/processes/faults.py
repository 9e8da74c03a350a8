"""The faults of `perdure.certify.faults`, and what the tools of these tests record beside them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from perdure.certify import faults
from perdure.certify.faults import Fired, Note, Place

__all__ = ["SCENE", "SILENCE_S", "Effect", "Faults", "Fired", "Note", "Place", "done", "wait_until"]

T = TypeVar("T")

SCENE = "PERDURE_TEST_FAULTS"
"""The environment variable that contains the path of the directory of `Faults`."""

SILENCE_S = "PERDURE_TEST_SILENCE_S"
"""The environment variable with the watchdog's minimum time limit, in seconds.

If two lease durations are longer than the minimum, the time limit is two lease durations.
"""

_LOOK_S = 0.01
_SLOWEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Effect:
    """A side effect of a tool, recorded outside of the engine."""

    tool: str
    effect_id: str
    note: str
    pid: int
    after_s: float = 0.0
    """Seconds from the tool's start to its effect. The value is near 0 unless the process was paused in between."""


class Faults(faults.Faults):
    """Faults, the tools' effects, and slow tools that the test lets return."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._effects = directory / "effects"
        self._released = directory / "released"

    # --- the test's side -----------------------------------------------------------------

    def effects(self, note: str | None = None) -> list[Effect]:
        """The tools' effects, in order; with `note`, only those recorded with this note."""
        effects = [Effect(**json.loads(line)) for line in faults.lines(self._effects)]
        return [effect for effect in effects if note is None or effect.note == note]

    def release(self) -> None:
        """Let slow tools return."""
        self._released.touch()

    # --- a worker's side -----------------------------------------------------------------

    def wait_released(self) -> None:
        """Wait until the test lets slow tools return."""
        wait_until(self._released.exists, "slow tools may end", _SLOWEST_S)

    def act(self, effect: Effect) -> None:
        """Record a tool's side effect."""
        faults.append(self._effects, json.dumps(asdict(effect)))


def done(tool: str, note: str) -> str:
    """The result of a tool whose effect took place."""
    return f"{tool} did {note!r}"


def wait_until(condition: Callable[[], T | None], what: str, within_s: float = 20.0) -> T:
    """Poll `condition` and return its first true value; fails the test after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within_s:g} s")
        time.sleep(_LOOK_S)
    return value
