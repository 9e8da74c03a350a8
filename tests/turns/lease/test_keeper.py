"""The keeper: a thread that renews leases, detects cancellations and lost sessions, and aborts overdue model calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from perdure.access.tenants import UserKey
from perdure.database.engine import Statement
from perdure.database.fencing import Fence
from perdure.errors import DeadlineExceeded
from perdure.models.protocol import CallAborted, ModelCall, ModelReply, ModelRequest
from perdure.sessions.ending import request_end
from perdure.sessions.queries import CLAIM_ENDING
from perdure.sessions.states import State
from perdure.turns.cancel import cancel
from perdure.turns.lease import queries
from perdure.turns.lease.claim import Ran
from perdure.turns.lease.keeper import Keeper
from perdure.turns.lease.tenure import GRACE_S, Tenure
from perdure.turns.run.loop import Runner
from tests.turns.harness import KILL_THE_OTHERS, PATIENCE_S, Harness, until
from tests.turns.scripted import says


@pytest.fixture
def keeper(harness: Harness) -> Keeper:
    """A keeper whose thread is not started: tests call `beat` themselves."""
    return Keeper(harness.database, harness.clock, harness.settings.turn)


@pytest.fixture
def runner(harness: Harness) -> Iterator[Runner]:
    """A runner whose keeper thread is running."""
    made = Runner(harness.runtime, "kept")
    made.start()
    yield made
    made.close()


def _not_stopped(hold: Tenure) -> bool:
    return not any([hold.stopping.is_set(), hold.unwanted.is_set(), hold.cancelled])


def _begin(hold: Tenure, turn_id: UUID) -> None:
    """Begin the session's next turn, `turn_id`."""
    hold.turn = replace(hold.at_hand, turn_id=turn_id)
    hold.begin()


def _lease_left_s(harness: Harness, hold: Tenure) -> float:
    query = "SELECT extract(epoch FROM lease_until - perdure_now())::float AS s FROM sessions WHERE session_id = %(id)s"
    return float(harness.sql(query, id=hold.session_id)[0].s)


def test_it_renews_within_the_heartbeat(harness: Harness, keeper: Keeper) -> None:
    """Until the step's deadline, the keeper renews the lease of a turn that waits for its model."""
    found = harness.claimed(harness.send().session_id)
    with keeper.keep(found) as hold:
        hold.step_within(60)
        for _ in range(5):
            harness.move(10)
            keeper.beat()
            assert _lease_left_s(harness, hold) > 28
            assert hold.still_valid()
        assert keeper.running == 1
    assert keeper.running == 0


def test_it_does_not_renew_a_step_past_its_deadline(harness: Harness, keeper: Keeper) -> None:
    """If a turn's thread hangs, the session's lease expires and another runner takes over the session."""
    found = harness.claimed(harness.send().session_id)
    with keeper.keep(found) as hold:
        hold.begin()
        hold.step_within(10)
        harness.move(10 + GRACE_S + 1)
        keeper.beat()
        assert _lease_left_s(harness, hold) < 15
        harness.move(15)
        keeper.beat()
        assert not hold.still_valid()
        assert harness.run(found.session_id) == Ran(1)
        keeper.beat()
        assert hold.lost
        assert hold.unwanted.is_set()


def test_a_lease_whose_row_is_locked_is_renewed_by_the_next_beat(harness: Harness, keeper: Keeper) -> None:
    """Until then, it is valid only for as long as its last renewal says."""
    lock = Statement("test.lock", "SELECT FROM sessions FOR UPDATE")
    limits = harness.settings.turn
    with keeper.keep(harness.claimed(harness.send().session_id)) as hold:
        hold.step_within(60)
        for renewed in (True, False):
            harness.move(limits.heartbeat_s)
            with harness.database.transaction("test.lock") as other:
                other.run(lock, {})
                keeper.beat()
            if renewed:
                keeper.beat()
                assert _lease_left_s(harness, hold) > limits.lease_s - 1
        harness.move(limits.lease_s - limits.heartbeat_s)
        assert not hold.still_valid()


def test_a_turn_whose_user_is_erased_stops(harness: Harness, keeper: Keeper) -> None:
    """The session has no row any more: nothing that the turn still does would be stored."""
    with keeper.keep(harness.claimed(harness.send().session_id)) as hold:
        hold.begin()
        harness.runtime.eraser.erase(UserKey("ana"))
        keeper.beat()
        assert (hold.lost, hold.stopping.is_set()) == (True, True)


def test_it_renews_all_in_one_statement(harness: Harness, keeper: Keeper) -> None:
    """One statement per heartbeat renews the leases of all running turns."""
    claims = [harness.claimed(harness.send(user_id=f"u{number}").session_id) for number in range(5)]
    ran: list[str] = []
    holds = [keeper.keep(claim) for claim in claims]
    for hold in holds:
        hold.__enter__()
    harness.move(10)
    with harness.hooked(lambda moment, name: ran.append(name) if moment == "after" else None):
        keeper.beat()
    for hold in holds:
        hold.__exit__(None, None, None)
    assert ran == [queries.RENEW.name]


