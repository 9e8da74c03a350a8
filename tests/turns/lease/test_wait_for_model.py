"""If the model is unavailable, a turn fails with a message, or is parked until the model may be tried again."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import Agent, sleep_until, tool
from perdure.agents import Agents
from perdure.errors import CircuitBreakerOpen, ContextTooLong, ProviderError, RateLimited, SettingsError
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Usage
from perdure.models.resilient import FallbackModels, GuardedModel, ResilientModel
from perdure.resilience.registry import Breakers
from perdure.settings import BreakerSettings, RetrySettings
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import Accepted
from perdure.turns.lease import leave_queries, pace, queries
from perdure.turns.lease.claim import NotNeeded, Ran, Unequipped, claim
from perdure.turns.lease.pace import Pace
from perdure.turns.lease.wait_for_model import LONGEST, MOST_A_ROUND, recall
from perdure.turns.reading import DELAYED, Delays
from perdure.turns.sweep import postpone, sweep
from tests.processes.faults import wait_until
from tests.turns.harness import Harness
from tests.turns.scripted import Scripted, calls, says

DOWN = ProviderError("The provider is down.", transient=True)
OPEN = CircuitBreakerOpen(retry_after_s=60)
COOLDOWN_S = 60


@tool(effect="pure")
def look() -> str:
    """Return `seen`."""
    return "seen"


@pytest.fixture
def parking(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """A harness that parks turns while the model is unavailable. Its clock stands still unless the test moves it.

    The pace of returning turns depends on the time that they take, and a busy machine would change it.
    """
    began, clock, offset = harness.clock.now(), harness.clock, harness.clock.offset
    monkeypatch.setattr(clock, "now", lambda: began + clock.offset - offset)
    monkeypatch.setattr(clock, "monotonic", lambda: 1e6 + clock.offset.total_seconds())
    harness.set(on_unavailable="park")
    return harness


def _swept(harness: Harness) -> list[UUID]:
    """Run the sweeper once; returns the sessions that it woke."""
    harness.waker.sessions.clear()
    harness.move(harness.settings.turn.sweep_s + 2)
    sweep(harness.runtime)
    return list(harness.waker.sessions)


def test_by_default_it_fails_with_the_documented_message(harness: Harness) -> None:
    """The turn's error has the code `CIRCUIT_BREAKER_OPEN`. The error's message is the turn's reply."""
    harness.script(CircuitBreakerOpen())
    turn = harness.ask()
    assert turn["status"] == "failed"
    assert turn["error"]["code"] == "CIRCUIT_BREAKER_OPEN"
    message = "Service temporarily unavailable due to repeated failures. Please try again later."
    assert turn["reply"]["text"] == turn["error"]["message"] == message


@pytest.mark.long
@pytest.mark.parametrize("error", [OPEN, DOWN, RateLimited("Slow down.", retry_after_s=60)], ids=lambda e: e.code)
def test_it_waits_at_no_cost(parking: Harness, error: Exception) -> None:
    """A parked turn's wait uses no attempt, no strike and no run time, and neither does the call that failed.

    No worker claims the turn before it is due.
    """

    def fail(_: ModelRequest, __: ModelCall) -> ModelReply:
        parking.move(60)
        raise error

    parking.script(fail)
    turn = parking.ask()
    session_id = UUID(turn["session_id"])
    assert (turn["status"], turn["attempts"], turn["error"]) == ("parked", 1, None)
    row = parking.session(session_id)
    assert (row.state, row.lease_until, row.strikes, row.claims) == ("active", None, 0, 0)
    assert row.spent_s < 1
    behind = parking.send("and another")
    assert isinstance(parking.run(session_id), NotNeeded)
    assert _swept(parking) == []
    for _ in range(parking.settings.turn.max_attempts + 2):
        parking.script(fail)
        parking.move(COOLDOWN_S + 1)
        assert _swept(parking) == [session_id]
        parking.run(session_id)
        assert parking.turn(UUID(turn["turn_id"]))["status"] == "parked"
    parking.script(says("here I am"), says("and there"))
    parking.move(COOLDOWN_S + 1)
    parking.run(session_id)
    answered = parking.turn(UUID(turn["turn_id"]))
    assert (answered["status"], answered["attempts"], answered["reply"]["text"]) == ("done", 1, "here I am")
    assert parking.turn(behind.turn_id)["reply"]["text"] == "and there"


