"""A session has one runner at a time. A stale runner writes nothing. Every accepted message is processed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import text

from perdure import tool
from perdure.database.engine import Database, Moment, Statement, as_json
from perdure.errors import PerdureError, Unavailable
from perdure.memory.consolidation import queries as consolidation_queries
from perdure.memory.redis import queries as memory_queries
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Role
from perdure.sessions import queries as session_queries
from perdure.snapshots import queries as snapshot_queries
from perdure.tools.variables import VariableSet
from perdure.turns.calls import queries as calls_queries
from perdure.turns.lease import leave_queries
from perdure.turns.lease import queries as lease_queries
from perdure.turns.lease.claim import Claims, NeedsIsolation, NotNeeded, Ran, claim, read_again
from perdure.turns.lease.keeper import Keeper
from perdure.turns.lease.queries import ISOLATE_FROM_CLAIM
from perdure.turns.lease.tenure import LeaseLost, Tenure, all_fenced
from perdure.turns.outcome import AwaitsCalls, AwaitsDecision, AwaitsModel, Lacking, NotSaved, ShutDown, Struck
from perdure.turns.run import queries as run_queries
from perdure.turns.run.commit import Step, commit_step
from perdure.turns.run.leave import Leaving, Left, SliceOver, settle_begun
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import Swept, sweep
from perdure.turns.transcript import Entry, Transcript
from tests.turns.harness import Crash, Harness, side_by_side
from tests.turns.scripted import calls, says


@pytest.mark.long
def test_one_of_concurrent_claims_succeeds(harness: Harness) -> None:
    """Of four workers that claim a session concurrently, one succeeds."""
    for _ in range(10):
        session_id = harness.send().session_id
        claims = [lambda: claim(harness.runtime, session_id, "racer")] * 4  # noqa: B023
        found = side_by_side(*claims)
        assert [type(each) for each in found].count(Tenure) == 1
        assert [type(each) for each in found].count(NotNeeded) == 3
        harness.move(31)
        harness.run(session_id)


def test_the_token_grows_with_each_claim(harness: Harness) -> None:
    """The token distinguishes a stale runner from the current one."""
    session_id = harness.send().session_id
    first = harness.claimed(session_id)
    harness.move(31)
    second = harness.claimed(session_id)
    assert second.token > first.token


def test_a_lease_excludes_other_runners_until_it_expires(harness: Harness) -> None:
    """The database's clock decides when the lease has expired."""
    session_id = harness.send().session_id
    harness.claimed(session_id)
    harness.move(29)
    assert harness.run(session_id) == NotNeeded()
    harness.move(2)
    assert harness.run(session_id) == Ran(1)