def test_a_session_that_its_process_claims_again_is_kept(harness: Harness, keeper: Keeper) -> None:
    """The older turn stops. Its end does not end the renewal of the newer one's lease."""
    session_id = harness.send().session_id
    with ExitStack() as older:
        old = older.enter_context(keeper.keep(harness.claimed(session_id)))
        harness.move(harness.settings.turn.lease_s + 1)
        with keeper.keep(harness.claimed(session_id)) as new:
            assert (old.lost, new.lost) == (True, False)
            older.close()
            assert keeper.running == 1


def test_all_held_sessions_are_released_at_once(harness: Harness, keeper: Keeper) -> None:
    """`release_all` parks the running turns, leaves the state of ending sessions unchanged, and skips lost sessions."""
    ended = harness.send(user_id="eva").session_id
    assert harness.run(ended) == Ran(1)
    request_end(harness.database, ended, "enough")
    found = harness.claimed(harness.send().session_id)
    assert found.turn is not None
    ending = harness.database.run(CLAIM_ENDING, {"session_id": ended, "owner": "w", "lease_s": 30.0})[0]
    closed = harness.send(user_id="max").session_id
    assert harness.run(closed) == Ran(1)
    harness.sql("UPDATE sessions SET state = 'ended', ended_at = perdure_now() WHERE session_id = %(id)s", id=closed)
    lost = harness.claimed(harness.send(user_id="bob").session_id)
    harness.sql("UPDATE sessions SET token = token + 1 WHERE session_id = %(id)s RETURNING token", id=lost.session_id)
    with ExitStack() as held:
        holds = [
            held.enter_context(keeper.keep(each))
            for each in (
                found,
                Tenure(ended, Fence(ending.token, ending.nonce), harness.clock, 30),
                Tenure(closed, Fence(harness.session(closed).token, harness.session(closed).nonce), harness.clock, 30),
                lost,
            )
        ]
        assert sorted(keeper.release_all()) == sorted(
            [(found.session_id, State.ACTIVE), (ended, State.SUMMARIZING), (closed, State.ENDED)]
        )
        assert all(hold.lost for hold in holds)
    assert (harness.session(found.session_id).state, harness.session(ended).state) == ("active", "summarizing")
    assert harness.turn(found.turn.turn_id)["status"] == "parked"
    assert harness.run(found.session_id) == Ran(1)
    assert harness.database.run(CLAIM_ENDING, {"session_id": ended, "owner": "v", "lease_s": 30.0})


def test_a_cancellation_of_the_previous_turn_does_not_stop_the_next(harness: Harness) -> None:
    """A cancellation may arrive after the runner has begun the session's next turn."""
    hold = harness.claimed(harness.send().session_id)
    first, following = hold.at_hand.turn_id, uuid4()
    hold.begin()
    _begin(hold, following)
    hold.cancel(first)
    assert _not_stopped(hold)
    hold.cancel(following)
    assert hold.stopping.is_set()
    _begin(hold, uuid4())
    assert _not_stopped(hold)


def test_what_begins_after_the_stop_is_stopped(harness: Harness) -> None:
    """A turn may be cancelled, or its session lost, just before it calls a tool or its model."""
    hold = harness.claimed(harness.send().session_id)
    hold.begin()
    hold.cancel(hold.at_hand.turn_id)
    assert hold.unwanted_call().is_set()
    call = ModelCall(harness.clock, 20)
    with hold.calling(call), pytest.raises(CallAborted):
        call.check()
    assert hold.still_valid()
    hold.lose()
    assert not hold.still_valid()


@pytest.mark.parametrize("stop", ["cancel", "lose", "begin_shutdown"])
def test_a_stopped_turn_has_a_reason(harness: Harness, stop: str) -> None:
    """The next turn may begin while another thread stops the previous turn. `stopping` is never set without a reason.

    The reasons are `cancelled`, `lost` and `draining`.
    """
    hold = harness.claimed(harness.send().session_id)
    stopped, following = uuid4(), uuid4()
    _begin(hold, stopped)

    class Overtaken(threading.Event):
        """An event whose `set` first gives another thread time to begin the next turn."""

        def set(self) -> None:
            next_turn.start()
            next_turn.join(0.2)
            super().set()

    next_turn = threading.Thread(target=_begin, args=(hold, following), daemon=True)
    hold.stopping = Overtaken()
    {"cancel": lambda: hold.cancel(stopped), "lose": hold.lose, "begin_shutdown": hold.begin_shutdown}[stop]()
    next_turn.join(PATIENCE_S)
    assert hold.running == following
    assert hold.stopping.is_set() == (hold.cancelled or hold.lost or hold.shutting_down)


def test_a_model_call_past_its_deadline_is_aborted(harness: Harness, keeper: Keeper) -> None:
    """The keeper aborts the call, because the thread that made the call may be blocked on a socket."""
    found = harness.claimed(harness.send().session_id)
    aborted = threading.Event()
    with keeper.keep(found) as hold:
        call = ModelCall(harness.clock, 20)
        with pytest.raises(DeadlineExceeded), hold.calling(call), call.aborting(aborted.set):  # noqa: PT012 (the call is the block)
            keeper.beat()
            assert not aborted.is_set()
            harness.move(21)
            keeper.beat()
            assert aborted.is_set()


