"""One runner per session; a stale one writes nothing; nothing accepted is stranded."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import text

from perdure.database.engine import Database, Statement, as_json
from perdure.errors import Unavailable
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Role
from perdure.turns import queries
from perdure.turns.lease import ISOLATE_FROM_CLAIM, Claimed, Hold, LeaseLost, NeedsIsolation, NotNeeded, claim
from perdure.turns.react import Turn
from perdure.turns.runner import Ran, Runner
from perdure.turns.settlement import Cancelled, Tenure, conclude, settle
from perdure.turns.sweep import Swept, sweep
from perdure.turns.transcript import Entry, Transcript
from tests.turns.scripted import calls, says
from tests.turns.stage import Crash, Stage, side_by_side


def test_of_two_claims_one_wins(stage: Stage) -> None:
    """Two workers are woken for one session: one of them runs it."""
    for _ in range(10):
        session_id = stage.send().session_id
        take = [lambda: claim(stage.database, session_id, "racer", stage.settings.turn)] * 4  # noqa: B023
        found = side_by_side(*take)
        assert [type(each) for each in found].count(Claimed) == 1
        assert [type(each) for each in found].count(NotNeeded) == 3
        stage.move(31)
        stage.run(session_id)


def test_the_token_grows_with_each_claim(stage: Stage) -> None:
    """It is what tells a stale runner from the present one."""
    session_id = stage.send().session_id
    first, _ = stage.claimed(session_id)
    stage.move(31)
    second, _ = stage.claimed(session_id)
    assert second.token > first.token


def test_a_lease_keeps_others_out_until_it_runs_out(stage: Stage) -> None:
    """Not a moment before, by the database's clock."""
    session_id = stage.send().session_id
    stage.claimed(session_id)
    stage.move(29)
    assert stage.run(session_id) == NotNeeded()
    stage.move(2)
    assert stage.run(session_id) == Ran(1)


def test_an_expired_lease_that_nobody_took_is_still_its_holders(stage: Stage) -> None:
    """Only the token decides: a runner that was slow for once goes on."""
    session_id = stage.send().session_id

    def late(request: ModelRequest, call: ModelCall) -> ModelReply:
        stage.move(40)
        return says("late but ours")

    stage.script(late)
    assert stage.run(session_id) == Ran(1)
    assert stage.lines(session_id)[-1] == ("assistant", "late but ours")


def _stale(stage: Stage) -> tuple[Claimed, Hold]:
    """A claim whose session somebody else has taken since."""
    session_id = stage.send().session_id
    found = stage.claimed(session_id)
    stage.move(31)
    stage.claimed(session_id)
    return found


def _state(stage: Stage) -> list[Any]:
    tables = ("sessions", "turns", "inbox", "messages", "tool_effects", "deliveries")
    return [stage.sql(f"SELECT * FROM {table} ORDER BY 1") for table in tables]  # noqa: S608 (constants)


def test_a_stale_holder_writes_nothing(stage: Stage) -> None:
    """Every statement of a runner hangs on the token: step, settle, park, release, extend, begin the next."""
    stale, hold = _stale(stage)
    assert stale.turn is not None
    transcript = Transcript.load(stage.database, stale.session_id, stale.turn)
    turn = Turn(stage.runtime, hold, stale.turn, transcript, 0)
    before = _state(stage)
    with pytest.raises(LeaseLost):
        turn._commit([*transcript.uncommitted, Entry(stale.turn.turn_id, Role.ASSISTANT, "x")], asks=False)
    with pytest.raises(LeaseLost):
        settle(
            stage.database, stage.clock, Tenure(stale.session_id, stale.token, 30), turn=stale.turn,
            verdict=conclude(stage.database, stale.session_id, stale.turn, transcript, Cancelled()),
        )  # fmt: skip
    mine = {"session_id": stale.session_id, "token": stale.token, "turn_id": stale.turn.turn_id, "lease_s": 30}
    assert not stage.database.run(queries.PARK, {**mine, "spent_s": 9.0})
    assert not stage.database.run(queries.STRIKE, {**mine, "spent_s": 9.0, "max_attempts": 5})
    assert not stage.database.run(queries.RELEASE, mine)
    assert not stage.database.run(queries.EXTEND_EFFECT, {**mine, "effect_id": stale.turn.turn_id, "timeout_s": 9.0})
    assert not stage.database.run(queries.BEGIN_NEXT, mine)
    assert not stage.database.run(
        queries.RENEW, {"session_ids": [stale.session_id], "tokens": [stale.token], "lease_s": 99}
    )
    assert _state(stage) == before