def test_a_runner_keeps_an_expired_lease_until_another_claim(harness: Harness) -> None:
    """A commit checks the fence, not the expiry. A slow runner can commit until another runner claims its session."""
    session_id = harness.send().session_id

    def late(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.move(40)
        return says("late but ours")

    harness.script(late)
    assert harness.run(session_id) == Ran(1)
    assert harness.lines(session_id)[-1] == ("assistant", "late but ours")


def _stale(harness: Harness) -> Tenure:
    """Claim a session, let the lease expire, and claim again; returns the first claim."""
    session_id = harness.send().session_id
    found = harness.claimed(session_id)
    harness.move(31)
    harness.claimed(session_id)
    return found


def _lost_in_a_failover(harness: Harness) -> Tenure:
    """Claim a session, and lose the claim in a failover to a standby; returns the lost claim.

    After the failover, another worker claims the session and gets the same token.
    """
    session_id = harness.send().session_id
    harness.script(says("before the failover"))
    harness.run(session_id)
    harness.send()
    before = harness.session(session_id)
    found = harness.claimed(session_id)
    harness.sql(
        "UPDATE sessions SET token = %(token)s, nonce = %(nonce)s, lease_until = NULL, lease_owner = NULL, "
        "strikes = 0, claims = 0, state = 'active' WHERE session_id = %(id)s",
        token=before.token, nonce=before.nonce, id=session_id,
    )  # fmt: skip
    harness.sql("UPDATE turns SET status = 'accepted', attempts = 0, started_at = NULL WHERE settled_at IS NULL")
    other = harness.claimed(session_id)
    assert (other.token, other.fence != found.fence) == (found.token, True)
    return found


OUTCOMES = (
    ShutDown(), AwaitsDecision(1), AwaitsCalls(1, ()), AwaitsModel(PerdureError("late"), 9, 9, 1, "scripted"),
    Lacking("a tool"), Struck(), NotSaved("full"),
)  # fmt: skip
STALE = {"taken over": _stale, "lost in a failover": _lost_in_a_failover}


def _state(harness: Harness) -> list[Any]:
    tables = ("sessions", "turns", "inbox", "messages", "tool_effects", "deliveries")
    return [harness.sql(f"SELECT * FROM {table} ORDER BY 1") for table in tables]  # noqa: S608 (constants)


@pytest.mark.parametrize("lose", STALE.values(), ids=STALE)
def test_a_stale_holder_writes_nothing(harness: Harness, lose: Callable[[Harness], Tenure]) -> None:
    """Every statement of a runner is conditional on the runner's fence: the token and the nonce."""
    stale = lose(harness)
    assert stale.turn is not None
    transcript = Transcript.load(harness.database, stale.at_hand)
    before = _state(harness)
    step = Step([*transcript.uncommitted, Entry(stale.turn.turn_id, Role.ASSISTANT, "x")])
    with pytest.raises(LeaseLost):
        commit_step(harness.runtime, stale, transcript, VariableSet(), step)
    with pytest.raises(LeaseLost):
        settle_begun(harness.database, harness.clock, stale.fence, stale.turn, harness.agents)
    with pytest.raises(LeaseLost):
        read_again(harness.runtime, stale)
    leaving = Leaving(harness.runtime, Claims(harness.runtime, "harness"))
    for outcome in OUTCOMES:
        with pytest.raises(LeaseLost):
            leaving.leave(stale, outcome)
    assert leaving.leave(stale, SliceOver()) == Left()
    mine = {**stale.fenced, "turn_id": stale.turn.turn_id, "lease_s": 30, "fingerprints": "{}"}
    assert not harness.database.run(
        calls_queries.EXTEND_EFFECT, {**mine, "effect_id": stale.turn.turn_id, "timeout_s": 9.0}
    )
    assert not harness.database.run(lease_queries.BEGIN_NEXT, {**mine, "fingerprints": None})
    assert not harness.database.run(run_queries.KEEP_UNSAVED, {**mine, "verdict": "{}", "most": 10})
    assert not harness.database.run(run_queries.OWNED, mine)
    decided = {"message_seq": 1, "calls": "[]", "expired": "", "ended": ""}
    assert not harness.database.run(calls_queries.BEGIN_APPROVED, {**mine, **decided})
    assert not harness.database.run(leave_queries.RELEASE_ALL, all_fenced([stale]))
    assert not harness.database.run(lease_queries.RENEW, {**all_fenced([stale]), "lease_s": 99})
    assert _state(harness) == before


CALL = """
    INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status, waits_for,
                              intended_at, decide_at)
    SELECT gen_random_uuid(), %(turn_id)s, %(message_seq)s, %(position)s, 't', '{}', 'pure', %(status)s,
           CASE %(status)s WHEN 'intended' THEN 'task' END, perdure_now(), perdure_now() + interval '1 hour'
"""


def _others(harness: Harness, mine: Tenure) -> list[Any]:
    """All other sessions and turns, with their calls and deliveries."""
    tables = {"sessions": "session_id", **dict.fromkeys(("turns", "messages", "tool_effects", "deliveries"), "turn_id")}
    return [
        harness.sql(f"SELECT * FROM {table} WHERE {key} <> %(id)s ORDER BY 1", id=row)  # noqa: S608 (constants)
        for (table, key), row in zip(tables.items(), (mine.session_id, *[mine.at_hand.turn_id] * 4), strict=True)
    ]


def test_a_turn_that_ends_or_stops_changes_no_other(harness: Harness) -> None:
    """Whichever way a worker leaves a turn, the session's next turn and another worker's turn stay as they are.

    Nor does it matter to the turn that the other one is cancelled.
    """
    leaving = Leaving(harness.runtime, Claims(harness.runtime, "harness"))
    other = harness.claimed(harness.send(user_id="bob").session_id)
    harness.sql(CALL, turn_id=other.at_hand.turn_id, message_seq=1, position=0, status="intended")
    harness.sql("UPDATE turns SET cancel_requested_at = perdure_now()")
    for number, outcome in enumerate((*OUTCOMES, None)):
        for _ in range(2):
            sent = harness.send(user_id=f"user {number}")
        mine = harness.claimed(sent.session_id)
        harness.sql(CALL, turn_id=mine.at_hand.turn_id, message_seq=1, position=0, status="intended")
        harness.sql("UPDATE sessions SET state = 'tool_executing' WHERE session_id = %(id)s", id=mine.session_id)
        before = _others(harness, mine)
        if outcome is None:
            settle_begun(harness.database, harness.clock, mine.fence, mine.at_hand, harness.agents)
        else:
            assert not leaving.leave(mine, outcome).turn_continues, outcome
        assert _others(harness, mine) == before, outcome
        row = harness.session(mine.session_id)
        assert (row.lease_until, row.lease_owner) == (None, None)
        assert harness.turn(mine.at_hand.turn_id)["status"] != "running"


def test_a_turn_after_a_settled_one_is_taken_over_from_no_worker(harness: Harness) -> None:
    """The settled turn's worker holds nothing that the next worker could take over."""
    for _ in range(2):
        harness.ask()
    assert [row.takeovers for row in harness.sql("SELECT takeovers FROM turns")] == [None, None]


def test_an_approval_is_waited_for_until_the_first_of_its_calls_expires(harness: Harness) -> None:
    """No other call counts: those of other turns and of earlier replies, and those that are decided already."""
    leaving = Leaving(harness.runtime, Claims(harness.runtime, "harness"))
    other = harness.claimed(harness.send(user_id="bob").session_id)
    mine = harness.claimed(harness.send().session_id)
    harness.sql("UPDATE sessions SET state = 'tool_executing'")
    for turn, message_seq, position, status in (
        (other, 2, 0, "asked"), (mine, 1, 0, "asked"), (mine, 2, 0, "denied"),
        (mine, 2, 1, "asked"), (mine, 2, 2, "asked"),
    ):  # fmt: skip
        given = {"message_seq": message_seq, "position": position, "status": status}
        harness.sql(CALL, turn_id=turn.at_hand.turn_id, **given)
        harness.move(60)
    leaving.leave(mine, AwaitsDecision(2))
    expected = harness.sql("SELECT decide_at FROM tool_effects WHERE position = 1")[0].decide_at
    assert harness.session(mine.session_id).not_before == expected


def test_a_process_that_exits_releases_its_own_sessions_only(harness: Harness) -> None:
    """The turns of other processes go on."""
    harness.claimed(harness.send(user_id="bob").session_id)
    sent = harness.send()
    mine = harness.claimed(sent.session_id)
    with harness.affecting("ana"):
        harness.database.run(leave_queries.RELEASE_ALL, all_fenced([mine]))
    assert harness.turn(sent.turn_id)["status"] == "parked"


def test_a_turn_whose_failure_cannot_be_settled_is_tried_again_with_pauses(harness: Harness) -> None:
    """After the last permitted attempt, the next claim settles the turn soon. If that fails, too, the pauses return."""
    leaving = Leaving(harness.runtime, Claims(harness.runtime, "harness"))
    most = harness.settings.turn.max_attempts
    for strikes, is_due in ((most - 1, False), (most, True), (most + 1, True), (most + 2, False)):
        mine = harness.claimed(harness.send(user_id=f"user {strikes}").session_id)
        harness.sql("UPDATE sessions SET strikes = %(n)s WHERE session_id = %(id)s", n=strikes, id=mine.session_id)
        leaving.leave(mine, Struck())
        assert (harness.session(mine.session_id).woken_at is None) == is_due, strikes


def test_the_keeper_distinguishes_two_claims_of_one_token(harness: Harness) -> None:
    """After a failover, two claims can have the same token. The older claim's keeper does not renew the newer lease."""
    stale = _lost_in_a_failover(harness)
    keeper = Keeper(harness.database, harness.clock, harness.settings.turn)
    until = harness.session(stale.session_id).lease_until
    with keeper.keep(stale) as kept:
        kept.begin()
        harness.move(harness.settings.turn.heartbeat_s)
        keeper.beat()
        assert kept.lost
    assert harness.session(stale.session_id).lease_until == until


def test_every_statement_under_a_token_names_the_nonce(harness: Harness) -> None:
    """Every statement that is conditional on a session's token is also conditional on the nonce."""
    modules = (
        lease_queries, leave_queries, run_queries, calls_queries, session_queries, consolidation_queries,
        memory_queries, snapshot_queries,
    )  # fmt: skip
    statements = [each for module in modules for each in vars(module).values() if isinstance(each, Statement)]
    under = {each.name for each in statements if {"token", "tokens"} & set(each.parameters)}
    fenced = {each.name for each in statements if {"nonce", "nonces"} & set(each.parameters)}
    assert len(fenced) > 20
    assert under - fenced == {"snapshots.save"}, "its token is the version of a snapshot"


def test_a_stale_step_writes_neither_messages_nor_effects(harness: Harness) -> None:
    """If the fence is stale, the statement `STEP` writes nothing at all."""
    stale = _stale(harness)
    assert stale.turn is not None
    before = harness.counts()
    rows = harness.database.run(
        run_queries.STEP,
        {
            **stale.fenced, "lease_s": 30, "fingerprints": "{}", "turn_id": stale.turn.turn_id,
            "channel": "http", "runs_tools": False, "spent_s": 1.0, "added": 1, "tick": 0,
            "messages": as_json([Entry(stale.turn.turn_id, Role.ASSISTANT, "x").to_dict(1)]),
            "intents": as_json([{
                "effect_id": stale.turn.turn_id, "position": 0, "tool": "t", "arguments": "{}", "effect": "pure",
                "timeout_s": 1.0,
            }]),
            "results": "[]", "variables": '{"stale": true}', "joins": True, "max_chars": 100,
        },
    )  # fmt: skip
    assert not rows
    assert harness.counts() == before


def test_a_locked_row_does_not_delay_a_claim(harness: Harness) -> None:
    """A claim skips a session whose row is locked. A process that is paused in a transaction does not block workers."""
    session_id, other = harness.send().session_id, harness.send(user_id="bob").session_id
    engine = harness.database.engine.execution_options(isolation_level="READ COMMITTED")
    with engine.begin() as connection:
        connection.execute(text("SELECT 1 FROM sessions WHERE session_id = :id FOR UPDATE"), {"id": session_id})
        assert claim(harness.runtime, session_id, "me") == NotNeeded()
        assert harness.run(other) == Ran(1)
    assert harness.run(session_id) == Ran(1)


@pytest.mark.long
def test_a_transaction_left_idle_is_ended_by_the_server(harness: Harness, database_url: str) -> None:
    """PostgreSQL ends a transaction that is idle for a third of the lease, and releases its locks."""
    session_id = harness.send().session_id
    paused = Database(database_url, lease_s=3)
    lock = Statement("lock", "SELECT 1 FROM sessions WHERE session_id = %(id)s FOR UPDATE")
    with pytest.raises(Unavailable), paused.transaction("paused") as transaction:  # noqa: PT012 (the transaction is the block)
        transaction.run(lock, {"id": session_id})
        # `send` waits for the locked row until the server ends the idle transaction.
        harness.send("meanwhile")
        transaction.run(lock, {"id": session_id})
    paused.close()
    assert harness.run(session_id) == Ran(2)


def test_a_released_lease_is_never_renewed(harness: Harness) -> None:
    """The keeper does not renew a lease that a settle has released, because the renewed lease would have no holder."""
    session_id = harness.send().session_id
    found = harness.claimed(session_id)
    assert found.turn is not None
    settle_begun(harness.database, harness.clock, found.fence, found.turn, harness.agents)
    harness.database.run(lease_queries.RENEW, {**all_fenced([found]), "lease_s": 30})
    assert harness.session(session_id).lease_until is None
    harness.waker.sessions.clear()
    assert harness.send().session_id == session_id
    assert harness.waker.sessions == [session_id]
    assert harness.run(session_id) == Ran(1)


@pytest.mark.long
def test_a_message_during_a_settle_is_never_stranded(harness: Harness) -> None:
    """A message accepted during a settle is run by the same runner, or the session is woken for it."""
    session_id = harness.send("0").session_id
    for number in range(1, 41):
        harness.waker.sessions.clear()
        accepted, ran = side_by_side(lambda n=number: harness.send(f"{n}"), lambda: harness.run(session_id))  # type: ignore[misc]
        assert not isinstance(accepted, Exception)
        assert not isinstance(ran, Exception)
        row = harness.session(session_id)
        assert row.lease_until is None, "both calls have returned: no runner holds the session"
        assert row.unsettled == 0 or session_id in harness.waker.sessions, "stranded"
    harness.run(session_id)
    texts = [content for role, content in harness.lines(session_id) if role == "user"]
    assert texts == [str(number) for number in range(41)]


def test_a_claim_without_a_turn_to_run_is_released(harness: Harness) -> None:
    """If a claim finds no turn to begin, the session is released without a strike."""
    session_id = harness.send().session_id
    found = harness.claimed(session_id)
    assert found.turn is not None
    harness.database.run(leave_queries.RELEASE, {**found.fenced, "woken": False})
    row = harness.session(session_id)
    assert (row.lease_until, row.strikes, row.claims, row.state) == (None, 0, 0, "active")
    assert not found.lost


def test_a_lease_is_valid_from_the_time_at_which_its_claim_was_sent(harness: Harness) -> None:
    """If the answer to a claim takes longer than the lease, another worker may have the session: no tool begins."""
    session_id = harness.send().session_id

    def delay(moment: Moment, name: str) -> None:
        if (moment, name) == ("after", "turns.claim"):
            harness.move(harness.settings.turn.lease_s)

    with harness.hooked(delay):
        assert not harness.claimed(session_id).still_valid()


def test_each_commit_of_a_step_renews_the_lease(harness: Harness) -> None:
    """In the database, and for the holder, which begins no tool under a lease that may have expired."""
    mine = harness.claimed(harness.send().session_id)
    transcript = Transcript.load(harness.database, mine.at_hand)
    harness.move(mine.lease_s - 1)
    commit_step(harness.runtime, mine, transcript, VariableSet(), Step(transcript.uncommitted))
    harness.move(mine.lease_s - 1)
    assert mine.still_valid()
    assert isinstance(claim(harness.runtime, mine.session_id, "another"), NotNeeded)


def test_from_the_third_claim_without_progress_a_turn_runs_alone(harness: Harness) -> None:
    """A turn that repeatedly kills its process is then run in a separate process, in which no other turn runs."""
    session_id = harness.send().session_id
    for _ in range(ISOLATE_FROM_CLAIM):
        harness.script(Crash("dead"))
        with pytest.raises(Crash):
            harness.run(session_id)
        harness.move(31)
    assert harness.run(session_id) == NeedsIsolation(ISOLATE_FROM_CLAIM)
    assert harness.session(session_id).token == ISOLATE_FROM_CLAIM, "a refusal is not counted as a claim"
    harness.script(says("alone at last"))
    assert harness.run(session_id, alone=True) == Ran(1)
    assert harness.lines(session_id)[-1] == ("assistant", "alone at last")


def test_a_turn_that_kills_each_process_fails_with_a_reply(harness: Harness) -> None:
    """After its last attempt, the turn fails with an error code and a reply. The session's next message is answered."""
    sent = harness.send("poison")
    for _ in range(5):
        harness.script(Crash("dead"))
        with pytest.raises(Crash):
            harness.run(sent.session_id, alone=True)
        harness.move(31)
    harness.script(says("never called"))
    assert harness.run(sent.session_id) == Ran(1), "failing the turn needs no isolation"
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["error"]["code"], turn["attempts"]) == ("failed", "BUDGET_EXHAUSTED", 6)
    assert "5 times" in turn["reply"]["text"]
    assert len(harness.model.requests) == 5
    harness.script(says("fine"))
    assert harness.ask("are you well?")["reply"]["text"] == "fine"


