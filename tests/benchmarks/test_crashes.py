"""The harness of the crash table, with a planted system in place of a real one.

The table compares systems, so its harness must find each fault, and must find none where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.crashes import section
from benchmarks.crashes.counting import Counts, Played, count
from benchmarks.crashes.harness import Place, System, run
from benchmarks.crashes.recorder import POINTS, Event, Point
from benchmarks.crashes.script import RESULT, Phase, Unit
from benchmarks.crashes.systems import Turns
from tests.benchmarks import planted

CLEAN = [Event(at, "turn", point, text=RESULT) for at, point in enumerate(POINTS)]


def schedule(*, without: Sequence[Unit] = (), again: Sequence[Event] = (), has_ended: bool = True) -> Played:
    """A turn that is killed at its end, without the events of some units, and with others after the kill."""
    kept = [event for event in CLEAN if event.point.unit not in without]
    return Played([*kept, *again], float(len(CLEAN)), has_ended)


def event(unit: Unit, phase: Phase, at: float = 20.0, key: str | None = None, text: str | None = RESULT) -> Event:
    return Event(at, "turn", Point(unit, phase), key, text)


def nothing_but(**found: int) -> dict[str, int]:
    names = ("lost", "stuck", "model_calls", "executions", "effects", "new_keys", "missing", "in_doubt", "replies")
    return {name: found.get(name, 0) for name in names}


def counted(counts: Counts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in nothing_but()}


@pytest.mark.parametrize(
    ("played", "found"),
    [
        (schedule(), {}),
        (schedule(without=[Unit.REPLY]), {"lost": 1}),
        (schedule(has_ended=False), {"stuck": 1}),
        (schedule(again=[event(Unit.FIRST_CALL, Phase.INSIDE)]), {"model_calls": 1}),
        (schedule(again=[event(Unit.FIRST_CALL, Phase.BEFORE)]), {}),
        (schedule(again=[event(Unit.SECOND_CALL, Phase.INSIDE)] * 2), {"model_calls": 2}),
        (schedule(again=[event(Unit.TOOL, Phase.BEFORE)]), {"executions": 1}),
        (schedule(again=[event(Unit.TOOL, Phase.INSIDE)]), {"effects": 1}),
        (schedule(again=[event(Unit.TOOL, Phase.INSIDE, key="new")]), {"effects": 1, "new_keys": 1}),
        (schedule(without=[Unit.TOOL]), {"missing": 1}),
        (schedule(without=[Unit.TOOL, Unit.REPLY]), {"lost": 1}),
        (
            schedule(without=[Unit.SECOND_CALL], again=[event(Unit.SECOND_CALL, Phase.INSIDE, text="unknown")]),
            {"in_doubt": 1},
        ),
        (schedule(again=[event(Unit.REPLY, Phase.INSIDE)]), {"replies": 1}),
    ],
)
def test_each_fault_of_a_schedule_counts_as_what_it_is(played: Played, found: dict[str, int]) -> None:
    """A fault in another column, or in two, would be a false statement about a system."""
    assert counted(count([schedule(), played])) == nothing_but(**found)


def test_a_take_over_lasts_until_the_next_unit_begins() -> None:
    """What the killed worker reported before is no take-over, and a turn that needed none has none."""
    again = [event(Unit.REPLY, Phase.BEFORE, 30.0), event(Unit.REPLY, Phase.BEFORE, 40.0)]
    counts = count([schedule(), schedule(again=again)])
    assert (counts.take_over_s, counts.median_s, counts.max_s) == ((18.0,), 18.0, 18.0)


class Planted(System):
    """A system that begins each turn again from its start after a kill."""

    name, limit, document = "planted", "the start of the process", "tests/benchmarks/planted.py"
    packages = ("pytest",)
    workers = lanes = 1

    def argv(self, _place: Place, _number: int) -> Sequence[str]:
        return ["-m", planted.__name__]

    @contextmanager
    def opened(self, place: Place) -> Iterator[Turns]:
        yield Turns(place.recorder.request, {})


@pytest.mark.exhaustive  # it starts servers and a worker for each point
def test_a_worker_is_killed_at_a_point_and_its_turn_is_recorded() -> None:
    """The planted system repeats all that happened before the kill: the counts follow from the points alone."""
    points = [*(POINTS[at] for at in (1, 3, 4, 7, 10, 11))]
    counts = count(run(Planted(), points, lambda _: None).played)
    assert counted(counts) == nothing_but(model_calls=6 + 3, executions=5, effects=4, new_keys=4, replies=2)
    assert len(counts.take_over_s) == len(points)
    assert all(0 < seconds < 60 for seconds in counts.take_over_s)


def test_a_system_that_is_not_installed_has_a_column_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing column would look as if the system had not been considered, and zeros as if it had been measured."""
    monkeypatch.setattr(section, "SYSTEMS", {"a_package_that_is_not_installed": [Planted()]})
    unused: Any = SimpleNamespace(quick=False)
    table = section.measure(unused)
    assert (table.columns, table.rows[0]) == (("", "planted"), ("schedules", "not installed"))
    assert {row[1] for row in table.rows[1:]} == {""}
    assert table.figures == {}