def test_a_stale_settle_takes_its_messages_and_results_with_it(stage: Stage) -> None:
    """All of a statement hangs on one row: a stale step leaves neither messages nor effects behind."""
    stale, _ = _stale(stage)
    assert stale.turn is not None
    before = stage.counts()
    rows = stage.database.run(
        queries.STEP,
        {
            "session_id": stale.session_id, "token": stale.token, "lease_s": 30, "turn_id": stale.turn.turn_id,
            "channel": "http", "asks": False, "spent_s": 1.0, "added": 1, "tick": 0,
            "messages": as_json([Entry(stale.turn.turn_id, Role.ASSISTANT, "x").record(1)]),
            "intents": as_json([{
                "effect_id": stale.turn.turn_id, "position": 0, "tool": "t", "arguments": "{}", "effect": "pure",
                "timeout_s": 1.0,
            }]),
            "results": "[]", "variables": '{"stale": true}',
        },
    )  # fmt: skip
    assert not rows
    assert stage.counts() == before


def test_a_locked_row_does_not_hold_up_a_claim(stage: Stage) -> None:
    """A process stopped between UPDATE and COMMIT must not stop the workers: they skip its row."""
    session_id, other = stage.send().session_id, stage.send(user_id="bob").session_id
    engine = stage.database.engine.execution_options(isolation_level="READ COMMITTED")
    with engine.begin() as connection:
        connection.execute(text("SELECT 1 FROM sessions WHERE session_id = :id FOR UPDATE"), {"id": session_id})
        assert claim(stage.database, session_id, "me", stage.settings.turn) == NotNeeded()
        assert stage.run(other) == Ran(1)
    assert stage.run(session_id) == Ran(1)


def test_a_transaction_left_idle_is_ended_by_the_server(stage: Stage, database_url: str) -> None:
    """A client stopped in the middle of a transaction frees its locks within a third of the lease."""
    session_id = stage.send().session_id
    paused = Database(database_url, lease_s=3)
    lock = Statement("lock", "SELECT 1 FROM sessions WHERE session_id = %(id)s FOR UPDATE")
    with pytest.raises(Unavailable), paused.transaction("paused") as transaction:  # noqa: PT012 (the transaction is the block)
        transaction.run(lock, {"id": session_id})
        # This waits for the row, and gets it when the server ends the transaction that stands still.
        stage.send("meanwhile")
        transaction.run(lock, {"id": session_id})
    paused.close()
    assert stage.run(session_id) == Ran(2)


def test_a_released_lease_is_never_renewed(stage: Stage) -> None:
    """The keeper's round may fall between a settle and the end of its hold: nobody would hold what it renewed."""
    session_id = stage.send().session_id
    found, _ = stage.claimed(session_id)
    assert found.turn is not None
    transcript = Transcript.load(stage.database, session_id, found.turn)
    settle(
        stage.database, stage.clock, Tenure(session_id, found.token, 30), turn=found.turn,
        verdict=conclude(stage.database, session_id, found.turn, transcript, Cancelled()),
    )  # fmt: skip
    stage.database.run(queries.RENEW, {"session_ids": [session_id], "tokens": [found.token], "lease_s": 30})
    assert stage.session(session_id).lease_until is None
    stage.waker.sessions.clear()
    assert stage.send().session_id == session_id
    assert stage.waker.sessions == [session_id]
    assert stage.run(session_id) == Ran(1)