def test_an_internal_error_ends_like_a_crash(harness: Harness) -> None:
    """An unexpected exception parks the turn and uses an attempt. After the last attempt, the turn fails."""
    sent = harness.send()
    for attempt in range(5):
        harness.script(ZeroDivisionError("a bug"))
        assert harness.run(sent.session_id, alone=True) == Ran(0)
        assert harness.turn(sent.turn_id)["status"] == "parked"
        assert harness.session(sent.session_id).strikes == attempt + 1
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "BUDGET_EXHAUSTED")
    assert "bug" not in str(turn)


def test_progress_resets_the_strikes(harness: Harness) -> None:
    """Attempts count from the last committed step, so that a long turn survives occasional crashes."""
    harness.equip()
    sent = harness.send()
    for _ in range(4):
        harness.script(says("x"))
        with harness.crashing("before", "turns.settle"):
            harness.run(sent.session_id, alone=True)
        harness.move(31)
    assert harness.session(sent.session_id).strikes == 4
    harness.script(says("done"))
    harness.run(sent.session_id, alone=True)
    assert harness.session(sent.session_id).strikes == 0


def test_attempts_count_from_the_last_step(harness: Harness) -> None:
    """A turn whose every attempt commits a step goes on, however many of its processes die."""

    @tool(effect="pure")
    def look() -> str:
        """Look."""
        return "seen"

    harness.equip(look)
    sent = harness.send()
    for _ in range(harness.settings.turn.max_attempts + 2):
        harness.script(calls(("look", {})), Crash("dead"))
        with pytest.raises(Crash):
            harness.run(sent.session_id, alone=True)
        harness.move(31)
    harness.script(says("done"))
    harness.run(sent.session_id, alone=True)
    assert harness.turn(sent.turn_id)["status"] == "done"


