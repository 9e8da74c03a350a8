"""The tool `sleep_until` refuses a time that is invalid, past or too far ahead."""

from __future__ import annotations

import pytest

from tests.turns.broker import Broker
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says


@pytest.mark.parametrize(
    ("moment", "why"),
    [
        ("tomorrow", "is not a date and time"),
        ("2001-01-01T00:00:00Z", "is past"),
        ("2999-01-01T00:00:00Z", "ahead"),
        ("9999-12-31T23:59:59-23:59", "ahead"),
        ("0001-01-01T00:00:00+23:59", ""),
        ("9" * 5_000, "is not a date and time"),
    ],
)
def test_a_moment_that_cannot_be_waited_for_is_refused(harness: Harness, broker: Broker, moment: str, why: str) -> None:
    """The model reads why the time was refused."""
    harness.script(calls(("sleep_until", {"moment": moment})), says("done"))
    turn = harness.ask()
    assert turn["status"] == "done"
    assert why in harness.results(turn)[0]