def test_a_message_beside_a_settle_is_never_stranded(stage: Stage) -> None:
    """Accept and settle lock one row: whoever is second sees the first, so somebody always goes on."""
    session_id = stage.send("0").session_id
    for number in range(1, 41):
        stage.waker.sessions.clear()
        taken, ran = side_by_side(lambda n=number: stage.send(f"{n}"), lambda: stage.run(session_id))  # type: ignore[misc]
        assert not isinstance(taken, Exception)
        assert not isinstance(ran, Exception)
        row = stage.session(session_id)
        assert row.lease_until is None, "both are over: nobody holds it"
        assert row.unsettled == 0 or session_id in stage.waker.sessions, "stranded"
    stage.run(session_id)
    asked = [content for role, content in stage.lines(session_id) if role == "user"]
    assert asked == [str(number) for number in range(41)]


def test_a_claim_beside_a_settle_releases_what_it_cannot_run(stage: Stage) -> None:
    """A claim that finds nothing to begin gives the session back and burns no attempt."""
    session_id = stage.send().session_id
    found, hold = stage.claimed(session_id)
    assert found.turn is not None
    stage.database.run(queries.RELEASE, {"session_id": session_id, "token": found.token})
    row = stage.session(session_id)
    assert (row.lease_until, row.strikes, row.state) == (None, 0, "active")
    assert not hold.lost


def test_from_the_third_claim_without_progress_a_turn_runs_alone(stage: Stage) -> None:
    """A turn that keeps killing its process must not take the turns beside it along."""
    session_id = stage.send().session_id
    for _ in range(ISOLATE_FROM_CLAIM):
        stage.script(Crash("dead"))
        with pytest.raises(Crash):
            stage.run(session_id)
        stage.move(31)
    assert stage.run(session_id) == NeedsIsolation(ISOLATE_FROM_CLAIM)
    assert stage.session(session_id).token == ISOLATE_FROM_CLAIM, "refusing is no claim"
    stage.script(says("alone at last"))
    assert stage.run(session_id, alone=True) == Ran(1)
    assert stage.lines(session_id)[-1] == ("assistant", "alone at last")


def test_a_turn_that_kills_each_time_is_given_up_with_a_reply(stage: Stage) -> None:
    """Attempts without progress end: a sentence to the sender, the code on the turn, and the next message works."""
    sent = stage.send("poison")
    for _ in range(5):
        stage.script(Crash("dead"))
        with pytest.raises(Crash):
            stage.run(sent.session_id, alone=True)
        stage.move(31)
    stage.script(says("never asked"))
    assert stage.run(sent.session_id) == Ran(1), "giving up is safe anywhere, it need not run alone"
    turn = stage.turn(sent.turn_id)
    assert (turn["status"], turn["error"]["code"], turn["attempts"]) == ("failed", "BUDGET_EXHAUSTED", 6)
    assert "5 times" in turn["reply"]["text"]
    assert len(stage.model.requests) == 5
    stage.script(says("fine"))
    assert stage.ask("are you well?")["reply"]["text"] == "fine"


def test_an_error_of_our_own_gives_up_likewise(stage: Stage) -> None:
    """A fault in a model's adapter is tried again by the sweeper, not in a loop, and ends like a crash."""
    sent = stage.send()
    for attempt in range(5):
        stage.script(ZeroDivisionError("a bug"))
        assert stage.run(sent.session_id, alone=True) == Ran(0)
        assert stage.turn(sent.turn_id)["status"] == "parked"
        assert stage.session(sent.session_id).strikes == attempt + 1
    stage.run(sent.session_id)
    turn = stage.turn(sent.turn_id)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "BUDGET_EXHAUSTED")
    assert "bug" not in str(turn)


def test_progress_forgives(stage: Stage) -> None:
    """Attempts count from the last committed step: a long turn that dies now and then gets on."""
    stage.equip()
    sent = stage.send()
    for _ in range(4):
        stage.script(says("x"))
        with stage.crashing("before", "turns.settle"):
            stage.run(sent.session_id, alone=True)
        stage.move(31)
    assert stage.session(sent.session_id).strikes == 4
    stage.script(says("done"))
    stage.run(sent.session_id, alone=True)
    assert stage.session(sent.session_id).strikes == 0


