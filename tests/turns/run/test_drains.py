"""A wake-up starts a drain: a worker's thread runs one due session after another."""

from __future__ import annotations

import threading
from uuid import UUID, uuid4

import pytest

from perdure.database.engine import Statement
from perdure.errors import Unavailable
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.settings import Scope
from perdure.turns import drain as intake
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import Accepted
from perdure.turns.lease.claim import NeedsIsolation
from perdure.turns.lease.queries import ISOLATE_FROM_CLAIM
from perdure.turns.run import loop
from perdure.turns.run.loop import Drained, Runner
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness, side_by_side

LOCK = Statement("test.lock", "SELECT 1 FROM sessions WHERE session_id = ANY (%(session_ids)s::uuid[]) FOR UPDATE")


def _drain(harness: Harness, session_id: UUID | None = None) -> Drained:
    return Runner(harness.runtime, "drainer").drain(session_id or uuid4())


def _order(harness: Harness) -> list[UUID]:
    rows = harness.sql("SELECT session_id FROM turns WHERE started_at IS NOT NULL ORDER BY started_at, attempts")
    return [row.session_id for row in rows]


class Moving:
    """A model that takes `seconds` of the test's clock for each answer."""

    name = "scripted"

    def __init__(self, harness: Harness, seconds: float) -> None:
        self._harness = harness
        self._seconds = seconds
        self.woken: list[list[UUID]] = []
        """For each call, the wake-ups that were published before it."""

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        self.woken.append(list(self._harness.waker.sessions))
        self._harness.move(self._seconds)
        return ModelReply("ok")


def _slow(harness: Harness, seconds: float) -> Moving:
    harness.any_model = made = Moving(harness, seconds)
    return made


def _send(harness: Harness, *priorities: int) -> list[Accepted]:
    """Accept a message of another user for each priority, a millisecond apart."""
    sent = []
    for number, priority in enumerate(priorities):
        sent.append(harness.send(user_id=f"user {number}", priority=priority))
        harness.move(0.001)
    return sent


def test_one_wake_up_runs_all_that_is_due(harness: Harness) -> None:
    """One wake-up is enough for all due sessions; each has its reply."""
    sent = _send(harness, 5, 5, 5, 5)
    assert _drain(harness, sent[2].session_id) == Drained(4, ("done",) * 4)
    assert all(harness.turn(each.turn_id)["status"] == "done" for each in sent)
    assert _drain(harness, sent[2].session_id) == Drained(0, ())
    harness.check()


def test_the_drains_of_a_process_share_the_pace_of_their_wake_ups(harness: Harness) -> None:
    """Besides one for each drain, all drains of a process publish one wake-up in a quarter of a second."""
    _send(harness, 5, 5, 5, 5, 5)
    runner = Runner(harness.runtime, "drainer")
    woken: list[int] = []

    class Nested(Moving):
        """Another drain of the process begins during the first one's first turn."""

        def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
            woken.append(len(self._harness.waker.sessions))
            if len(woken) == 1:
                self._harness.move(loop._INVITE_S)
                runner.drain(uuid4(), stopping=lambda: True)
                woken.clear()
                woken.append(len(self._harness.waker.sessions))
            return ModelReply("ok")

    harness.any_model = Nested(harness, 0)
    harness.waker.sessions.clear()
    assert runner.drain(uuid4()).sessions == 4
    assert woken == [woken[0]] * 4, "the second drain has published its wake-up a moment ago"


def test_the_highest_priority_is_first_then_the_longest_wait(harness: Harness) -> None:
    """The session that the wake-up names has no precedence: it may be the newest of a long backlog."""
    _slow(harness, 0.01)
    sent = _send(harness, 3, 5, 9, 5, 3)
    _drain(harness, sent[4].session_id)
    assert _order(harness) == [sent[number].session_id for number in (2, 1, 3, 0, 4)]


