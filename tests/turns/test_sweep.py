"""The sweeper publishes lost wake-ups again. Each round runs in only one worker. Repeated wake-ups back off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from perdure.memory.consolidation.queries import TO_WAKE
from perdure.sessions.queries import ENDINGS_DUE
from perdure.turns import outbox_queries
from perdure.turns import queries as turns_queries
from perdure.turns import sweep as sweeping
from perdure.turns.lease import queries as lease_queries
from perdure.turns.outbox import FIRST_RETRY_S, DeliveryFailed, DeliveryPostponed, deliver
from perdure.turns.sweep import Swept, sweep
from tests.turns.harness import Harness, side_by_side


def _lost(harness: Harness, number: int = 1) -> list[UUID]:
    """Accept messages whose wake-ups are lost; returns the ids of the sessions."""
    harness.waker.away = True
    sessions = [harness.send(user_id=f"user {each}").session_id for each in range(number)]
    harness.waker.away = False
    return sessions


def _round(harness: Harness) -> list[UUID]:
    """Advance the clock by one interval and run a round; returns the sessions that the round woke."""
    harness.move(harness.settings.turn.sweep_s + 0.1)
    harness.waker.sessions.clear()
    assert sweep(harness.runtime) is not None
    return list(harness.waker.sessions)


def test_one_of_several_sweepers_runs_the_round(harness: Harness) -> None:
    """If six workers sweep concurrently, one of them runs the round, and `sweep` returns `None` in the others."""
    _lost(harness)
    for _ in range(3):
        harness.move(5.1)
        found = side_by_side(*[lambda: sweep(harness.runtime)] * 6)
        assert sum(isinstance(each, Swept) for each in found) == 1
        assert [each for each in found if not isinstance(each, Swept)] == [None] * 5
        assert sweep(harness.runtime) is None


def test_it_repeats_a_lost_wake_up(harness: Harness) -> None:
    """The next round wakes a session whose wake-up was lost."""
    (session_id,) = _lost(harness)
    assert _round(harness) == [session_id]


def test_it_wakes_neither_running_nor_settled_turns(harness: Harness) -> None:
    """A round wakes no session whose turn is running or settled."""
    held = harness.send(user_id="held").session_id
    done = harness.send(user_id="done").session_id
    harness.run(done)
    harness.claimed(held)
    assert _round(harness) == []


@pytest.mark.exhaustive
def test_it_backs_off(harness: Harness) -> None:
    """While no worker claims a session, the pause between its wake-ups doubles each time, up to 320 seconds."""
    _lost(harness)
    woken = [bool(_round(harness)) for _ in range(200)]
    at = [number for number, hit in enumerate(woken) if hit]
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert gaps[:4] == sorted(gaps[:4])
    assert all(60 <= gap <= 65 for gap in gaps[-2:])  # fewer rounds if these are slow
    assert len(at) < 12


def test_a_claim_resets_the_back_off(harness: Harness) -> None:
    """A claim shows that wake-ups of the session reach a worker, so the claim resets the back-off."""
    (session_id,) = _lost(harness)
    for _ in range(20):
        _round(harness)
    assert harness.session(session_id).wakes > 2
    harness.claimed(session_id)
    assert harness.session(session_id).wakes == 0


def test_a_session_with_an_expired_lease_is_due_at_once(harness: Harness) -> None:
    """After a killed worker's lease expires, the next round wakes the session."""
    session_id = harness.send().session_id
    for _ in range(3):
        _round(harness)
    harness.claimed(session_id)
    assert _round(harness) == []
    harness.move(30)
    assert _round(harness) == [session_id]


def test_a_parked_turn_is_due_at_once(harness: Harness) -> None:
    """After an internal error, the runner parks the turn. The next round wakes the session."""
    session_id = harness.send().session_id
    harness.script(ZeroDivisionError("a bug"))
    harness.run(session_id)
    assert _round(harness) == [session_id]


def test_a_refused_wake_up_is_due_next_round(harness: Harness) -> None:
    """A wake-up that the broker refuses does not increase the back-off."""
    sessions = _lost(harness, 3)
    for _ in range(6):
        harness.waker.away = True
        harness.move(5.1)
        assert sweep(harness.runtime) == Swept(sessions=0, deliveries=0, refused=3)
    harness.waker.away = False
    assert sorted(_round(harness)) == sorted(sessions)


