"""A backlog is woken at the speed at which workers take the wake-ups, and few wake-ups wait at the broker."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest

from perdure.sessions.ending import request_end
from perdure.sessions.queries import CLAIM_ENDING
from perdure.turns import drain
from perdure.turns import sweep as sweeping
from perdure.turns.outbox import deliver
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness
from tests.turns.test_outbox import Recipient

MOST = 8
BACKLOG = 50

Work = Callable[[], object]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish at most `MOST` wake-ups that no worker has taken."""
    monkeypatch.setattr(sweeping, "MOST_A_ROUND", MOST)


def _sessions(harness: Harness) -> tuple[list[UUID], Work]:
    """Sessions whose wake-ups are lost, and a worker that runs the session that was woken first."""
    harness.waker.away = True
    for number in range(BACKLOG):
        harness.send(user_id=f"user {number}")
    harness.waker.away = False
    woken = harness.waker.sessions
    return woken, _each(woken, harness.run)


def _endings(harness: Harness) -> tuple[list[UUID], Work]:
    """Sessions that are to end, and a worker that claims the one that was woken first."""
    for number in range(BACKLOG):
        session_id = harness.send(user_id=f"user {number}").session_id
        harness.run(session_id)
        request_end(harness.database, session_id, "enough")
    woken = harness.waker.endings
    given = {"owner": "by hand", "lease_s": 30}
    return woken, _each(woken, lambda each: harness.database.run(CLAIM_ENDING, {"session_id": each, **given}))


def _deliveries(harness: Harness) -> tuple[list[UUID], Work]:
    """Due deliveries to many hosts, and a worker that attempts the one that was woken first."""
    harness.waker.away = True
    for number in range(BACKLOG):
        reply_to = {"url": f"https://{number}.example/"}
        harness.run(harness.send(user_id=f"user {number}", reply_to=reply_to).session_id)
    harness.waker.away = False
    woken = harness.waker.deliveries
    recipient = Recipient()
    return woken, _each(woken, lambda each: deliver(harness.database, {"url": recipient}, each))


def _each(woken: list[UUID], take: Callable[[UUID], object]) -> Work:
    """A worker that takes the next wake-up each time that it is called."""
    taken = iter(woken)

    def work() -> None:
        if (one := next(taken, None)) is not None:
            take(one)

    return work


KINDS = [_sessions, _endings, _deliveries]


@pytest.mark.long
@pytest.mark.parametrize("arrange", KINDS)
def test_one_round_wakes_a_backlog_whose_wake_ups_are_taken(
    harness: Harness, arrange: Callable[[Harness], tuple[list[UUID], Work]]
) -> None:
    """If workers take the wake-ups, the next ones follow in the same round."""
    woken, work = arrange(harness)
    harness.move(5.1)

    def stopped_after(_: float) -> bool:
        for _ in range(MOST):
            work()
        return False

    sweep(harness.runtime, stopped_after=stopped_after)
    assert len(woken) == len(set(woken)) == BACKLOG


@pytest.mark.long
@pytest.mark.parametrize("arrange", KINDS)
def test_the_list_of_wake_ups_never_grows_beyond_the_limit(
    harness: Harness, arrange: Callable[[Harness], tuple[list[UUID], Work]]
) -> None:
    """Slow workers get no more wake-ups than `MOST` ahead of what they take, and none at all if they take none."""
    woken, work = arrange(harness)
    harness.move(5.1)
    taken = 0

    def stopped_after(_: float) -> bool:
        nonlocal taken
        assert len(woken) - taken <= MOST
        if taken < 2 * MOST:
            work()
            taken += 1
        return False

    sweep(harness.runtime, stopped_after=stopped_after)
    assert taken < len(woken) <= taken + MOST
    assert len(woken) > MOST, "it published more as workers took wake-ups"


def test_without_workers_a_round_publishes_its_limit(harness: Harness) -> None:
    """If no worker takes a wake-up, a round publishes `MOST` wake-ups, however often it looks."""
    woken, _ = _sessions(harness)
    harness.move(5.1)
    sweep(harness.runtime)
    assert len(woken) == MOST


@pytest.mark.long
@pytest.mark.parametrize("reason", ["the worker stops", "the intake closes"])
def test_a_long_round_ends_early(harness: Harness, reason: str) -> None:
    """A round with a backlog ends as soon as the worker stops or the intake closes, because no turn may begin then."""
    woken, work = _sessions(harness)
    harness.move(5.1)
    looks = 0

    def stopped_after(_: float) -> bool:
        nonlocal looks
        looks += 1
        for _ in range(MOST):
            work()
        if looks == 2 and reason == "the intake closes":
            drain.begin(harness.database)
        return looks == 2 and reason == "the worker stops"

    sweep(harness.runtime, stopped_after=stopped_after)
    assert (looks, len(woken)) == (2, 2 * MOST)


@pytest.mark.long
@pytest.mark.parametrize("arrange", [_endings, _deliveries])
@pytest.mark.parametrize("closes", ["before the round", "during the round"])
def test_a_closed_intake_delays_no_endings_and_no_deliveries(
    harness: Harness, arrange: Callable[[Harness], tuple[list[UUID], Work]], closes: str
) -> None:
    """While the intake is closed, a round wakes a whole backlog of work that begins no turn."""
    woken, work = arrange(harness)
    harness.move(5.1)

    def stopped_after(_: float) -> bool:
        for _ in range(MOST):
            work()
        drain.begin(harness.database)
        return False

    if closes == "before the round":
        drain.begin(harness.database)
    sweep(harness.runtime, turns=closes == "during the round", stopped_after=stopped_after)
    assert len(woken) == len(set(woken)) == BACKLOG


def test_a_closed_intake_wakes_no_turn(harness: Harness) -> None:
    """Each worker would refuse it."""
    woken, _ = _sessions(harness)
    harness.move(5.1)
    drain.begin(harness.database)
    found = sweep(harness.runtime, turns=False)
    assert found is not None
    assert (found.sessions, woken) == (0, [])


def test_a_refused_wake_up_ends_the_round(harness: Harness) -> None:
    """If the broker refuses a wake-up, the round publishes no more, and the next round wakes the rest."""
    woken, work = _sessions(harness)
    harness.move(5.1)

    def stopped_after(_: float) -> bool:
        for _ in range(MOST):
            work()
        harness.waker.away = True
        return False

    found = sweep(harness.runtime, stopped_after=stopped_after)
    assert found is not None
    assert (found.sessions, found.refused, len(woken)) == (MOST, MOST, MOST)
    harness.waker.away = False
    harness.move(5.1)
    sweep(harness.runtime)
    assert len(set(woken)) == 2 * MOST