@pytest.mark.long
def test_cancelling_ends_a_stream_within_three_seconds(harness: Harness, runner: Runner) -> None:
    """A cancellation aborts the model's stream, so that the provider does not bill the rest of the reply."""
    streaming = threading.Event()

    def stream(request: ModelRequest, call: ModelCall) -> ModelReply:
        ended = threading.Event()
        with call.aborting(ended.set):
            call.delta("I was about")
            streaming.set()
            assert ended.wait(PATIENCE_S), "the call was not aborted"
        raise AssertionError("an aborted call does not get here")

    harness.script(stream)
    sent = harness.send()
    running = threading.Thread(target=runner.run, args=(sent.session_id,), daemon=True)
    running.start()
    assert streaming.wait(PATIENCE_S)
    began = harness.clock.monotonic()
    cancel(harness.runtime, sent.turn_id)
    running.join(PATIENCE_S)
    assert harness.clock.monotonic() - began < 3
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["reply"], turn["error"]["code"]) == ("cancelled", None, "TURN_CANCELLED")
    assert harness.lines(sent.session_id) == [("user", "hello")]


@pytest.mark.long
def test_a_lost_session_aborts_the_model_call(harness: Harness, runner: Runner) -> None:
    """If a runner loses its session, its model call is aborted, because the reply could not be committed."""
    streaming, aborted = threading.Event(), threading.Event()

    def stream(request: ModelRequest, call: ModelCall) -> ModelReply:
        ended = threading.Event()
        try:
            with call.aborting(ended.set):
                streaming.set()
                assert ended.wait(PATIENCE_S)
        except CallAborted:
            aborted.set()
            raise
        raise AssertionError("an aborted call does not get here")

    harness.script(stream, says("second"))
    first = harness.send("first")
    running = threading.Thread(target=runner.run, args=(first.session_id,), daemon=True)
    running.start()
    assert streaming.wait(PATIENCE_S)
    harness.send("second", on_busy="interrupt")
    assert aborted.wait(PATIENCE_S)
    running.join(PATIENCE_S)
    assert harness.run(first.session_id) == Ran(1)
    assert harness.lines(first.session_id) == [("user", "first"), ("user", "second"), ("assistant", "second")]


def test_draining_parks_a_model_call_at_once(harness: Harness, runner: Runner) -> None:
    """A draining runner aborts its model call and commits no part of the reply. Another worker repeats the call."""
    streaming = threading.Event()

    def stream(request: ModelRequest, call: ModelCall) -> ModelReply:
        ended = threading.Event()
        with call.aborting(ended.set):
            streaming.set()
            assert ended.wait(PATIENCE_S)
        raise AssertionError("an aborted call does not get here")

    harness.script(stream)
    sent = harness.send()
    harness.waker.sessions.clear()
    running = threading.Thread(target=runner.run, args=(sent.session_id,), daemon=True)
    running.start()
    assert streaming.wait(PATIENCE_S)
    runner.keeper.begin_shutdown()
    until(lambda: not runner.keeper.running, "nothing runs")
    running.join(PATIENCE_S)
    assert harness.turn(sent.turn_id)["status"] == "parked"
    assert harness.waker.sessions == [sent.session_id]
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["status"] == "done"


def test_it_continues_after_lost_connections(harness: Harness, keeper: Keeper) -> None:
    """If the database connection is lost, the keeper renews the leases at a later heartbeat."""
    found = harness.claimed(harness.send().session_id)
    made = Keeper(harness.database, harness.clock, harness.settings.turn.model_copy(update={"heartbeat_s": 0.05}))
    made.start()
    with made.keep(found) as hold:
        hold.step_within(60)
        for _ in range(3):
            harness.sql(KILL_THE_OTHERS)
            before = harness.session(found.session_id).lease_until
            until(lambda: harness.session(found.session_id).lease_until > before, "a renewal")  # noqa: B023
        assert hold.still_valid()
    made.close()


def test_it_logs_once_that_it_drops_sessions_from_the_flush(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the newest `_MOST_TOUCHED` sessions are flushed at shutdown. The first dropped session causes a warning."""
    monkeypatch.setattr("perdure.turns.lease.keeper._MOST_TOUCHED", 2)
    first, second, third, fourth = uuid4(), uuid4(), uuid4(), uuid4()
    one, two = Fence(1, uuid4()), Fence(2, uuid4())
    for session_id, fence in ((first, one), (second, one), (first, two)):
        with keeper.keep_fenced(session_id, fence):
            assert keeper.touched()[0] == (session_id, fence)
    assert caplog.messages == []
    for session_id in (third, fourth):
        with keeper.keep_fenced(session_id, one):
            pass
    assert keeper.touched() == [(fourth, one), (third, one)]
    assert caplog.messages == ["more than 2 sessions were held here: the oldest are not flushed at shutdown"]