def test_a_round_is_bounded_and_the_urgent_are_first(harness: Harness) -> None:
    """A round wakes a limited number of sessions. Sessions with a higher priority come first."""
    sessions = _lost(harness, 11)
    harness.waker.away = True
    urgent = harness.send(user_id="urgent", priority=9).session_id
    harness.waker.away = False
    sessions.append(urgent)
    most, sweeping.MOST_A_ROUND = sweeping.MOST_A_ROUND, 5
    try:
        first, second, third = _round(harness), _round(harness), _round(harness)
    finally:
        sweeping.MOST_A_ROUND = most
    assert [len(first), len(second)] == [5, 5]
    assert first[0] == urgent
    assert set(first) | set(second) | set(third) == set(sessions)


def test_a_session_is_as_urgent_as_its_most_urgent_turn(harness: Harness) -> None:
    """An urgent message to a busy session raises the session's priority until all its turns are settled."""
    (queued,) = _lost(harness)
    harness.waker.away = True
    merged = harness.send(user_id="merged").session_id
    others = [harness.send(user_id=f"other {each}").session_id for each in range(3)]
    harness.send(user_id="user 0", priority=8)
    harness.send(user_id="merged", priority=9, on_busy="merge")
    harness.waker.away = False
    assert _round(harness) == [merged, queued, *others]
    harness.run(queued)
    harness.waker.away = True
    harness.send(user_id="user 0", priority=1)
    harness.waker.away = False
    harness.move(30)
    assert _round(harness)[-1] == queued


def test_due_deliveries_are_woken(harness: Harness) -> None:
    """A round publishes a wake-up for each delivery whose first wake-up was lost."""
    harness.waker.away = True
    sent = [harness.send(user_id=f"u{n}", reply_to={"url": "https://a.example"}) for n in range(3)]
    for each in sent:
        harness.run(each.session_id)
    harness.move(5.1)
    assert sweep(harness.runtime) == Swept()
    harness.waker.away = False
    _round(harness)
    assert len(harness.waker.deliveries) == 3


def test_a_locked_session_delays_no_round(harness: Harness) -> None:
    """The sweeper skips rows that another transaction has locked."""
    sessions = _lost(harness, 2)
    engine = harness.database.engine.execution_options(isolation_level="READ COMMITTED")
    with engine.begin() as connection:
        connection.exec_driver_sql("SELECT 1 FROM sessions WHERE session_id = %(id)s FOR UPDATE", {"id": sessions[0]})
        assert _round(harness) == [sessions[1]]


def test_an_idle_round_costs_six_commits(harness: Harness) -> None:
    """A round without due work commits six times. A second sweep within the interval commits once."""
    ran: list[str] = []
    harness.move(6)
    with harness.hooked(lambda moment, name: ran.append(name) if moment == "after" else None):
        assert sweep(harness.runtime) == Swept()
        assert sweep(harness.runtime) is None
    turns = (turns_queries.TAKE_SWEEP, turns_queries.WAKE_DUE, lease_queries.ADMIT_DUE)
    others = (ENDINGS_DUE, TO_WAKE, outbox_queries.DELIVERIES_DUE)
    assert ran == [each.name for each in (*turns, *others, turns_queries.TAKE_SWEEP)]


def test_a_round_a_little_early_is_not_skipped(harness: Harness) -> None:
    """A worker attempts once per interval: an attempt a little before the due time takes the round."""
    sweep_s = harness.settings.turn.sweep_s
    harness.move(2 * sweep_s)
    assert sweep(harness.runtime) is not None
    for early_s in (sweep_s / 100, sweep_s / 10):
        harness.move(sweep_s - early_s)
        assert sweep(harness.runtime) is not None
    harness.move(sweep_s / 2)
    assert sweep(harness.runtime) is None