def test_the_delay_is_reported_once_for_each_wait(parking: Harness) -> None:
    """A delay is reported once, even if retries fail. After the model has replied, its next failure is a new delay."""
    parking.equip(look)
    parking.script(OPEN)
    sent = parking.send()
    delays = Delays(parking.database, sent.turn_id)
    assert delays.look() is None
    parking.run(sent.session_id)
    turn = parking.turn(sent.turn_id)
    assert (turn["delayed"]["code"], turn["delayed"]["message"]) == ("CIRCUIT_BREAKER_OPEN", DELAYED)
    assert datetime.fromisoformat(turn["delayed"]["until"]) > parking.clock.now()
    assert (delays.look(), delays.look()) == (DELAYED, None)

    def looks_and_fails(request: Any, call: Any) -> ModelReply:
        assert parking.turn(sent.turn_id)["delayed"] == {**turn["delayed"], "until": None}
        assert delays.look() is None
        raise OPEN

    parking.script(looks_and_fails)
    _try_again(parking, sent.session_id)
    assert delays.look() is None

    def looks_in_the_middle(request: Any, call: Any) -> ModelReply:
        assert parking.turn(sent.turn_id)["delayed"] is None
        assert delays.look() is None
        raise DOWN

    parking.script(calls(("look", {})), looks_in_the_middle)
    _try_again(parking, sent.session_id)
    assert (delays.look(), delays.look()) == (DELAYED, None)
    assert parking.turn(sent.turn_id)["delayed"]["code"] == "PROVIDER_ERROR"
    _try_again(parking, sent.session_id)
    turn = parking.turn(sent.turn_id)
    assert (turn["status"], turn["delayed"], turn["error"], turn["steps"]) == ("done", None, None, 2)
    assert delays.look() is None


def _try_again(harness: Harness, session_id: UUID) -> None:
    harness.move(COOLDOWN_S + 1)
    harness.run(session_id)


def test_a_clock_set_back_does_not_prolong_the_wait(parking: Harness) -> None:
    """If the server's clock is set back a day, the next sweep wakes the turn. Later sweeps repeat a lost wake-up."""
    parking.script(OPEN)
    turn = parking.ask()
    session_id = UUID(turn["session_id"])
    parking.move(-86_400)
    assert _swept(parking) == [session_id]
    parking.move(60)
    assert _swept(parking) == [session_id]
    parking.script(says("back"))
    parking.run(session_id)
    assert parking.turn(UUID(turn["turn_id"]))["reply"]["text"] == "back"


def test_a_clock_set_back_after_the_recall_does_not_prolong_the_wait(parking: Harness) -> None:
    """If the breaker closes and the server's clock is then set back by a day, the next sweep still wakes the turn."""
    parking.script(OPEN)
    session_id = UUID(parking.ask()["session_id"])
    assert parking.database.run(queries.RECALL, {})
    parking.move(-86_400)
    assert _swept(parking) == [session_id]
    parking.script(says("back"))
    assert parking.run(session_id) == Ran(1)


def test_it_waits_no_longer_than_a_cooldown_for_another_process_probe(parking: Harness) -> None:
    """A turn is retried after one breaker cooldown at the latest, because another process may die during its probe."""
    parking.script(CircuitBreakerOpen(retry_after_s=600))
    turn = parking.ask()
    _try_again(parking, UUID(turn["session_id"]))
    assert parking.turn(UUID(turn["turn_id"]))["status"] == "done"


def test_it_continues_from_its_last_step(parking: Harness) -> None:
    """If the model fails in the middle of a turn, completed tool calls are not repeated."""
    parking.equip(look)
    parking.script(calls(("look", {})), OPEN)
    turn = parking.ask()
    assert (turn["status"], turn["steps"]) == ("parked", 1)
    parking.script(says("I saw"))
    parking.move(COOLDOWN_S + 1)
    parking.run(UUID(turn["session_id"]))
    assert [role for role, _ in parking.lines(UUID(turn["session_id"]))] == ["user", "assistant", "tool", "assistant"]