def test_parking_uses_no_attempt(harness: Harness) -> None:
    """Frequent deploys must not use up a turn's attempts."""
    sent = harness.send()
    for _ in range(8):
        runner = Runner(harness.runtime, "draining")
        runner.keeper.begin_shutdown()
        harness.waker.sessions.clear()
        assert runner.run(sent.session_id) == Ran(0)
        assert harness.waker.sessions == [sent.session_id], "another worker continues within seconds"
        assert harness.turn(sent.turn_id)["status"] == "parked"
    assert harness.session(sent.session_id).strikes == 0
    assert harness.run(sent.session_id) == Ran(1)


def test_a_drained_worker_releases_the_turns_that_wait(harness: Harness) -> None:
    """If draining begins while a turn settles, the worker releases the session and wakes it for its next turn."""
    first, second = harness.send("1"), harness.send("2")
    runner = Runner(harness.runtime, "draining")

    def drain(moment: str, name: str) -> None:
        if (moment, name) == ("after", "turns.settle"):
            runner.keeper.begin_shutdown()

    harness.waker.sessions.clear()
    with harness.hooked(drain):
        assert runner.run(first.session_id) == Ran(1)
    assert harness.session(first.session_id).lease_until is None
    assert harness.waker.sessions == [first.session_id]
    assert harness.turn(second.turn_id)["status"] == "accepted"
    assert harness.run(first.session_id) == Ran(1)


