"""`user_concurrency` limits the concurrent turns of a user. Further turns wait and do not delay other users."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from perdure import Agent, tool
from perdure.agents import Agents
from perdure.errors import CircuitBreakerOpen
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.settings import Scope
from perdure.turns import sweep as sweeping
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import Accepted
from perdure.turns.lease import user_share
from perdure.turns.lease.claim import NotNeeded, Queued, Ran, claim
from perdure.turns.lease.tenure import Tenure
from perdure.turns.run import loop
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls, says

MOST = 3


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@pytest.fixture(autouse=True)
def shared(harness: Harness) -> None:
    """Give each channel its own conversation, and limit each user to `MOST` concurrent turns."""
    session = harness.settings.session.model_copy(update={"scope": Scope.CHANNEL})
    harness.settings = harness.settings.model_copy(update={"session": session})
    harness.set(user_concurrency=MOST)


def _flood(harness: Harness, number: int, **given: Any) -> list[Accepted]:
    return [harness.send(f"message {each}", channel=f"channel-{each}", **given) for each in range(number)]


def _round(harness: Harness) -> list[UUID]:
    """Run the sweeper once; returns the sessions that it woke."""
    harness.move(harness.settings.turn.sweep_s + 0.1)
    harness.waker.sessions.clear()
    assert sweep(harness.runtime) is not None
    return list(harness.waker.sessions)


def _try(harness: Harness, session_id: UUID) -> object:
    return claim(harness.runtime, session_id, "by hand")


def _claimed(harness: Harness, number: int) -> list[UUID]:
    """Open and claim `number` sessions of one user."""
    sent = _flood(harness, number)
    for each in sent:
        harness.claimed(each.session_id)
    return [each.session_id for each in sent]


def test_the_default_limit(harness: Harness) -> None:
    """By default, a user may have ten concurrent turns."""
    assert type(harness.settings.turn)().user_concurrency == 10


def test_a_flood_publishes_no_more_wake_ups_than_may_run(harness: Harness) -> None:
    """A user's 40 messages publish `MOST` wake-ups. Surplus wake-ups in the broker's queue would delay other users."""
    sent = _flood(harness, 40)
    assert harness.waker.sessions == [each.session_id for each in sent[:MOST]]
    other = harness.send(user_id="bob")
    assert harness.waker.sessions[MOST:] == [other.session_id]
    seen: list[str] = []
    with harness.hooked(lambda _, name: seen.append(name)):
        assert harness.run(other.session_id) == Ran(1)
    assert "turns.admit" not in seen
    assert harness.waker.sessions[MOST:] == [other.session_id]


@pytest.mark.long
def test_each_settled_turn_wakes_the_next_in_order(harness: Harness) -> None:
    """After each settled turn, the runner wakes the user's next session, in the order of acceptance."""
    sent = _flood(harness, 40)
    for number, each in enumerate(sent):
        assert harness.waker.sessions == [one.session_id for one in sent[: number + MOST]]
        assert harness.run(each.session_id) == Ran(1)
    turns = [harness.turn(each.turn_id) for each in sent]
    assert {(turn["status"], turn["attempts"]) for turn in turns} == {("done", 1)}
    assert _round(harness) == []


def test_the_next_is_woken_after_the_commit_and_before_the_turn_is_remembered(harness: Harness) -> None:
    """The runner wakes the next session after the settling commit and before any later work."""
    sent = _flood(harness, MOST + 1)
    harness.waker.sessions.clear()
    seen: list[tuple[str, int]] = []
    with harness.hooked(lambda moment, name: seen.append((f"{moment} {name}", len(harness.waker.sessions)))):
        harness.run(sent[0].session_id)
    assert seen[-4:] == [
        ("before turns.settle", 0),
        ("after turns.settle", 0),
        ("before turns.admit", 0),
        ("after turns.admit", 0),
    ]
    assert harness.waker.sessions == [sent[MOST].session_id]