def test_parking_burns_no_attempt(stage: Stage) -> None:
    """A fleet that is deployed ten times an hour must not exhaust a waiting turn."""
    sent = stage.send()
    for _ in range(8):
        runner = Runner(stage.runtime, "draining")
        runner.keeper.drain()
        stage.waker.sessions.clear()
        assert runner.run(sent.session_id) == Ran(0)
        assert stage.waker.sessions == [sent.session_id], "somebody else goes on within seconds"
        assert stage.turn(sent.turn_id)["status"] == "parked"
    assert stage.session(sent.session_id).strikes == 0
    assert stage.run(sent.session_id) == Ran(1)


def test_a_drained_worker_gives_back_the_turns_that_wait(stage: Stage) -> None:
    """Draining begins while a turn settles: the session must not stay held by nobody."""
    first, second = stage.send("1"), stage.send("2")
    runner = Runner(stage.runtime, "draining")

    def drain(moment: str, name: str) -> None:
        if (moment, name) == ("after", "turns.settle"):
            runner.keeper.drain()

    stage.waker.sessions.clear()
    with stage.hooked(drain):
        assert runner.run(first.session_id) == Ran(1)
    assert stage.session(first.session_id).lease_until is None
    assert stage.waker.sessions == [first.session_id]
    assert stage.turn(second.turn_id)["status"] == "accepted"
    assert stage.run(first.session_id) == Ran(1)


def test_order_is_kept_whoever_runs(stage: Stage) -> None:
    """Turns of one session run in the order accepted, one at a time, under several runners."""
    session_id = stage.send("0").session_id
    for number in range(1, 12):
        stage.send(str(number))
    side_by_side(*[lambda: stage.run(session_id)] * 3)
    stage.run(session_id)
    assert [content for role, content in stage.lines(session_id) if role == "user"] == [str(n) for n in range(12)]


def test_a_turn_that_gets_a_step_done_each_time_runs_alone_too(stage: Stage) -> None:
    """A tool that kills its process commits a step in each attempt, and takes its neighbours along all the same."""
    sent = stage.send("poison")
    for _ in range(ISOLATE_FROM_CLAIM):
        stage.script(calls(("deadly", {})))
        with stage.crashing("after", "turns.step"):
            stage.run(sent.session_id)
        stage.move(31)
    assert stage.run(sent.session_id) == NeedsIsolation(ISOLATE_FROM_CLAIM)


def test_a_lease_given_by_a_clock_that_was_ahead_is_none(stage: Stage) -> None:
    """The server's clock was wrong for a while and is set back: nobody waits until it catches up."""
    sent = stage.send()
    stage.sql(
        "UPDATE sessions SET lease_until = perdure_now() + interval '1 day', "
        "woken_at = perdure_now() + interval '1 day' WHERE session_id = %(id)s RETURNING 1",
        id=sent.session_id,
    )
    assert sweep(stage.runtime) == Swept(sessions=1)
    stage.script(says("here"))
    assert stage.run(sent.session_id) == Ran(1)


def test_whatever_waits_for_locks_does_not_delay_the_keeper(stage: Stage) -> None:
    """One locked row must not cost a process the leases of its other turns."""
    locked = stage.send(user_id="locked").session_id
    running = stage.send(user_id="running")
    _, hold = stage.claimed(running.session_id)
    with stage.database.transaction("test.lock") as transaction:
        transaction.run(Statement("test.lock", LOCK_ROW), {"session_id": locked})
        senders = [Thread(target=_ignoring_unavailable, args=(stage, "locked"), daemon=True) for _ in range(40)]
        for sender in senders:
            sender.start()
        parameters = {"session_ids": [hold.session_id], "tokens": [hold.token], "lease_s": 30}
        began = monotonic()
        assert stage.database.run(queries.RENEW, parameters, urgent=True)
        assert monotonic() - began < 1
    for sender in senders:
        sender.join()


LOCK_ROW = "SELECT 1 FROM sessions WHERE session_id = %(session_id)s FOR UPDATE"


def _ignoring_unavailable(stage: Stage, user_id: str) -> None:
    with suppress(Unavailable):
        stage.send(user_id=user_id)
