"""`SettlementWatch` notifies callers that wait until a turn is settled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from perdure.database.engine import Database
from perdure.turns.cancel import cancel
from perdure.turns.reading import SettlementWatch
from tests.turns.harness import KILL_THE_OTHERS, PATIENCE_S, Harness


@pytest.fixture
def watch(harness: Harness) -> Iterator[SettlementWatch]:
    """A watch on the harness's database, with its own connections."""
    database = Database(harness.database.url)
    made = SettlementWatch(database)
    yield made
    made.close()
    database.close()


def test_every_waiter_is_notified(harness: Harness, watch: SettlementWatch) -> None:
    """Several callers wait for two turns. Each is notified when its own turn is settled."""
    first, second = harness.send(user_id="ana"), harness.send(user_id="bob")
    waiting = [watch.settled(first.turn_id), watch.settled(first.turn_id), watch.settled(second.turn_id)]
    harness.run(first.session_id)
    assert [waiting[0].result(PATIENCE_S), waiting[1].result(PATIENCE_S)] == [None, None]
    assert not waiting[2].done()
    cancel(harness.runtime, second.turn_id)
    assert waiting[2].result(PATIENCE_S) is None


def test_a_turn_that_is_settled_already(harness: Harness, watch: SettlementWatch) -> None:
    """If a turn is settled before a wait for it begins, the wait ends at once."""
    sent = harness.send()
    harness.run(sent.session_id)
    assert watch.settled(sent.turn_id).result(PATIENCE_S) is None


def test_it_survives_lost_connections(harness: Harness, watch: SettlementWatch) -> None:
    """A wait continues after PostgreSQL terminates the connections of the watch."""
    sent = harness.send()
    waiting = watch.settled(sent.turn_id)
    for _ in range(3):
        harness.sql(KILL_THE_OTHERS)
    harness.database.engine.dispose()
    harness.run(sent.session_id)
    assert waiting.result(PATIENCE_S) is None


def test_a_cancelled_wait_is_forgotten(harness: Harness, watch: SettlementWatch) -> None:
    """A cancelled wait does not disturb other waits for the same turn."""
    sent = harness.send()
    gone, stays = watch.settled(sent.turn_id), watch.settled(sent.turn_id)
    assert gone.cancel()
    harness.run(sent.session_id)
    assert stays.result(PATIENCE_S) is None


def test_closing_ends_all_waits(harness: Harness, watch: SettlementWatch) -> None:
    """Closing the watch cancels all waits, so that no request hangs while a gateway shuts down."""
    waiting = watch.settled(harness.send().turn_id)
    watch.close()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_S)