def test_the_more_urgent_comes_first(harness: Harness) -> None:
    """A user's waiting sessions are ordered by priority. A later message can raise a session's priority."""
    sent = _flood(harness, MOST + 2)
    urgent = harness.send("now", channel="urgent", priority=9)
    harness.send("now, too", channel=f"channel-{MOST + 1}", priority=8)
    harness.waker.sessions.clear()
    for each in sent[:MOST]:
        harness.run(each.session_id)
    assert harness.waker.sessions == [urgent.session_id, sent[MOST + 1].session_id, sent[MOST].session_id]


def test_a_claim_beyond_the_limit_queues_the_session(harness: Harness) -> None:
    """If the user's limit is reached, a claim queues the session, uses no attempt and takes no lease."""
    sent = _flood(harness, MOST)
    harness.set(user_concurrency=1)
    first, *others = (each.session_id for each in sent)
    harness.claimed(first)
    for session_id in others:
        assert harness.run(session_id) == Queued()
        assert isinstance(_try(harness, session_id), NotNeeded), "not before it is admitted"
        row = harness.session(session_id)
        assert (row.lease_until, row.strikes, row.claims, row.token, row.state) == (None, 0, 0, 0, "active")
    assert {harness.turn(each.turn_id)["attempts"] for each in sent[1:]} == {0}
    assert harness.run(harness.send(user_id="bob").session_id) == Ran(1)


def test_concurrent_claims_may_exceed_the_limit(harness: Harness) -> None:
    """Claims count running turns without a lock, so concurrent claims may exceed the limit. Later claims are queued."""
    harness.set(user_concurrency=100)
    sent = [each.session_id for each in _flood(harness, 12)]
    harness.set(user_concurrency=MOST)
    found = side_by_side(*[lambda each=each: _try(harness, each) for each in sent[:8]])
    running = sum(isinstance(each, Tenure) for each in found)
    assert MOST <= running <= 8
    assert {type(each) for each in found} <= {Tenure, Queued}
    assert [_try(harness, each) for each in sent[8:]] == [Queued()] * 4


def test_a_dead_workers_turns_do_not_count(harness: Harness) -> None:
    """A turn with an expired lease does not count as running, so another worker can claim it again."""
    sessions = _claimed(harness, MOST)
    later = harness.send(channel="later")
    harness.move(harness.settings.turn.lease_s + 10)
    assert sorted(_round(harness)) == sorted(sessions), "their turns keep their places"
    for session_id in sessions:
        assert harness.run(session_id) == Ran(1)
    assert later.session_id in harness.waker.sessions


def test_a_queued_session_that_no_worker_admits_runs_after_an_hour(harness: Harness) -> None:
    """Workers of an older release may not admit it. Its claim takes a place, and is the turn's first attempt."""
    last = _flood(harness, MOST + 1)[-1]
    harness.move(3_601)
    harness.claimed(last.session_id)
    row = harness.session(last.session_id)
    assert (row.queued_at, row.not_before, harness.turn(last.turn_id)["attempts"]) == (None, None, 1)


def test_leases_of_a_clock_that_was_set_back_do_not_count(harness: Harness) -> None:
    """A lease that ends later than any lease can was written while the clock was ahead: its holder may be dead."""
    harness.set(user_concurrency=MOST + 1)
    last = _flood(harness, MOST + 1)[-1]
    harness.move(3_600)
    _claimed(harness, MOST)
    harness.set(user_concurrency=MOST)
    harness.move(-3_600)
    assert isinstance(_try(harness, last.session_id), Tenure)


def test_the_sweeper_fills_places_that_a_crash_left_free(harness: Harness) -> None:
    """If a process dies after settling a turn and before waking the next session, the sweeper wakes that session."""
    sent = _flood(harness, MOST + 4)
    for each in sent[:2]:
        with harness.crashing("after", "turns.settle"):
            harness.run(each.session_id)
    woken = {each.session_id for each in sent[2 : MOST + 2]}  # the third was woken, but not claimed
    assert set(_round(harness)) == woken
    assert [harness.session(each.session_id).queued_at is None for each in sent] == [True] * (MOST + 2) + [False] * 2


def test_a_session_whose_wake_up_was_refused_keeps_its_place(harness: Harness) -> None:
    """If the broker refuses a session's wake-up, the next sweep wakes the session."""
    sent = _flood(harness, MOST + 1)
    harness.waker.away = True
    harness.run(sent[0].session_id)
    harness.waker.away = False
    assert sent[MOST].session_id in _round(harness)