def test_sessions_without_an_isolation_slot_delay_no_other(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that find no free slot for a dedicated process do not delay the wake-up of another session."""
    monkeypatch.setattr(sweeping, "MOST_A_ROUND", 5)
    crowded = set(_lost(harness, 6))
    harness.move(1)
    harness.waker.away = True
    lost = harness.send(user_id="lost").session_id
    harness.waker.away = False
    woken: Counter[UUID] = Counter()
    for _ in range(120):  # ten minutes
        found = _round(harness)
        woken.update(found)
        for session_id in crowded.intersection(found):
            sweeping.postpone(harness.runtime, session_id)
        if lost in found:
            break
    assert woken[lost] == 1
    assert sum(woken.values()) < 3 * len(crowded), "within a few rounds"


@pytest.mark.long
def test_a_session_without_an_isolation_slot_is_woken_within_a_minute(harness: Harness) -> None:
    """A session that finds no free slot for a dedicated process backs off for at most a minute."""
    (session_id,) = _lost(harness)
    seen = [0]
    for number in range(1, 120):
        if session_id in _round(harness):
            seen.append(number)
            sweeping.postpone(harness.runtime, session_id)
    gaps = [(later - earlier) * harness.settings.turn.sweep_s for earlier, later in pairwise(seen)]
    assert max(gaps) <= 60
    assert len(seen) < 40, "the session backs off"


@pytest.mark.exhaustive
def test_a_session_with_many_messages_is_swept_like_any_other(harness: Harness) -> None:
    """New messages whose wake-ups are lost do not reset the back-off of their session."""
    harness.waker.away = True
    chatty = harness.send(user_id="chatty").session_id
    quiet = harness.send(user_id="quiet").session_id
    woken: Counter[UUID] = Counter()
    for second in range(1, 30 * 60):
        harness.move(1)
        if second % 4 == 0:
            harness.waker.away = True
            assert harness.send(user_id="chatty").session_id == chatty
        if second % 5 == 0:
            harness.waker.away = False
            harness.waker.sessions.clear()
            sweep(harness.runtime)
            woken.update(harness.waker.sessions)
    assert woken[quiet] >= 8
    assert abs(woken[chatty] - woken[quiet]) <= 2


@pytest.mark.long
def test_settled_turns_leave_no_back_off(harness: Harness) -> None:
    """After a session's turns are settled, the next round repeats the lost wake-up of a new message."""
    (session_id,) = _lost(harness)
    for _ in range(100):
        _round(harness)
    harness.sql(
        "UPDATE turns SET settled_at = perdure_now(), status = 'cancelled' WHERE session_id = %(id)s", id=session_id
    )
    harness.sql("UPDATE sessions SET unsettled = 0, turn_count = 1 WHERE session_id = %(id)s", id=session_id)
    harness.waker.away = True
    harness.send(user_id="user 0")
    harness.waker.away = False
    assert _round(harness) == [session_id]


@pytest.mark.long
def test_deliveries_without_a_consumer_back_off(harness: Harness) -> None:
    """If no worker consumes the deliveries for ten minutes, each delivery is published seven or eight times."""
    harness.waker.away = True
    for number in range(7):
        harness.run(harness.send(user_id=f"u{number}", reply_to={"url": "https://a.example"}).session_id)
    harness.waker.away = False
    for _ in range(120):
        _round(harness)
    published = Counter(harness.waker.deliveries)
    assert len(published) == 7
    assert set(published.values()) <= {7, 8}


def test_a_delivery_that_the_broker_refused_is_due_next_round(harness: Harness) -> None:
    """A refused wake-up does not increase the back-off of the delivery."""
    harness.waker.away = True
    harness.run(harness.send(reply_to={"url": "https://a.example"}).session_id)
    for _ in range(6):
        harness.move(5.1)
        sweep(harness.runtime)
    harness.waker.away = False
    _round(harness)
    assert len(harness.waker.deliveries) == 1


@pytest.mark.long
def test_an_attempt_ends_the_back_off_of_a_delivery(harness: Harness) -> None:
    """After a failed attempt, a delivery is due at its retry time. The back-off of earlier wake-ups is discarded."""
    harness.waker.away = True
    harness.run(harness.send(reply_to={"url": "https://a.example"}).session_id)
    harness.waker.away = False
    for _ in range(70):
        _round(harness)
    delivery_id = harness.waker.deliveries[-1]
    assert deliver(harness.database, {"url": Refusing()}, delivery_id) == DeliveryPostponed(FIRST_RETRY_S)
    harness.waker.deliveries.clear()
    _round(harness)
    assert harness.waker.deliveries == [delivery_id]


class Refusing:
    """A carrier whose receiver is down."""

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        raise DeliveryFailed("503 Service Unavailable")


@pytest.mark.parametrize("failing", sweeping.DUTIES)
def test_a_duty_that_fails_keeps_no_other_from_its_turn(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    """If one duty of the round fails in each round, all other duties still run in each round."""
    finished = Counter[str]()

    def planted(name: str, duty: Callable[[sweeping.Round], object]) -> Callable[[sweeping.Round], object]:
        def run(this: sweeping.Round) -> object:
            if name == failing:
                harness.sql("SELECT 1 FROM a_table_that_does_not_exist")
            result = duty(this)
            finished[name] += 1
            return result

        return run

    for name, duty in list(sweeping.DUTIES.items()):
        monkeypatch.setitem(sweeping.DUTIES, name, planted(name, duty))
    runtime = harness.runtime
    for _ in range(3):
        harness.move(harness.settings.turn.sweep_s + 0.1)
        assert sweep(runtime) is not None
    assert finished == dict.fromkeys(sweeping.DUTIES.keys() - {failing}, 3)
    lines = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert lines
    assert all(f"'{failing}'" in line for line in lines)
