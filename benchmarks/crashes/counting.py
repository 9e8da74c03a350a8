"""What the schedules of a system show, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.crashes.recorder import Event, Point
from benchmarks.crashes.script import RESULT, Phase, Unit


@dataclass(frozen=True, slots=True)
class Played:
    """A schedule: the record of its turn, when the worker was killed, and whether the system ended the turn."""

    events: Sequence[Event]
    killed_at: float
    has_ended: bool

    @property
    def take_over_s(self) -> float | None:
        """The seconds from the kill until the next unit began; `None` if none did."""
        later = [each.at for each in self.events if each.point.phase is Phase.BEFORE and each.at > self.killed_at]
        return min(later) - self.killed_at if later else None

    def times(self, unit: Unit, phase: Phase = Phase.INSIDE) -> int:
        """How often a unit happened, or reached `phase`."""
        return sum(each.point == Point(unit, phase) for each in self.events)

    def keys(self, unit: Unit) -> set[str | None]:
        """The idempotency keys with which a unit happened."""
        return {each.key for each in self.events if each.point == Point(unit, Phase.INSIDE)}


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over the schedules of a system."""

    schedules: int
    lost: int
    """Turns without a reply."""
    stuck: int
    """Turns that the system had not ended when the time was over."""
    model_calls: int
    """Model calls beyond the first of each unit, all of which a provider bills."""
    executions: int
    """Times that the tool's function was entered again."""
    effects: int
    """Times that the tool's effect happened again."""
    new_keys: int
    """Of these, those with another idempotency key, which no receiver can recognise."""
    missing: int
    """Turns with a reply whose tool had no effect."""
    in_doubt: int
    """Turns in which the model read something else than the tool's result: that the outcome is unknown."""
    replies: int
    """Replies beyond the first of each turn."""
    take_over_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median of the take-overs; 0 if there was none."""
        return median(self.take_over_s) if self.take_over_s else 0.0

    @property
    def max_s(self) -> float:
        """The longest take-over; 0 if there was none."""
        return max(self.take_over_s, default=0.0)


def count(played: Sequence[Played]) -> Counts:
    """Count what the schedules show."""
    sums: Counter[str] = Counter()
    for each in played:
        effects, replies = each.times(Unit.TOOL), each.times(Unit.REPLY)
        read = [event.text for event in each.events if event.point == Point(Unit.SECOND_CALL, Phase.INSIDE)]
        sums["lost"] += replies == 0
        sums["stuck"] += not each.has_ended
        sums["model_calls"] += sum(max(each.times(unit) - 1, 0) for unit in (Unit.FIRST_CALL, Unit.SECOND_CALL))
        sums["executions"] += max(each.times(Unit.TOOL, Phase.BEFORE) - 1, 0)
        sums["effects"] += max(effects - 1, 0)
        sums["new_keys"] += max(len(each.keys(Unit.TOOL)) - 1, 0)
        sums["missing"] += effects == 0 and replies > 0
        sums["in_doubt"] += any(text != RESULT for text in read)
        sums["replies"] += max(replies - 1, 0)
    found = tuple(seconds for each in played if (seconds := each.take_over_s) is not None)
    names = ("lost", "stuck", "model_calls", "executions", "effects", "new_keys", "missing", "in_doubt", "replies")
    return Counts(len(played), **{name: sums[name] for name in names}, take_over_s=found)