@pytest.mark.exhaustive
def test_waiting_sessions_are_not_woken(harness: Harness) -> None:
    """While three turns run for twenty minutes, no waiting session is woken or claimed, and none gets a strike."""
    running = _claimed(harness, MOST)
    waiting = [each.session_id for each in _flood(harness, 40)[MOST:]]
    woken: list[UUID] = []
    for _ in range(240):
        harness.sql(
            "UPDATE sessions SET lease_until = perdure_now() + interval '30 s' WHERE session_id = ANY (%(ids)s)",
            ids=running,
        )
        woken += _round(harness)
    assert woken == []
    rows = [harness.session(each) for each in waiting]
    assert {(row.strikes, row.claims, row.wakes) for row in rows} == {(0, 0, 0)}


def test_several_users_flood_and_each_has_a_share(harness: Harness) -> None:
    """One sweep wakes up to `MOST` waiting sessions of each user, the oldest first."""
    users = {f"user {number}": _flood(harness, 8, user_id=f"user {number}") for number in range(5)}
    harness.sql("UPDATE sessions SET unsettled = 0 WHERE not_before IS NULL")
    harness.sql("UPDATE turns SET settled_at = now(), status = 'done' WHERE session_id IN "
              "(SELECT session_id FROM sessions WHERE unsettled = 0)")  # fmt: skip
    harness.sql("UPDATE sessions SET turn_count = 1 WHERE unsettled = 0")
    expected = {each.session_id for sent in users.values() for each in sent[MOST : 2 * MOST]}
    woken = _round(harness)
    assert len(woken) == len(set(woken)) == 5 * MOST
    assert set(woken) == expected