def test_failures_that_waiting_cannot_fix(parking: Harness) -> None:
    """A turn fails if the model rejects the request, the turn's time limit passes, or the model is down for a day."""
    parking.script(ContextTooLong("Too long."))
    assert parking.ask()["error"]["code"] == "CONTEXT_TOO_LONG"

    def hangs(request: Any, call: Any) -> ModelReply:
        parking.move(parking.settings.turn.timeout_s + 1)
        call.remaining()
        raise AssertionError("the call's deadline was not enforced")

    parking.script(hangs)
    assert parking.ask()["error"]["code"] == "TIMEOUT"
    parking.script(OPEN)
    turn = parking.ask()
    assert turn["status"] == "parked"
    parking.move(LONGEST.total_seconds() + 1)
    parking.script(OPEN)
    parking.run(UUID(turn["session_id"]))
    assert parking.turn(UUID(turn["turn_id"]))["error"]["code"] == "CIRCUIT_BREAKER_OPEN"


def test_a_turn_that_has_slept_for_days_may_wait_for_the_model(parking: Harness) -> None:
    """The day in which a model must answer begins with the turn's last step, not before a wait that the turn chose."""
    parking.equip(sleep_until)
    wakes_at = parking.clock.now() + 3 * LONGEST
    parking.script(calls(("sleep_until", {"moment": wakes_at.isoformat()})))
    turn_id = UUID(parking.ask()["turn_id"])
    session_id = UUID(parking.turn(turn_id)["session_id"])
    for moved_s, status in ((3 * LONGEST.total_seconds() + 1, "parked"), (LONGEST.total_seconds() + 1, "failed")):
        parking.move(moved_s)
        parking.script(OPEN)
        parking.run(session_id)
        assert parking.turn(turn_id)["status"] == status


def test_an_agents_own_choice_overrides_the_setting(harness: Harness) -> None:
    """An agent's `on_unavailable` overrides the setting. An invalid value raises `SettingsError`."""
    harness.equip(on_unavailable="park")
    harness.script(OPEN)
    assert harness.ask()["status"] == "parked"
    harness.set(on_unavailable="park")
    harness.equip(on_unavailable="fail")
    harness.script(OPEN)
    assert harness.ask(user_id="bea")["status"] == "failed"
    with pytest.raises(SettingsError, match="accepted: fail, park"):
        Agent("a", "b", on_unavailable="wait")


def test_a_parked_turn_is_cancelled(parking: Harness) -> None:
    """A cancellation wakes the session, so that a worker settles the parked turn before it is due."""
    parking.script(OPEN)
    turn = parking.ask()
    cancel(parking.runtime, UUID(turn["turn_id"]))
    assert parking.waker.sessions[-1] == UUID(turn["session_id"])
    parking.run(UUID(turn["session_id"]))
    assert parking.turn(UUID(turn["turn_id"]))["status"] == "cancelled"


def test_a_cancellation_concurrent_with_parking(parking: Harness) -> None:
    """A cancellation waits for a concurrent commit that parks the turn, and then clears the session's `not_before`."""
    parking.script(OPEN)
    turn = parking.ask()
    parking.sql("UPDATE sessions SET not_before = NULL")
    parked = parking.database.engine.execution_options(isolation_level="READ COMMITTED").connect()
    with parked as other, ThreadPoolExecutor(1) as pool:
        other.exec_driver_sql("UPDATE sessions SET not_before = perdure_now() + interval '600 s'")
        cancelling = pool.submit(cancel, parking.runtime, UUID(turn["turn_id"]))
        wait_until(lambda: _waits_for_a_lock(parking), "the cancellation waits for the row")
        other.commit()
        cancelling.result(30)
    assert [row.not_before for row in parking.sql("SELECT not_before FROM sessions")] == [None]


