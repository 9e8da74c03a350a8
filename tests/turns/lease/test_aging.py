"""Waiting raises a session's effective priority, so that no number of urgent sessions delays another one for ever."""

from __future__ import annotations

from uuid import UUID

import pytest

from perdure.settings import Scope, TurnSettings
from perdure.turns import sweep as sweeping
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness

MOST = 4
AGING_S = 30


class Published:
    """Records the session and the priority of each published wake-up."""

    def __init__(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wakes: list[tuple[UUID, int]] = []
        monkeypatch.setattr(harness.waker, "session", self._session)
        self._harness = harness

    def _session(self, session_id: UUID, priority: int) -> bool:
        if not self._harness.waker.away:
            self.wakes.append((session_id, priority))
        return not self._harness.waker.away


@pytest.fixture
def published(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Published:
    """The wake-ups. A round publishes at most `MOST` of them."""
    monkeypatch.setattr(sweeping, "MOST_A_ROUND", MOST)
    return Published(harness, monkeypatch)


def _lost(harness: Harness, priority: int, *users: str) -> list[UUID]:
    harness.waker.away = True
    sessions = [harness.send(user_id=user, priority=priority).session_id for user in users]
    harness.waker.away = False
    return sessions


def _round(harness: Harness, published: Published) -> list[tuple[UUID, int]]:
    published.wakes.clear()
    harness.move(5.1)
    assert sweep(harness.runtime) is not None
    return list(published.wakes)


def test_the_default_is_half_a_minute() -> None:
    """By default, 30 seconds of waiting raise a session by one priority."""
    assert TurnSettings().priority_aging_s == 30


def test_a_session_that_waits_overtakes_newer_urgent_ones(harness: Harness, published: Published) -> None:
    """After eight times the setting, a session of priority 1 is woken with priority 9, and before newer sessions."""
    (low,) = _lost(harness, 1, "low")
    harness.move(8 * AGING_S)
    _lost(harness, 9, *(f"urgent {number}" for number in range(2 * MOST)))
    assert _round(harness, published)[0] == (low, 9)


@pytest.mark.exhaustive
def test_urgent_sessions_that_keep_coming_do_not_starve_another(harness: Harness, published: Published) -> None:
    """If each round has more new urgent sessions than it may wake, an old session still gets its turn."""
    (low,) = _lost(harness, 1, "low")
    for number in range(100):
        _lost(harness, 9, *(f"urgent {number} {each}" for each in range(MOST + 1)))
        if low in dict(_round(harness, published)):
            assert number * 5.1 <= 10 * AGING_S
            return
    pytest.fail("the session starved")


@pytest.mark.long
def test_a_session_whose_wake_ups_wait_at_the_broker_is_published_with_a_growing_priority(
    harness: Harness, published: Published
) -> None:
    """Wake-ups of a low priority wait at the broker. The sweeper's next wake-ups count the whole wait."""
    (low,) = _lost(harness, 1, "low")
    priorities = [priority for _ in range(100) for _, priority in _round(harness, published)]
    assert priorities == sorted(priorities)
    assert (priorities[0], priorities[-1]) == (1, 9)
    assert harness.session(low).priority == 1


def test_without_aging_the_priority_decides(harness: Harness, published: Published) -> None:
    """With 0, waiting raises no priority."""
    harness.set(priority_aging_s=0)
    (low,) = _lost(harness, 1, "low")
    harness.move(3_600)
    urgent = _lost(harness, 9, *(f"urgent {number}" for number in range(MOST)))
    assert _round(harness, published) == [(each, 9) for each in urgent]
    assert _round(harness, published) == [(low, 1)]


def test_a_wait_for_a_person_does_not_count(harness: Harness, published: Published) -> None:
    """A session whose turn waited for something else is as urgent as its message, and ages from the end of the wait."""
    (slept,) = _lost(harness, 1, "slept")
    harness.sql(
        "UPDATE sessions SET not_before = perdure_now() + interval '1 hour' WHERE session_id = %(id)s", id=slept
    )
    harness.move(3_600)
    assert _round(harness, published) == [(slept, 1)]


@pytest.mark.parametrize("by", ["a settled turn", "the sweeper"])
def test_a_users_waiting_sessions_age_too(harness: Harness, published: Published, by: str) -> None:
    """Among a user's queued sessions, one that has waited long is admitted before a newer urgent one."""
    session = harness.settings.session.model_copy(update={"scope": Scope.CHANNEL})
    harness.settings = harness.settings.model_copy(update={"session": session})
    harness.set(user_concurrency=1)
    running = harness.send(channel="first").session_id
    low = harness.send(channel="low", priority=1).session_id
    harness.move(9 * AGING_S)
    harness.send(channel="urgent", priority=9)
    published.wakes.clear()
    if by == "a settled turn":
        harness.run(running)
        assert published.wakes == [(low, 9)]
    else:
        with harness.crashing("after", "turns.settle"):
            harness.run(running)
        assert _round(harness, published) == [(low, 9)]