@pytest.mark.long
def test_users_behind_others_without_places_are_admitted(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round considers a limited number of users, and the next rounds consider the others, whatever their names."""
    monkeypatch.setattr(user_share, "MOST_USERS", 2)
    for number in range(4):
        for session_id in [each.session_id for each in _flood(harness, MOST + 1, user_id=f"user {number}")][:MOST]:
            harness.claimed(session_id)
    harness.waker.away = True
    free = {f"{name} free": _flood(harness, MOST + 1, user_id=f"{name} free") for name in ("aa", "mm", "zz")}
    for sent in free.values():
        for each in sent[:MOST]:
            with harness.crashing("after", "turns.settle"):
                harness.run(each.session_id)
    harness.waker.away = False
    woken = {session_id for _ in range(4) for session_id in _round(harness)}
    assert woken == {sent[MOST].session_id for sent in free.values()}


def test_a_round_admits_sessions_of_each_user(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """If more sessions could be admitted than a round wakes, each user has a share of them."""
    monkeypatch.setattr(sweeping, "MOST_A_ROUND", 4)
    users = {f"user {number}": _flood(harness, 8, user_id=f"user {number}") for number in range(4)}
    harness.sql("UPDATE turns SET settled_at = now(), status = 'done' WHERE session_id IN "
                "(SELECT session_id FROM sessions WHERE not_before IS NULL)")  # fmt: skip
    harness.sql("UPDATE sessions SET unsettled = 0, turn_count = 1 WHERE not_before IS NULL")
    assert set(_round(harness)) == {sent[MOST].session_id for sent in users.values()}


def test_the_place_of_a_round_names_no_user(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round stores for the next one does not identify a user, who may be erased in between."""
    monkeypatch.setattr(user_share, "MOST_USERS", 1)
    _flood(harness, MOST + 1, user_id="ana")
    _flood(harness, MOST + 1, user_id="bea")
    _round(harness)
    ((place,),) = harness.sql("SELECT after FROM sweeps WHERE name = 'admissions'")
    assert len(place) == 9


def test_a_turn_that_waits_for_approval_takes_no_place(harness: Harness) -> None:
    """A turn that waits for approval does not count toward the user's limit. After the decision, it counts again."""
    harness.set(user_concurrency=1)
    harness.equip(pay)
    harness.script(calls(("pay", {"amount": 5})))
    waiting, behind, third = _flood(harness, 3)
    harness.run(waiting.session_id)
    assert harness.turn(waiting.turn_id)["status"] == "waiting_approval"
    assert harness.waker.sessions[-1] == behind.session_id
    harness.claimed(behind.session_id)
    call_id = harness.turn(waiting.turn_id)["pending_approvals"][0]["call_id"]
    decide(harness.runtime, waiting.turn_id, parse_decision({"call_id": call_id, "decision": "approve"}))
    assert harness.waker.sessions[-1] == waiting.session_id
    assert harness.run(waiting.session_id) == Queued()
    assert harness.turn(waiting.turn_id)["status"] == "waiting_approval"
    harness.sql("UPDATE sessions SET lease_until = NULL, lease_owner = NULL WHERE lease_owner IS NOT NULL")
    for each in (behind, third, waiting):
        assert harness.run(each.session_id) == Ran(1)
        assert harness.turn(each.turn_id)["status"] == "done"
    assert harness.turn(waiting.turn_id)["attempts"] == 1


def test_an_error_frees_the_place(harness: Harness) -> None:
    """A turn that waits for its next attempt does not count toward the user's limit."""
    harness.set(user_concurrency=1)
    harness.script(ZeroDivisionError("a bug"), ZeroDivisionError("a bug"))
    struck, behind = _flood(harness, 2)
    harness.run(struck.session_id)
    assert harness.waker.sessions[-1] == behind.session_id
    harness.run(behind.session_id)
    assert sorted(_round(harness)) == sorted([struck.session_id, behind.session_id])


@pytest.mark.parametrize("waits", ["for its next attempt", "for its agent"])
def test_a_conversation_that_waits_takes_no_place_from_a_new_one(harness: Harness, waits: str) -> None:
    """The first message of another conversation wakes a worker at once."""
    harness.set(user_concurrency=1)
    harness.equip()
    if waits == "for its agent":
        waiting = harness.send(channel="first", agent="other")
        harness.agents = Agents([Agent("assistant", "You help.")])
    else:
        harness.script(ZeroDivisionError("a bug"))
        waiting = harness.send(channel="first")
    assert harness.run(waiting.session_id) != Ran(1)
    new = harness.send(channel="second")
    assert harness.waker.sessions[-1] == new.session_id
    assert harness.run(new.session_id) == Ran(1)


def test_a_session_that_waits_can_be_cancelled_and_used_again(harness: Harness) -> None:
    """Cancelling a queued session's turn takes the session off the queue. The next message wakes or queues it again."""
    sent = _flood(harness, MOST + 2)
    for each in sent[MOST:]:
        cancel(harness.runtime, each.turn_id)
        assert harness.turn(each.turn_id)["status"] == "cancelled"
        row = harness.session(each.session_id)
        assert (row.queued_at, row.not_before, row.unsettled) == (None, None, 0)
    harness.waker.sessions.clear()
    again = harness.send(channel=f"channel-{MOST}")
    assert (harness.waker.sessions, harness.session(again.session_id).queued_at is None) == ([], False)
    for each in (*sent[:MOST], again):
        harness.run(each.session_id)
    last = harness.send(channel=f"channel-{MOST + 1}")
    assert harness.waker.sessions[-1] == last.session_id
    assert harness.run(last.session_id) == Ran(1)


@pytest.mark.parametrize("on_busy", ["enqueue", "merge", "interrupt"])
def test_more_messages_to_a_session_that_waits_wake_no_worker(harness: Harness, on_busy: str) -> None:
    """Further messages to a waiting session publish no wake-ups, so that a flood does not fill the broker's queue."""
    _flood(harness, MOST + 1)
    harness.waker.sessions.clear()
    for number in range(20):
        harness.send(f"and {number}", channel=f"channel-{MOST}", on_busy=on_busy)
    assert harness.waker.sessions == []


def test_a_long_backlog_is_split_into_time_slices(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner releases a session with many queued messages after each time slice. The release uses no attempt.

    The session does not queue behind those of another user.
    """
    monkeypatch.setattr(loop, "_SLICE_S", 2.0)
    _flood(harness, MOST + 1, user_id="bob")

    def slow(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.move(1.5)
        return says("there")

    harness.script(*[slow] * 6)
    sent = [harness.send(f"message {number}") for number in range(6)]
    harness.waker.sessions.clear()
    session_id = sent[0].session_id
    seen: list[str] = []
    with harness.hooked(lambda _, name: seen.append(name)):
        assert [harness.run(session_id) for _ in range(3)] == [Ran(2)] * 3
    assert "turns.admit" not in seen
    assert harness.waker.sessions == [session_id] * 2
    turns = [harness.turn(each.turn_id) for each in sent]
    assert {(turn["status"], turn["attempts"]) for turn in turns} == {("done", 1)}
    assert {row.takeovers for row in harness.sql("SELECT takeovers FROM turns WHERE user_id = 'ana'")} == {None}
    settled = [turn["settled_at"] for turn in turns]
    assert all(one <= other for one, other in pairwise(settled))


def test_a_long_backlog_continues_if_the_broker_accepts_no_wake_up(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a wake-up, no other worker would take over the session, so the runner keeps it."""
    monkeypatch.setattr(loop, "_SLICE_S", 0.0)
    sent = [harness.send(f"message {number}") for number in range(4)]
    harness.waker.away = True
    assert harness.run(sent[0].session_id) == Ran(4)


def test_a_conversation_waits_for_no_more_than_a_slice_of_each_other_one(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two conversations that always have a next message do not starve a third, queued conversation."""
    monkeypatch.setattr(loop, "_SLICE_S", 2.0)
    harness.set(user_concurrency=2)

    def slow(_request: ModelRequest, _call: ModelCall) -> ModelReply:
        harness.move(3)
        return says("x")

    harness.script(*[slow] * 60)
    busy = {name: harness.send("first", channel=name).session_id for name in "ab"}
    for name in busy:
        harness.send("second", channel=name)
    queued = harness.send("queued", channel="z")
    for number in range(4):
        for name, session_id in busy.items():
            harness.send(f"{number}", channel=name)
            harness.run(session_id)
    assert queued.session_id in harness.waker.sessions
    harness.run(queued.session_id)
    assert harness.turn(queued.turn_id)["status"] == "done"


def test_a_cancelled_turn_needs_no_place(harness: Harness) -> None:
    """A cancelled parked turn is settled at once, even if the user's other turns reach the limit."""
    harness.set(user_concurrency=1, on_unavailable="park")
    parked = harness.send("parked", channel="a")
    harness.script(CircuitBreakerOpen(retry_after_s=60))
    harness.run(parked.session_id)
    running = harness.send("running", channel="b")
    harness.claimed(running.session_id)
    cancel(harness.runtime, parked.turn_id)
    assert harness.run(parked.session_id) == Ran(1)
    assert harness.turn(parked.turn_id)["status"] == "cancelled"


def test_a_parked_turn_that_is_queued_uses_no_attempt(harness: Harness) -> None:
    """If a parked turn becomes due while the user's limit is reached, the turn is queued and uses no attempt."""
    harness.set(user_concurrency=1, on_unavailable="park")
    parked = harness.send("parked", channel="a")
    harness.script(CircuitBreakerOpen(retry_after_s=60), says("of the other"), CircuitBreakerOpen(retry_after_s=60))
    harness.run(parked.session_id)
    other = harness.send("other", channel="b")
    harness.sql(
        "UPDATE sessions SET lease_until = perdure_now() + interval '40 s' WHERE session_id = %(id)s RETURNING 1",
        id=other.session_id,
    )
    harness.set(lease_s=90)
    harness.move(30)
    harness.sql(
        "UPDATE sessions SET not_before = perdure_now() WHERE session_id = %(id)s RETURNING 1", id=parked.session_id
    )
    assert harness.run(parked.session_id) == Queued()
    harness.sql("UPDATE sessions SET lease_until = NULL WHERE session_id = %(id)s RETURNING 1", id=other.session_id)
    assert harness.run(other.session_id) == Ran(1)
    assert harness.waker.sessions[-1] == parked.session_id
    harness.run(parked.session_id)
    assert (harness.turn(parked.turn_id)["status"], harness.turn(parked.turn_id)["attempts"]) == ("parked", 1)
