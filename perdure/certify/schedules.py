"""The schedules of a scenario: where one of its two workers is killed, and whether Redis is flushed then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.agents import Agent
from perdure.certify.boundaries import REPEATABLE, is_unrelated
from perdure.certify.certification import Scenario
from perdure.certify.faults import Note, Place

MODEL = "model"
"""The name of the places within a model call; the n-th is within the turn's n-th call."""

_COMMITS = {
    "turns.claim_due": "claiming the turn",
    "turns.claim": "claiming the turn",
    "turns.keep_instructions": "storing the instructions",
    "turns.finish_effect": "storing the result of a call",
    "turns.change_arguments": "storing changed arguments",
    "turns.begin_effects": "beginning the approved calls",
    "turns.ask": "storing the calls that wait for approval",
    "turns.settle": "storing the reply",
}
_COMMON = ("turns.claim", "turns.claim_due", "turns.keep_instructions", "turns.settle")
"""Commits that are alike in each scenario: only the first one has kills around them."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What happens to the turn of a scenario. `place` is `None` if nothing does; `flush`: Redis is flushed then."""

    agent: Agent
    scenario: Scenario
    place: Place | None = None
    flush: bool = False

    @property
    def events(self) -> int:
        """How many things happen."""
        return (self.place is not None) + self.flush

    def __str__(self) -> str:
        calls = "; ".join(", ".join(f"{call.name}({call.arguments})" for call in step) for step in self.scenario.steps)
        lines = [f"{self.agent.name} calls {calls}"]
        if self.place is not None:
            lines.append(f"the worker is killed {where(self.place)}")
        if self.flush:
            lines.append("Redis is flushed")
        if self.place is not None:
            lines.append("the other worker continues the turn")
        return ", ".join(lines)


def where(place: Place) -> str:
    """A place in words.

    >>> where(Place("after", "turns.step", 1))
    'after committing step 1, a reply and the intents of its calls'
    """
    tool, _, point = place.name.rpartition(".")
    if place.moment == "within" and place.name == MODEL:
        return f"within its model call {place.nth}"
    if place.moment == "within":
        times = "" if place.nth == 1 else f", execution {place.nth}"
        return f"just before {tool} begins{times}" if point == "entered" else f"just after {tool} returned{times}"
    if place.name == "turns.step":
        what = "a reply and the intents of its calls" if place.nth % 2 else "the results of its calls"
        return f"{place.moment} committing step {place.nth}, {what}"
    what = _COMMITS.get(place.name, place.name)
    return f"{place.moment} {what}" if place.nth == 1 else f"{place.moment} {what}, time {place.nth}"


def schedules_of(
    agent: Agent, scenario: Scenario, notes: Sequence[Note], model_calls: int, *, first: bool
) -> list[Schedule]:
    """The disturbed schedules of a scenario, the shorter ones first. `notes` are those of an undisturbed turn."""
    places = _places(notes, first=first) + [Place("within", MODEL, nth + 1) for nth in range(model_calls)]
    return [Schedule(agent, scenario, place, flush=flush) for flush in (False, True) for place in places]


def _places(notes: Sequence[Note], *, first: bool) -> list[Place]:
    seen: list[tuple[str, str]] = []
    for note in notes:
        place = (note.moment, note.name)
        repeated = note.name in REPEATABLE and place in seen
        if not is_unrelated(note.name) and not repeated and (first or note.name not in _COMMON):
            seen.append(place)
    return [Place(*place, nth=seen[: at + 1].count(place)) for at, place in enumerate(seen)]