def test_a_long_wait_raises_the_priority(harness: Harness) -> None:
    """A session of priority 2 that has waited for four levels of aging precedes a new one of priority 5."""
    _slow(harness, 0.01)
    [low] = _send(harness, 2)
    harness.move(4 * harness.settings.turn.priority_aging_s)
    high = harness.send(user_id="new", priority=5)
    _drain(harness, high.session_id)
    assert _order(harness) == [low.session_id, high.session_id]


def test_a_users_limit_holds_in_a_drain(harness: Harness) -> None:
    """A drain queues a session whose user has no free place, and goes on with other users' sessions."""
    session = harness.settings.session.model_copy(update={"scope": Scope.CHANNEL})
    harness.settings = harness.settings.model_copy(update={"session": session})
    mine = [harness.send(channel=f"channel-{number}") for number in range(3)]
    other = harness.send(user_id="bob")
    harness.claimed(mine[0].session_id)
    harness.set(user_concurrency=1)
    assert _drain(harness, mine[1].session_id) == Drained(1, ("done",))
    assert harness.turn(other.turn_id)["status"] == "done"
    assert all(harness.session(each.session_id).queued_at is not None for each in mine[1:])


def test_a_drain_ends_when_its_time_is_over_and_wakes_another(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `DRAIN_S`, the task ends, so that Celery sees it; the rest is not stranded."""
    monkeypatch.setattr(loop, "_INVITE_S", 60.0)
    _slow(harness, loop.DRAIN_S * 0.6)
    sent = _send(harness, 5, 5, 5)
    harness.waker.sessions.clear()
    assert _drain(harness, sent[0].session_id) == Drained(2, ("done",) * 2)
    assert harness.waker.sessions[-1] == sent[2].session_id
    assert harness.turn(sent[2].turn_id)["status"] == "accepted"


def test_a_stopping_worker_begins_no_further_session(harness: Harness) -> None:
    """At a warm shutdown, the session at hand is finished, and another worker is woken for the others."""
    sent = _send(harness, 5, 5)
    harness.waker.sessions.clear()
    drained = Runner(harness.runtime, "drainer").drain(sent[0].session_id, lambda: True)
    assert drained == Drained(1, ("done",))
    assert set(harness.waker.sessions) == {sent[1].session_id}


def test_no_drain_takes_what_waits_or_needs_its_own_wake_up(harness: Harness) -> None:
    """Sessions that wait, that failed, that were woken by the sweeper or whose holder is dead are left alone."""
    sent = _send(harness, 5, 5, 5, 5, 5, 5)
    for each, change in zip(
        sent,
        (
            "not_before = perdure_now() + interval '1 minute'",
            "strikes = 1, wakes = 0, woken_at = perdure_now()",
            "wakes = 1, woken_at = perdure_now()",
            "lease_until = perdure_now() - interval '1 second', lease_owner = 'dead'",
            "unequipped_since = perdure_now()",
            f"claims = {ISOLATE_FROM_CLAIM}",
        ),
        strict=True,
    ):
        harness.sql(f"UPDATE sessions SET {change} WHERE session_id = %(id)s", id=each.session_id)  # noqa: S608 (ours)
    assert _drain(harness) == Drained(0, ())
    assert _drain(harness, sent[0].session_id) == Drained(0, ()), "it waits"
    assert _drain(harness, sent[1].session_id) == Drained(1, ("done",)), "its wake-up names it"
    assert _drain(harness, sent[2].session_id) == Drained(1, ("done",)), "its wake-up names it"


def test_a_named_session_that_needs_its_wake_up_precedes_the_others(harness: Harness) -> None:
    """The sweeper's wake-ups have an order of their own at the broker."""
    _slow(harness, 0.01)
    sent = _send(harness, 9, 1)
    harness.sql("UPDATE sessions SET wakes = 1 WHERE session_id = %(id)s", id=sent[1].session_id)
    assert _drain(harness, sent[1].session_id) == Drained(2, ("done",) * 2)
    assert _order(harness) == [sent[1].session_id, sent[0].session_id]


def test_a_turn_that_needs_a_process_of_its_own_wakes_another_drain(harness: Harness) -> None:
    """The thread waits for the child process; what its wake-up stood for runs elsewhere."""
    poison, other = _send(harness, 5, 5)
    harness.sql(
        "UPDATE sessions SET claims = %(claims)s, strikes = 2 WHERE session_id = %(id)s",
        claims=ISOLATE_FROM_CLAIM,
        id=poison.session_id,
    )
    harness.waker.sessions.clear()
    drained = _drain(harness, poison.session_id)
    assert isinstance(drained.refused, NeedsIsolation)
    assert harness.waker.sessions == [other.session_id]


def test_a_cancelled_turn_that_needs_a_process_of_its_own_is_settled_without_one(harness: Harness) -> None:
    """The drain settles it, and goes on with the others."""
    poison, _ = _send(harness, 5, 5)
    harness.sql(
        "UPDATE sessions SET claims = %(claims)s, strikes = 2 WHERE session_id = %(id)s",
        claims=ISOLATE_FROM_CLAIM,
        id=poison.session_id,
    )
    harness.sql("UPDATE turns SET status = 'parked' WHERE turn_id = %(id)s", id=poison.turn_id)
    cancel(harness.runtime, poison.turn_id)
    assert _drain(harness, poison.session_id) == Drained(2, ("cancelled", "done"))


def test_closed_intake_stops_drains(harness: Harness) -> None:
    """`perdure drain` closes the intake: no drain begins another session."""
    sent = _send(harness, 5, 5)
    intake.begin(harness.database)
    assert _drain(harness, sent[0].session_id) == Drained(0, ())
    intake.end(harness.database)
    assert _drain(harness, sent[0].session_id) == Drained(2, ("done",) * 2)


def test_a_drain_wakes_further_threads_while_more_is_due(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first claim of a drain wakes the next thread, so that all threads of the workers soon drain."""
    monkeypatch.setattr(loop, "_INVITE_S", 60.0)
    sent = _send(harness, 5, 5, 5)
    harness.waker.sessions.clear()
    _drain(harness, sent[0].session_id)
    assert len(harness.waker.sessions) == 1


def test_a_long_drain_wakes_further_threads_from_time_to_time(harness: Harness) -> None:
    """A thread may have become free since the first claim."""
    _slow(harness, loop._INVITE_S)
    sent = _send(harness, 5, 5, 5)
    harness.waker.sessions.clear()
    _drain(harness, sent[0].session_id)
    assert harness.waker.sessions == [sent[1].session_id, sent[2].session_id]


def test_each_drain_wakes_a_thread_however_soon_it_follows_another(harness: Harness) -> None:
    """The wake-up that started the second drain may have been that of the session that is due next."""
    model = _slow(harness, 0)
    _send(harness, 5, 5, 5)
    runner = Runner(harness.runtime, "drainer")
    for _ in range(2):
        harness.waker.sessions.clear()
        runner.drain(uuid4(), lambda: True)
    assert len(model.woken[1]) == 1


def test_enough_wake_ups_stop_further_ones(harness: Harness) -> None:
    """While enough wake-ups wait, neither accepting nor draining publishes one. No session is stranded."""
    harness.waker.enough = True
    sent = _send(harness, 5, 5, 5)
    assert harness.waker.sessions == []
    assert _drain(harness, sent[1].session_id) == Drained(3, ("done",) * 3)
    assert harness.waker.sessions == []


def test_a_session_that_is_not_drainable_is_woken_even_if_enough_wake_ups_wait(harness: Harness) -> None:
    """Its own wake-up is the only one that leads to its claim."""
    sent = harness.send()
    harness.sql("UPDATE sessions SET wakes = 2, woken_at = perdure_now() - interval '1 hour'")
    harness.waker.enough = True
    harness.waker.sessions.clear()
    harness.send("again")
    assert harness.waker.sessions == [sent.session_id]


def test_concurrent_drains_share_the_sessions(harness: Harness) -> None:
    """Each session is run by one drain, once, and together they run all of them."""
    sent = _send(harness, *[5] * 24)
    drained = side_by_side(*[lambda: _drain(harness, sent[0].session_id)] * 4)
    assert sum(len(each.outcomes) for each in drained) == 24
    assert {turn_id for each in drained for turn_id in each.turn_ids} == {each.turn_id for each in sent}
    assert all(harness.turn(each.turn_id)["attempts"] == 1 for each in sent)
    harness.check()


def test_a_locked_session_is_tried_again(harness: Harness) -> None:
    """A due session whose row another transaction holds for a moment is not stranded."""
    sent = harness.send()
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with harness.database.transaction("test") as transaction:
            transaction.run(LOCK, {"session_ids": [sent.session_id]})
            locked.set()
            release.wait(5)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait(5)
    threading.Timer(0.03, release.set).start()
    assert _drain(harness, sent.session_id) == Drained(1, ("done",))
    holder.join()


def test_a_named_session_that_needs_its_wake_up_does_not_delay_the_others(harness: Harness) -> None:
    """Its wake-up may be one of those for which another message has none: another thread is woken before it runs."""
    model = _slow(harness, 60)
    sent = _send(harness, 5, 5)
    harness.sql("UPDATE sessions SET wakes = 1 WHERE session_id = %(id)s", id=sent[0].session_id)
    harness.waker.sessions.clear()
    _drain(harness, sent[0].session_id)
    assert model.woken[0] == [sent[1].session_id]


def test_locked_sessions_do_not_delay_those_behind_them(harness: Harness) -> None:
    """However many of the oldest due sessions other transactions hold, the next one runs, whatever was named."""
    sent = _send(harness, *[5] * 40)
    held = [each.session_id for each in sent[:-1]]
    with harness.database.transaction("test") as transaction:
        transaction.run(LOCK, {"session_ids": held})
        _drain(harness)
    assert harness.turn(sent[-1].turn_id)["status"] == "done"


def test_a_session_whose_wake_up_the_broker_refuses_goes_on(harness: Harness) -> None:
    """After its time slice, a session is released with a wake-up. Without one, the drain goes on with it."""
    _slow(harness, 2)
    sent = [harness.send(f"message {number}") for number in range(3)]
    harness.waker.away = True
    _drain(harness, sent[0].session_id)
    assert [harness.turn(each.turn_id)["status"] for each in sent] == ["done"] * 3


@pytest.mark.parametrize("swept", [False, True], ids=["settle", "sweep"])
def test_a_queued_session_that_no_drain_takes_is_woken(harness: Harness, swept: bool) -> None:
    """A session that was queued after a failed attempt needs its own wake-up when its user has a place again."""
    session = harness.settings.session.model_copy(update={"scope": Scope.CHANNEL})
    harness.settings = harness.settings.model_copy(update={"session": session})
    harness.set(user_concurrency=1)
    running = harness.send(channel="a")
    struck = harness.send(channel="b")
    harness.sql("UPDATE sessions SET strikes = 1 WHERE session_id = %(id)s", id=struck.session_id)
    assert harness.session(struck.session_id).queued_at is not None
    harness.waker.enough = True
    harness.waker.sessions.clear()
    if swept:
        harness.sql("UPDATE sessions SET strikes = 1")  # so that no session takes the place
        sweep(harness.runtime)
    else:
        harness.run(running.session_id)
    assert struck.session_id in harness.waker.sessions


def test_a_round_starts_a_drain_although_enough_messages_wait(harness: Harness) -> None:
    """The messages that wait may be of another application. One wake-up a round leads to all that is due."""
    harness.waker.enough = True
    sent = _send(harness, 5, 5, 5)
    assert harness.waker.sessions == []
    sweep(harness.runtime)
    assert harness.waker.sessions == [sent[0].session_id]
    assert _drain(harness, sent[0].session_id).sessions == 3


def test_a_lost_database_ends_a_drain(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is dropped, and the sweeper wakes the sessions."""
    sent = harness.send()

    def fail(*_: object, **__: object) -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(type(harness.database), "run", fail)
    with pytest.raises(Unavailable):
        _drain(harness, sent.session_id)