def _waits_for_a_lock(harness: Harness) -> bool:
    rows = harness.sql("SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
    return bool(rows)


def test_a_cancellation_before_parking(parking: Harness) -> None:
    """A turn that is cancelled during a failing model call does not wait: it is settled at once."""
    sent = parking.send()

    def fails(request: Any, call: Any) -> ModelReply:
        cancel(parking.runtime, sent.turn_id)
        raise OPEN

    parking.script(fails)
    parking.run(sent.session_id)
    assert parking.turn(sent.turn_id)["status"] == "cancelled"


def test_parked_turns_are_woken_a_few_at_a_time_oldest_first(parking: Harness) -> None:
    """When a breaker closes, all parked turns are due. Each sweep wakes a few of them and delays no other turn."""
    sent: list[Accepted] = []
    for number in range(MOST_A_ROUND + 3):
        parking.script(OPEN)
        sent.append(parking.send(user_id=f"user {number}"))
        parking.run(sent[-1].session_id)
    waiting = [each.session_id for each in sent]
    assert _swept(parking) == []
    _close_a_breaker(parking)
    other = parking.send(user_id="another user")
    assert _swept(parking) == [*waiting[:MOST_A_ROUND], other.session_id]
    for session_id in (*waiting[:MOST_A_ROUND], other.session_id):
        parking.run(session_id)
    assert _swept(parking) == waiting[MOST_A_ROUND:]


def _park(harness: Harness, number: int, agent: str = "assistant", name: str = "user") -> list[UUID]:
    """Park the turns of `number` users; returns their sessions, the oldest first."""
    parked = []
    for each in range(number):
        harness.script(OPEN)
        parked.append(harness.send(user_id=f"{name} {each}", agent=agent).session_id)
        harness.run(parked[-1])
    return parked


def _returns(harness: Harness, capacity: int | None = None, most: int = 500) -> list[list[UUID]]:
    """Sweep until no parked turn is left; returns the sessions that returned to the model between two passes.

    A worker runs the sessions after each pass. The model answers `capacity` of them in a second, or all if it is
    `None`. Fails if the model has more than `most` turns at once.
    """
    returned: list[list[UUID]] = []
    harness.waker.sessions.clear()
    waiting: list[UUID] = []

    def stopped_after(seconds: float) -> bool:
        harness.move(seconds)
        if harness.waker.sessions:
            returned.append(list(harness.waker.sessions))
            waiting.extend(harness.waker.sessions)
            harness.waker.sessions.clear()
        assert len(waiting) <= most
        for _ in range(len(waiting) if capacity is None else min(round(capacity * seconds), len(waiting))):
            harness.run(waiting.pop(0))
        return False

    for _ in range(100):
        harness.move(0.1)
        sweep(harness.runtime, stopped_after=stopped_after)
        stopped_after(0.25)
        if not harness.sql("SELECT FROM turns WHERE settled_at IS NULL"):
            return returned
    raise AssertionError("turns are left")


@pytest.mark.exhaustive
def test_the_number_of_returning_turns_grows_while_the_model_answers(parking: Harness) -> None:
    """Each time that as many turns were answered, twice as many return, within one round of the sweeper."""
    parked = _park(parking, 100)
    _close_a_breaker(parking)
    parking.move(5.1)
    returned = _returns(parking)
    assert [len(each) for each in returned] == [10, 20, 40, 30]
    assert [each for group in returned for each in group] == parked


@pytest.mark.exhaustive
def test_the_number_of_returning_turns_stops_growing_at_the_rate_of_the_model(parking: Harness) -> None:
    """A model that answers 40 turns a second gets a second's turns at once, although more turns wait."""
    parked = _park(parking, 150)
    _close_a_breaker(parking)
    parking.move(5.1)
    returned = _returns(parking, capacity=40, most=40)
    assert [each for group in returned for each in group] == parked


@pytest.mark.exhaustive
def test_the_number_of_returning_turns_shrinks_while_the_model_fails(parking: Harness) -> None:
    """If the model fails again, fewer turns return. Once it answers, the number grows again."""
    parked = _park(parking, 40)
    _close_a_breaker(parking)
    parking.move(5.1)
    sizes = []
    for _ in range(5):
        woken = _swept(parking)
        sizes.append(len(woken))
        parking.script(*[OPEN] * len(woken))
        for session_id in woken:
            parking.run(session_id)
    assert sizes == [10, 5, 2, 1, 1]
    parking.script()
    _close_a_breaker(parking)
    assert sorted(each for group in _returns(parking) for each in group) == sorted(parked)


@pytest.mark.long
@pytest.mark.parametrize("reason", ["the wake-ups are lost", "the workers are busy"])
def test_returned_turns_that_no_worker_claims_return_again(parking: Harness, reason: str) -> None:
    """Turns whose wake-ups came to nothing are woken again, and no others before a worker has claimed them."""
    parked = _park(parking, MOST_A_ROUND + 2)
    _close_a_breaker(parking)
    parking.move(5.1)
    first = _swept(parking)
    assert first == parked[:MOST_A_ROUND]
    for _ in range(3):
        for session_id in first if reason == "the workers are busy" else ():
            postpone(parking.runtime, session_id)
        parking.move(400)
        assert sorted(_swept(parking)) == sorted(first)
    parking.move(400)
    assert sorted(each for group in _returns(parking) for each in group) == sorted(parked)


@pytest.mark.parametrize("then", ["a tool runs", "the next turn runs"])
def test_a_returned_turn_is_answered_once_the_model_replies(parking: Harness, then: str) -> None:
    """What follows the model's first reply takes no other turn's place at the model."""
    seen: list[bool] = []

    def note() -> None:
        seen.append(parking.database.run(queries.RETURNED, {"session_ids": [session_id]})[0].unanswered)

    @tool(effect="pure")
    def slow() -> str:
        """Return `done`."""
        note()
        return "done"

    def respond(request: Any, call: Any) -> ModelReply:
        note()
        return says("ok") if then == "the next turn runs" else calls(("slow", {}))

    parking.equip(slow)
    [session_id] = _park(parking, 1)
    _close_a_breaker(parking)
    parking.move(5.1)
    assert _swept(parking) == [session_id]
    if then == "the next turn runs":
        parking.send("and another", user_id="user 0")
        parking.script(respond, respond)
    else:
        parking.script(respond, says("ok"))
    parking.run(session_id)
    assert seen == [True, False]


def test_a_broker_that_refuses_wake_ups_does_not_change_the_pace(parking: Harness) -> None:
    """The model did not fail for a turn that never reached it, nor did it answer this turn."""
    _park(parking, MOST_A_ROUND + 2)
    _close_a_breaker(parking)
    parking.move(5.1)
    parking.waker.away = True
    for _ in range(4):
        assert _swept(parking) == []
    parking.waker.away = False
    assert len(_swept(parking)) == MOST_A_ROUND


def test_a_returned_turn_that_its_worker_releases_does_not_change_the_pace(parking: Harness) -> None:
    """The model has neither answered a turn that was parked during a shutdown, nor failed for it."""
    parked = _park(parking, MOST_A_ROUND + 2)
    _close_a_breaker(parking)
    parking.move(5.1)
    for session_id in _swept(parking):
        tenure = parking.claimed(session_id)
        given = {"turn_id": tenure.at_hand.turn_id, "spent_s": 0.0}
        assert parking.database.run(leave_queries.SHUT_DOWN, {**tenure.fenced, **given})
    assert set(parked[MOST_A_ROUND:]) <= set(_swept(parking))
    [row] = parking.sql("SELECT paces -> 'offline' AS pace FROM sweeps WHERE name = 'turns'")
    assert (row.pace["most"], row.pace["answered"], len(row.pace["woken"])) == (MOST_A_ROUND, 0, 2)


def test_a_returned_turn_whose_agent_no_worker_has_does_not_hold_up_the_others(parking: Harness) -> None:
    """A worker of the previous deploy refuses such a turn, so the model neither answers it nor fails for it."""
    parked = _park(parking, MOST_A_ROUND + 2)
    _close_a_breaker(parking)
    parking.move(5.1)
    for session_id in _swept(parking):
        assert isinstance(
            claim(parking.runtime, session_id, "old", agents=Agents([Agent("another", "You help.")])), Unequipped
        )
    assert set(parked[MOST_A_ROUND:]) <= set(_swept(parking))


@pytest.mark.exhaustive
def test_a_failing_model_delays_no_turn_of_another_one(parking: Harness) -> None:
    """Each model has a pace of its own: while one fails again and again, the turns of the other return."""
    parking.agents = Agents([Agent("assistant", "You help."), Agent("other", "You do, too.", model="other")])
    failing = _park(parking, 40)
    waiting = _park(parking, 30, agent="other", name="other")
    _close_a_breaker(parking)
    parking.move(5.1)
    answered: list[UUID] = []
    for _ in range(4):
        for session_id in _swept(parking):
            parking.script(*[OPEN] * (session_id in failing))
            parking.run(session_id)
            if session_id in waiting:
                answered.append(session_id)
    assert answered == waiting


@pytest.mark.long
@pytest.mark.parametrize("model", ["the same", "another"])
def test_a_newer_turn_waits_behind_those_that_wait_for_its_model(parking: Harness, model: str) -> None:
    """While many turns wait for their return, a newer turn with the same model returns after them."""
    parking.agents = Agents([Agent("assistant", "You help."), Agent("other", "You do, too.", model="other")])
    parked = _park(parking, 30)
    _close_a_breaker(parking)
    newer = parking.send(user_id="newer", agent="assistant" if model == "the same" else "other")
    parking.run(newer.session_id)
    if model == "another":
        assert parking.turn(newer.turn_id)["status"] == "done"
        return
    turn = parking.turn(newer.turn_id)
    assert (turn["status"], turn["attempts"], turn["delayed"]["code"]) == ("parked", 1, "PROVIDER_ERROR")
    parking.move(5.1)
    assert [each for group in _returns(parking) for each in group] == [*parked, newer.session_id]
    assert parking.turn(newer.turn_id)["attempts"] == 1


@pytest.mark.long
def test_a_turn_that_fails_without_its_model_waits_behind_no_other(harness: Harness) -> None:
    """An agent that does not park its turns runs them at once, whatever waits for the model."""
    harness.agents = Agents([Agent("assistant", "You help.", on_unavailable="park"), Agent("other", "You do, too.")])
    _park(harness, 30)
    _close_a_breaker(harness)
    newer = harness.send(user_id="newer", agent="other")
    harness.run(newer.session_id)
    assert harness.turn(newer.turn_id)["status"] == "done"


@given(
    st.integers(1, 40), st.lists(st.integers(0, 20), min_size=1, max_size=40), st.sets(st.integers(0, 39), max_size=3)
)
def test_a_pace_stays_within_its_bounds(seconds: int, answers: list[int], failures: set[int]) -> None:
    """However many turns are answered or fail, at least one may return, and never more than `pace.MOST` at once."""
    found, now = Pace(), 0.0
    for number, answered in enumerate(answers):
        found = found.wake([uuid4() for _ in range(found.room)], now)
        now += seconds
        failed = found.woken[:1] if number in failures else ()
        before = found
        found = found.after(set(failed), set(found.woken[:answered]), set(found.woken[answered:]), now)
        assert 1 <= found.most <= pace.MOST
        assert found.room >= 0
        assert not failed or found.most <= max(before.most // 2, 1)
        assert found == Pace.parse(json.loads(json.dumps(found.to_dict())))


def _close_a_breaker(harness: Harness) -> None:
    """Open a circuit breaker, then reset it as an operator does."""
    breakers = Breakers(
        BreakerSettings(failure_threshold=1), harness.clock, listen=lambda change: recall(harness.database, change)
    )
    breaker = breakers.get("llm:scripted")
    with pytest.raises(ProviderError):
        breaker.execute(_fail, 1)
    breakers.reset("llm:scripted")


def _fail() -> None:
    raise DOWN


def test_a_fallback_answers_and_the_message_says_so(harness: Harness) -> None:
    """The stored message has the name of the model that answered, and is marked if that model is a fallback."""
    first, other = Scripted(DOWN), Scripted(ModelReply("instead", usage=Usage(1, 1), model="other-1"))
    guarded = GuardedModel(
        first, Breakers(BreakerSettings(), harness.clock).get("llm:first"), RetrySettings(max_attempts=1), 30
    )
    model = ResilientModel(guarded, FallbackModels([other]))
    harness.agents = Agents([Agent("assistant", "You help.")])
    harness.script(model.respond, says("itself"))
    turn = harness.ask()
    harness.ask("again")
    replies = [each for each in harness.messages(UUID(turn["session_id"])) if each["role"] == "assistant"]
    assert [(each["content"], each["model"], each.get("fallback")) for each in replies] == [
        ("instead", "other-1", True),
        ("itself", "scripted", None),
    ]


def test_a_model_call_has_the_turns_remaining_time(harness: Harness) -> None:
    """A model call may take the turn's remaining time. `ModelCall.part` limits a call to a part of that time."""
    left: list[float] = []

    def respond(request: Any, call: Any) -> ModelReply:
        left.append(call.remaining())
        with call.part(10) as part:
            left.append(part.remaining())
        return says("ok")

    harness.script(respond)
    harness.ask()
    whole, part = left
    assert harness.settings.turn.timeout_s - 5 < whole <= harness.settings.turn.timeout_s
    assert part <= 10
