"""A duty that fails pauses by itself, and each failure is one line in the log."""

from __future__ import annotations

import logging
from datetime import timedelta
from itertools import pairwise

import pytest

from perdure.clock import MovedClock
from perdure.errors import Unavailable
from perdure.resilience.duties import LONGEST_PAUSE_S, NOT_DUE, Duties


def _fail() -> None:
    raise ZeroDivisionError("a bug")


def test_a_failure_keeps_no_other_duty_from_its_turn(clock: MovedClock, caplog: pytest.LogCaptureFixture) -> None:
    """After a failure, only the duty that failed pauses, and the log names it in one line."""
    duties, ran = Duties(clock, 5), list[str]()
    caplog.set_level(logging.INFO)
    duties.run("first", _fail)
    duties.run("second", lambda: ran.append("second"))
    duties.run("first", lambda: ran.append("first, too early"))
    clock.advance(timedelta(seconds=5.1))
    duties.run("first", lambda: ran.append("first"))
    assert ran == ["second", "first"]
    lines = [each.getMessage() for each in caplog.records]
    assert lines == [
        "the duty 'first' failed, and pauses for 5 s: ZeroDivisionError",
        "the duty 'first' succeeded again",
    ]


def test_the_pause_doubles_and_ends_with_a_success(clock: MovedClock) -> None:
    """The pause of a duty doubles up to a limit, so that a permanent failure costs little, and a success ends it."""
    duties = Duties(clock, 5)
    tried: list[float] = []

    def fail() -> None:
        tried.append(clock.monotonic())
        raise ZeroDivisionError

    while len(tried) < 8:
        duties.run("it", fail)
        clock.advance(timedelta(seconds=1))
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps == pytest.approx([5, 10, 20, 40, *[LONGEST_PAUSE_S] * 3], abs=1.5)
    clock.advance(timedelta(seconds=LONGEST_PAUSE_S))
    assert duties.run("it", lambda: 1) == 1
    assert duties.run("it", lambda: 1) == 1
    duties.run("it", fail)
    clock.advance(timedelta(seconds=5.1))
    assert duties.run("it", lambda: 1) == 1


def test_a_round_of_another_process_is_no_success(clock: MovedClock, caplog: pytest.LogCaptureFixture) -> None:
    """A duty that failed has not succeeded again because another worker took the next round."""
    seen = list[str]()
    duties = Duties(clock, 5, observe=lambda _, outcome: seen.append(outcome))
    caplog.set_level(logging.INFO)
    for work in (_fail, lambda: NOT_DUE, _fail, lambda: NOT_DUE, lambda: None):
        duties.run("it", work)
        clock.advance(timedelta(seconds=11))
    assert seen == ["failed", "failed", "succeeded"]
    assert [each.getMessage() for each in caplog.records] == [
        "the duty 'it' failed, and pauses for 5 s: ZeroDivisionError",
        "the duty 'it' failed, and pauses for 10 s: ZeroDivisionError",
        "the duty 'it' succeeded again",
    ]


def test_an_outage_does_not_prolong_the_pause(clock: MovedClock) -> None:
    """A duty whose server was unavailable for minutes continues a round after the outage."""
    duties = Duties(clock, 5)

    def fail() -> None:
        raise Unavailable("The database cannot be reached.")

    for _ in range(20):
        duties.run("it", fail)
        clock.advance(timedelta(seconds=5.1))
    assert duties.run("it", lambda: 1) == 1