def test_order_is_kept_under_several_runners(harness: Harness) -> None:
    """Turns of one session run one at a time, in the order accepted."""
    session_id = harness.send("0").session_id
    for number in range(1, 12):
        harness.send(str(number))
    side_by_side(*[lambda: harness.run(session_id)] * 3)
    harness.run(session_id)
    assert [content for role, content in harness.lines(session_id) if role == "user"] == [str(n) for n in range(12)]


def test_a_turn_that_commits_a_step_in_each_attempt_runs_alone_too(harness: Harness) -> None:
    """A turn that keeps killing its process runs in a process of its own, even if each attempt commits a step.

    In each attempt, the model repeats the call of an unsafe tool that has killed the process.
    """

    @tool
    def deadly() -> str:
        """Kills the process."""
        raise Crash("dead")

    harness.equip(deadly)
    sent = harness.send("poison")
    for _ in range(ISOLATE_FROM_CLAIM):
        harness.script(calls(("deadly", {})))
        with harness.crashing("after", "turns.step"):
            harness.run(sent.session_id)
        harness.move(61)
    assert harness.run(sent.session_id) == NeedsIsolation(ISOLATE_FROM_CLAIM)


def test_a_lease_from_a_clock_that_was_ahead_is_ignored(harness: Harness) -> None:
    """After the server's clock is set back, a lease that ends far in the future counts as expired."""
    sent = harness.send()
    harness.sql(
        "UPDATE sessions SET lease_until = perdure_now() + interval '1 day', "
        "woken_at = perdure_now() + interval '1 day' WHERE session_id = %(id)s RETURNING 1",
        id=sent.session_id,
    )
    assert sweep(harness.runtime) == Swept(sessions=1)
    harness.script(says("here"))
    assert harness.run(sent.session_id) == Ran(1)


