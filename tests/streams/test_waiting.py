"""A wait for a turn to settle ends as soon as a worker announces the turn."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from perdure.access.tenants import UserKey
from perdure.turns.reading import SettlementWatch
from tests.turns.harness import Harness

SOON_S = 0.3
"""Shorter than the pause between two checks of a watch that receives announcements."""


@pytest.fixture
def watch(harness: Harness) -> Iterator[SettlementWatch]:
    """A watch as in a gateway that receives announcements of settled turns."""
    made = SettlementWatch(harness.database)
    made.is_notified = True
    made.settled(harness.send("never").turn_id)  # starts the checks, so that the tests begin between two of them
    yield made
    made.close()


def test_an_announcement_ends_a_wait(harness: Harness, watch: SettlementWatch) -> None:
    """An announcement ends a wait at once, not at the next check."""
    sent = harness.send(user_id="bea")
    settled = watch.settled(sent.turn_id)
    harness.run(sent.session_id)
    began = time.monotonic()
    watch.notify([sent.turn_id])
    settled.result(timeout=10)
    assert time.monotonic() - began < SOON_S


def test_an_announcement_before_the_wait_counts(harness: Harness, watch: SettlementWatch) -> None:
    """If a turn settles between a request's first check and its wait, the wait ends at once."""
    sent = harness.send(user_id="bea")
    harness.run(sent.session_id)
    watch.notify([sent.turn_id])
    began = time.monotonic()
    watch.settled(sent.turn_id).result(timeout=10)
    assert time.monotonic() - began < SOON_S


def test_without_an_announcement_the_next_round_finds_it(harness: Harness, watch: SettlementWatch) -> None:
    """If no worker announces a settled turn, the next check finds the turn."""
    sent = harness.send(user_id="bea")
    harness.run(sent.session_id)
    watch.settled(sent.turn_id).result(timeout=10)


def test_an_erased_turn_ends_a_wait(harness: Harness, watch: SettlementWatch) -> None:
    """No worker settles an erased turn: a request that waited for it would wait until its time is up."""
    sent = harness.send(user_id="bea")
    settled = watch.settled(sent.turn_id)
    asked = watch.settled(sent.turn_id, or_asks=True)
    harness.runtime.eraser.erase(UserKey("bea"))
    settled.result(timeout=10)
    asked.result(timeout=10)