def test_statements_that_wait_for_locks_do_not_delay_the_keeper(harness: Harness) -> None:
    """Statements that wait for one locked row must not delay the renewal of the process's other leases."""
    locked = harness.send(user_id="locked").session_id
    running = harness.send(user_id="running")
    hold = harness.claimed(running.session_id)
    with harness.database.transaction("test.lock") as transaction:
        transaction.run(Statement("test.lock", LOCK_ROW), {"session_id": locked})
        senders = [Thread(target=_ignoring_unavailable, args=(harness, "locked"), daemon=True) for _ in range(40)]
        for sender in senders:
            sender.start()
        parameters = {**all_fenced([hold]), "lease_s": 30}
        began = monotonic()
        assert harness.database.run(lease_queries.RENEW, parameters, urgent=True)
        assert monotonic() - began < 1
    for sender in senders:
        sender.join()


LOCK_ROW = "SELECT 1 FROM sessions WHERE session_id = %(session_id)s FOR UPDATE"


def _ignoring_unavailable(harness: Harness, user_id: str) -> None:
    with suppress(Unavailable):
        harness.send(user_id=user_id)


@pytest.mark.parametrize(("message_id", "on_busy"), [("queued", "enqueue"), ("new", "enqueue"), ("new", "merge")])
def test_a_message_does_not_shorten_the_pause_after_failures(harness: Harness, message_id: str, on_busy: str) -> None:
    """After failed attempts, only the sweeper wakes a turn's session. A new, merged or repeated message does not."""
    sent = harness.send()
    for _ in range(4):
        harness.script(ZeroDivisionError("a bug"))
        harness.run(sent.session_id, alone=True)
    harness.send(message_id="queued")
    harness.move(4 * harness.settings.turn.sweep_s + 1)  # a wake-up counts as recent for at most four intervals
    harness.waker.sessions.clear()
    harness.send(message_id=message_id, on_busy=on_busy)
    assert harness.waker.sessions == []
