"""While a call waits for a Celery task or a point in time, its turn is parked and its session has no lease."""

from __future__ import annotations

from functools import partial
from uuid import UUID

import pytest

from perdure import GuardRejected, ToolCalled, ToolCalling, celery_tool, required, sleep_until, tool
from perdure.access.tenants import UserKey
from perdure.database.engine import Moment
from perdure.memory.redis.memory import RedisMemory
from perdure.sessions.ending import request_end
from perdure.tools.awaited.port import TaskEnded, TaskRuns, TaskSent
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.calls.awaited import ENDED, UNSENT, finish, probe_due
from perdure.turns.calls.result_values import LOST
from perdure.turns.cancel import cancel
from perdure.turns.lease import leave_queries
from perdure.turns.lease.claim import NotNeeded, Queued, Ran
from perdure.turns.lease.queries import RECALL
from perdure.turns.reading import Delays
from perdure.turns.run.leave import UNSENT_S
from perdure.turns.sweep import sweep
from tests.turns.awaiting import (
    TIMEOUT_S,
    ask_and_wait,
    charge,
    end_task,
    export,
    look,
    moment_after,
    sweep_again,
)
from tests.turns.broker import Broker
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls, says


def _effects(harness: Harness) -> list[tuple[str, str | None]]:
    return [tuple(row) for row in harness.sql("SELECT status, result FROM tool_effects ORDER BY message_seq, position")]


def test_the_turn_waits_without_a_worker_and_its_result_resumes_it(harness: Harness, broker: Broker) -> None:
    """The waiting turn holds no lease, and the wait does not count as an attempt.

    The Celery task's id is the effect's id. The task's result becomes the call's result.
    """
    turn = ask_and_wait(harness)
    [sent] = broker.sent
    [effect] = harness.sql("SELECT effect_id, sent_at IS NOT NULL AS sent FROM tool_effects")
    assert (sent.task_id, effect.sent) == (effect.effect_id, True)
    assert (sent.task, sent.arguments, sent.queue, sent.expires_s) == (
        "reports.export",
        {"year": 2025},
        None,
        TIMEOUT_S,
    )
    waiting = turn["waiting_for"]
    assert (waiting["kind"], waiting["name"], waiting["progress"]) == ("task", "reports_export", None)
    row = harness.session(UUID(turn["session_id"]))
    assert (row.state, row.lease_until, row.strikes, row.claims, turn["attempts"]) == ("active", None, 0, 0, 1)
    assert isinstance(harness.run(row.session_id), NotNeeded)
    harness.move(harness.settings.turn.sweep_s * 100)
    swept = sweep(harness.runtime)
    assert swept is not None
    assert swept.sessions == 0

    harness.waker.sessions.clear()
    assert end_task(harness, sent, {"rows": 12}) is True
    assert harness.waker.sessions == [row.session_id]
    done = harness.resume(turn)
    assert (done["status"], done["attempts"], done["waiting_for"]) == ("done", 1, None)
    assert harness.results(turn) == ['{"rows": 12}']
    assert len(broker.sent) == 1


def test_a_turn_whose_user_has_no_place_after_the_wait_keeps_its_attempts(harness: Harness, broker: Broker) -> None:
    """The result arrives while other turns take the user's places: the turn is queued, and no worker was lost."""
    harness.set(user_concurrency=1)
    waiting = ask_and_wait(harness)
    other = harness.send("hello", conversation="other")
    held = harness.claimed(other.session_id)
    end_task(harness, broker.sent[0])
    session_id = UUID(waiting["session_id"])
    assert [harness.run(session_id) for _ in range(2)] == [Queued(), NotNeeded()]
    harness.database.run(leave_queries.RELEASE, {**held.fenced, "woken": False})
    assert harness.run(other.session_id) == harness.run(session_id) == Ran(1)
    done = harness.turn(UUID(waiting["turn_id"]))
    assert (done["status"], done["attempts"], done["resumed"]) == ("done", 1, None)


def test_a_tasks_failure_becomes_the_calls_error(harness: Harness, broker: Broker) -> None:
    """The model reads the first line of the task's error, without NUL."""
    turn = ask_and_wait(harness)
    end_task(harness, broker.sent[0], "Boom: no\x00 paper\nTraceback " + "x" * 10_000, failed=True)
    assert harness.resume(turn)["status"] == "done"
    assert harness.results(turn) == ["Error: Boom: no\N{REPLACEMENT CHARACTER} paper"]


def test_a_long_result_is_bounded(harness: Harness, broker: Broker) -> None:
    """A result of ten million characters is cut to the tool's `max_result_chars`."""
    turn = ask_and_wait(harness)
    end_task(harness, broker.sent[0], ["x" * 10_000_000])
    harness.resume(turn)
    [result] = harness.results(turn)
    assert len(result) <= export.max_result_chars


def test_calls_of_all_kinds_enter_the_transcript_together_in_their_order(harness: Harness, broker: Broker) -> None:
    """After one call's approval, ordinary calls run and tasks are sent. The last task's result wakes the turn."""
    wanted = [("charge", {}), ("look", {}), ("refund", {"order": 7}), ("nobody", {}), ("reports_export", {})]
    harness.script(calls(*wanted), says("done"))
    turn = harness.ask()
    assert (turn["status"], broker.sent) == ("waiting_approval", [])
    decision = parse_decision({"call_id": "call_2", "decision": "approve", "arguments": {"order": 8}})
    decide(harness.runtime, UUID(turn["turn_id"]), decision)
    turn = harness.resume(turn)
    assert turn["status"] == "parked"
    assert turn["waiting_for"]["name"] == "charge", "it is due first"
    assert [(each.task, each.queue) for each in broker.sent] == [
        ("shop.charge", "money"), ("shop.refund", None), ("reports.export", None),
    ]  # fmt: skip
    assert broker.sent[1].arguments == {"order": 8}
    assert harness.results(turn) == []
    for number, task in enumerate(reversed(broker.sent)):
        harness.waker.sessions.clear()
        end_task(harness, task, f"result of {task.task}")
        assert len(harness.waker.sessions) == (number == 2)
    assert harness.resume(turn)["status"] == "done"
    charged, seen, refunded, unknown, exported = harness.results(turn)
    assert (charged, seen, exported) == ("result of shop.charge", "seen", "result of reports.export")
    assert refunded.startswith("The arguments of this call were changed to")
    assert "no tool 'nobody'" in unknown
    assert harness.turn(UUID(turn["turn_id"]))["attempts"] == 1


def test_concurrent_results_wake_the_turn_once(harness: Harness, broker: Broker) -> None:
    """If the turn's two tasks end concurrently, exactly one wake-up is published."""
    for _ in range(5):
        turn = ask_and_wait(harness, ("reports_export", {"n": 1}), ("reports_export", {"n": 2}))
        harness.waker.sessions.clear()
        first, second = broker.sent[-2:]
        assert side_by_side(partial(end_task, harness, first), partial(end_task, harness, second)) == [True, True]
        assert harness.waker.sessions == [UUID(turn["session_id"])]
        assert harness.resume(turn)["status"] == "done"


def test_a_turn_waits_for_its_own_tasks_only(harness: Harness, broker: Broker) -> None:
    """Another user's task, which is due earlier and still runs, delays nothing, and a result resumes no other turn."""
    ask_and_wait(harness, ("charge", {}), user_id="bob")
    with harness.affecting("ana"):
        turn = ask_and_wait(harness)
    [mine] = harness.sql("SELECT decide_at FROM tool_effects WHERE turn_id = %(id)s", id=turn["turn_id"])
    assert harness.session(UUID(turn["session_id"])).not_before == mine.decide_at
    harness.waker.sessions.clear()
    with harness.affecting("ana"):
        assert end_task(harness, broker.sent[1])
        assert harness.waker.sessions == [UUID(turn["session_id"])]
        assert harness.resume(turn)["status"] == "done"


def test_a_turn_waits_for_its_own_approvals_only(harness: Harness, broker: Broker) -> None:
    """A decision about the call of one user resumes no other turn, and another user's undecided call delays nothing."""
    for user_id in ("bob", "ana"):
        harness.script(calls(("refund", {"order": 7})))
        turn = harness.ask(user_id=user_id)
    harness.waker.sessions.clear()
    with harness.affecting("ana"):
        decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": "call_0", "decision": "approve"}))
        assert harness.waker.sessions == [UUID(turn["session_id"])]
        assert harness.resume(turn)["status"] == "parked"
    assert len(broker.sent) == 1


def test_a_repeated_or_forged_result_changes_nothing(harness: Harness, broker: Broker) -> None:
    """A repeated result, a forged id and the id of an ordinary call are ignored."""
    turn = ask_and_wait(harness, ("look", {}), ("reports_export", {}))
    assert end_task(harness, broker.sent[0], "first")
    assert not end_task(harness, broker.sent[0], "second")
    [ordinary] = harness.sql("SELECT effect_id FROM tool_effects WHERE tool = 'look'")
    assert not finish(harness.runtime, ordinary.effect_id, TaskEnded(failed=False, value="forged"))
    assert not finish(harness.runtime, UUID(turn["turn_id"]), TaskEnded(failed=False, value="forged"))
    harness.resume(turn)
    assert harness.results(turn) == ["seen", "first"]


def test_a_task_that_does_not_end_in_time_is_lost(harness: Harness, broker: Broker) -> None:
    """At the time limit, the model reads that the outcome is unknown, and the task is revoked.

    A late result is stored in the effect's row, but not in the transcript.
    """
    turn = ask_and_wait(harness)
    harness.move(TIMEOUT_S + 1)
    assert _sessions_swept(harness) == [UUID(turn["session_id"])]
    done = harness.resume(turn)
    assert (done["status"], done["attempts"]) == ("done", 1)
    assert harness.results(turn) == [LOST]
    sweep_again(harness)
    assert broker.revoked == [broker.sent[0].task_id]
    assert end_task(harness, broker.sent[0], "late")
    assert _effects(harness) == [("unknown", "late")]
    assert harness.results(turn) == [LOST]
    sweep_again(harness)
    assert len(broker.revoked) == 1


@pytest.mark.parametrize("ends", [True, False])
def test_when_the_first_call_is_over_the_turn_waits_for_the_next_one(
    harness: Harness, broker: Broker, *, ends: bool
) -> None:
    """At the first call's time limit, a worker records its result, and waits for no call that is over.

    Only the task of a call whose outcome is unknown is revoked.
    """
    turn = ask_and_wait(harness, ("charge", {}), ("reports_export", {"year": 2025}))
    charged, exported = broker.sent
    if ends:
        end_task(harness, charged, "paid")
    harness.move(TIMEOUT_S / 2 - 10)
    sweep_again(harness)
    harness.move(10)
    assert harness.resume(turn)["status"] == "parked"
    [waiting] = harness.sql("SELECT decide_at FROM tool_effects WHERE status = 'intended'")
    assert harness.session(UUID(turn["session_id"])).not_before == waiting.decide_at
    sweep_again(harness)
    assert broker.revoked == ([] if ends else [charged.task_id])
    end_task(harness, exported, "made")
    assert harness.resume(turn)["status"] == "done"
    assert harness.results(turn) == ["paid" if ends else LOST, "made"]
    assert [status for status, _ in _effects(harness)] == ["done" if ends else "unknown", "done"]


def test_the_result_backend_is_polled_once_more_at_the_time_limit(harness: Harness, broker: Broker) -> None:
    """If no callback reported a task's result, the result is read from the result backend at the time limit."""
    turn = ask_and_wait(harness)
    harness.move(TIMEOUT_S + 1)
    broker.states[broker.sent[0].task_id] = TaskEnded(failed=False, value="just in time")
    harness.resume(turn)
    assert harness.results(turn) == ["just in time"]


def test_a_result_that_arrives_after_the_last_poll_counts(
    harness: Harness, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callback reports it before the worker has committed that the outcome is unknown."""
    turn = ask_and_wait(harness)
    harness.move(TIMEOUT_S + 1)
    monkeypatch.setattr(broker, "ask", lambda _: end_task(harness, broker.sent[0], "just in time") and None)
    harness.resume(turn)
    assert harness.results(turn) == ["just in time"]
    sweep_again(harness)
    assert broker.revoked == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_when_a_call_is_closed(harness: Harness, broker: Broker, moment: Moment) -> None:
    """The successor reads that the outcome is unknown, and the task is revoked."""
    turn = ask_and_wait(harness)
    harness.move(TIMEOUT_S + 1)
    with harness.crashing(moment, "turns.close_call"):
        harness.resume(turn)
    harness.move(31)
    assert harness.resume(turn)["status"] == "done"
    assert harness.results(turn) == [LOST]
    sweep_again(harness)
    assert broker.revoked == [broker.sent[0].task_id]
    harness.check()


def test_a_lost_result_is_found_in_the_result_backend(harness: Harness, broker: Broker) -> None:
    """The sweeper polls the result backend, at growing intervals, for progress and for the result."""
    turn = ask_and_wait(harness)
    task = broker.sent[0].task_id
    broker.states[task] = TaskRuns({"done": 1, "of": 2})
    sweep_again(harness)
    assert harness.turn(UUID(turn["turn_id"]))["waiting_for"]["progress"] == '{"done": 1, "of": 2}'
    broker.states[task] = TaskEnded(failed=False, value="found")
    assert probe_due(harness.runtime, cancel) == 0, "not polled again before its interval"
    sweep_again(harness)
    assert harness.waker.sessions[-1] == UUID(turn["session_id"])
    harness.resume(turn)
    assert harness.results(turn) == ["found"]


def test_erasing_a_user_revokes_queued_tasks(harness: Harness, broker: Broker, redis_url: str) -> None:
    """Tasks are revoked twice, because a worker that was paused may send a task after the first revocation."""
    export_all = celery_tool("reports.export", effect="idempotent", max_parallel=2, timeout_s=TIMEOUT_S, name="all")
    harness.equip(export, export_all, sleep_until)
    lists = {"calls": [{"year": year} for year in (2023, 2024, 2025)]}
    ask_and_wait(
        harness,
        ("reports_export", {"year": 2022}),
        ("all", lists),
        ("sleep_until", {"moment": moment_after(harness, 60)}),
    )
    queued = {each.task_id for each in broker.sent}
    assert len(queued) == 3
    harness.redis_memory = RedisMemory.at(
        redis_url, harness.settings.memory, harness.clock, harness.settings.redis_prefix
    )
    harness.runtime.eraser.erase(UserKey("ana"))
    finish_due = harness.runtime.eraser.finish_due
    broker.outcome = TaskSent.NO
    finish_due()
    assert broker.revoked == []
    broker.outcome = TaskSent.YES
    finish_due()
    assert {*broker.revoked} == queued
    finish_due()
    assert len(broker.revoked) == 3
    harness.move(harness.settings.turn.lease_s + 10)
    finish_due()
    assert (len(broker.revoked), {*broker.revoked}) == (6, queued)
    assert harness.sql("SELECT FROM erasures") == []


def test_erasing_a_user_revokes_a_task_that_was_given_up(harness: Harness, broker: Broker, redis_url: str) -> None:
    """The sweeper has not revoked it yet. A task that has ended is not revoked."""
    ended = ask_and_wait(harness)
    assert end_task(harness, broker.sent[0], "done")
    harness.resume(ended)
    late = ask_and_wait(harness)
    harness.move(TIMEOUT_S + 1)
    assert harness.resume(late)["status"] == "done"
    harness.redis_memory = RedisMemory.at(
        redis_url, harness.settings.memory, harness.clock, harness.settings.redis_prefix
    )
    harness.runtime.eraser.erase(UserKey("ana"))
    harness.runtime.eraser.finish_due()
    assert broker.revoked == [broker.sent[1].task_id]


@pytest.mark.parametrize("name", ["reports_export", "charge", "sleep_until"])
def test_cancelling_settles_at_once_and_revokes(harness: Harness, broker: Broker, name: str) -> None:
    """Cancelling needs no worker and revokes the task. A late result is stored only in the effect's row."""
    turn = ask_and_wait(harness, (name, {"moment": moment_after(harness, 60)} if name == "sleep_until" else {}))
    cancel(harness.runtime, UUID(turn["turn_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "cancelled"
    before = harness.results(turn)
    assert len(before) == 1
    sweep_again(harness)
    assert broker.revoked == [each.task_id for each in broker.sent]
    for task in broker.sent:
        end_task(harness, task, "late")
        assert _effects(harness) == [("unknown", "late")]
    assert harness.results(turn) == before
    assert isinstance(harness.run(UUID(turn["session_id"])), NotNeeded)


def test_a_requested_end_of_the_session_ends_the_wait(harness: Harness, broker: Broker) -> None:
    """The turn continues at once without the results. The turn's tasks are revoked. Then the session ends."""
    moment = moment_after(harness, 3_000)
    turn = ask_and_wait(harness, ("reports_export", {}), ("sleep_until", {"moment": moment}), ("look", {}))
    session_id = UUID(turn["session_id"])
    requested = request_end(harness.database, session_id, "test")
    assert (requested.may_end, requested.freed) == (False, 5)
    done = harness.resume(turn)
    assert (done["status"], done["attempts"]) == ("done", 1)
    assert harness.results(turn) == [LOST, ENDED, "seen"]
    sweep_again(harness)
    assert broker.revoked == [broker.sent[0].task_id]
    assert set(harness.waker.endings) == {session_id}


def test_an_end_that_is_requested_first_prevents_the_wait(harness: Harness, broker: Broker) -> None:
    """If the session's end is requested while the task is being sent, the turn does not wait for the task."""
    harness.script(calls(("reports_export", {})), says("done"))
    accepted = harness.send()

    def end(moment: str, name: str) -> None:
        if (moment, name) == ("after", "turns.note_sent"):
            request_end(harness.database, accepted.session_id, "test")

    with harness.hooked(end):
        harness.run(accepted.session_id)
    turn = harness.turn(accepted.turn_id)
    assert (turn["status"], harness.results(turn)) == ("done", [LOST])


def test_a_result_that_arrives_before_the_wait_prevents_it(harness: Harness, broker: Broker) -> None:
    """If a task ends before the session is released, as in Celery's eager mode, the turn does not wait.

    Neither does it wait because another user's turn does.
    """
    ask_and_wait(harness, user_id="bob")
    harness.script(calls(("reports_export", {}), ("look", {})), says("done"))
    accepted = harness.send()

    def end(moment: str, name: str) -> None:
        if (moment, name) == ("after", "turns.note_sent"):
            end_task(harness, broker.sent[-1], "fast")

    with harness.hooked(end):
        harness.run(accepted.session_id)
    turn = harness.turn(accepted.turn_id)
    assert (turn["status"], turn["attempts"], harness.results(turn)) == ("done", 1, ["fast", "seen"])


def test_without_a_broker_an_idempotent_task_is_sent_later_and_an_unsafe_one_fails(
    harness: Harness, broker: Broker
) -> None:
    """After the outage, the idempotent task is sent. The model reads that the unsafe task was not sent."""
    broker.outcome = TaskSent.NO
    turn = ask_and_wait(harness, ("reports_export", {}), ("charge", {}))
    assert [status for status, _ in _effects(harness)] == ["intended", "failed"]
    harness.move(UNSENT_S + 1)
    assert _sessions_swept(harness) == [UUID(turn["session_id"])]
    assert harness.resume(turn)["status"] == "parked"
    broker.outcome = TaskSent.YES
    harness.move(UNSENT_S + 1)
    assert harness.resume(turn)["status"] == "parked"
    [task] = broker.sent
    [effect] = harness.sql("SELECT effect_id FROM tool_effects WHERE tool = 'reports_export'")
    assert task.task_id == effect.effect_id
    assert task.expires_s < TIMEOUT_S - UNSENT_S
    end_task(harness, task)
    assert harness.resume(turn)["attempts"] == 1
    assert harness.results(turn) == ["made", f"Error: {UNSENT}"]


@pytest.mark.parametrize(("name", "sent_again"), [("reports_export", True), ("charge", False)])
def test_after_a_crash_while_sending_only_an_idempotent_task_is_sent_again(
    harness: Harness, broker: Broker, name: str, *, sent_again: bool
) -> None:
    """If it is unknown whether the task was sent, only an idempotent task is sent again, under the same id."""
    harness.script(calls((name, {})), says("done"))
    accepted = harness.send()
    with harness.crashing("before", "turns.note_sent"):
        harness.run(accepted.session_id)
    harness.move(harness.settings.turn.lease_s + 10)
    harness.run(accepted.session_id)
    turn = harness.turn(accepted.turn_id)
    assert turn["status"] == "parked"
    assert len(broker.sent) == 1 + sent_again
    assert len({each.task_id for each in broker.sent}) == 1
    end_task(harness, broker.sent[0], "once")
    assert harness.resume(turn)["status"] == "done"
    assert harness.results(turn) == ["once"]


def test_a_task_of_a_removed_tool_is_still_waited_for(harness: Harness, broker: Broker) -> None:
    """If a tool is removed after its task was sent, the task's result still reaches the model."""
    turn = ask_and_wait(harness)
    harness.equip(look)
    end_task(harness, broker.sent[0])
    harness.resume(turn)
    assert harness.results(turn) == ["made"]


def test_refusing_the_call_of_a_removed_tool_repeats_no_unsafe_call(harness: Harness) -> None:
    """A reply calls an unsafe tool and a removed tool. After a crash, the unsafe call is not repeated.

    When no worker has had the tool for long enough, a worker refuses its call and runs the unsafe call, but crashes.
    The next worker refuses the removed tool's call again.
    """
    ran: list[int] = []

    @tool(requires_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        ran.append(amount)
        return "paid"

    @tool(requires_approval=True)
    def gone(amount: int) -> str:
        """A tool that the next deploy removes."""
        return str(amount)

    harness.equip(pay, gone)
    harness.script(calls(("pay", {"amount": 1}), ("gone", {"amount": 2})), says("done"))
    turn = harness.ask()
    harness.equip(pay)
    for call_id in ("call_0", "call_1"):
        decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": call_id, "decision": "approve"}))
    assert harness.resume(turn)["status"] == "parked"
    harness.move(harness.settings.turn.unknown_agent_s + 1)
    with harness.crashing("before", "turns.step", nth=1):
        harness.run(UUID(turn["session_id"]))
    harness.move(harness.settings.turn.lease_s * 3)
    assert harness.resume(turn)["status"] == "done"
    assert ran == [1]


def test_sleep_until_waits_for_its_moment(harness: Harness, broker: Broker) -> None:
    """The turn waits without a worker. The sweeper wakes it at the given time."""
    moment = moment_after(harness, 7_200)
    turn = ask_and_wait(harness, ("sleep_until", {"moment": moment}))
    waiting = turn["waiting_for"]
    assert (waiting["kind"], waiting["name"]) == ("timer", "sleep_until")
    harness.move(7_000)
    assert _sessions_swept(harness) == []
    assert isinstance(harness.run(UUID(turn["session_id"])), NotNeeded)
    harness.move(201)
    assert _sessions_swept(harness) == [UUID(turn["session_id"])]
    done = harness.resume(turn)
    assert (done["status"], done["attempts"]) == ("done", 1)
    assert harness.results(turn)[0].startswith("The time has come")


def _sessions_swept(harness: Harness) -> list[UUID]:
    harness.waker.sessions.clear()
    sweep_again(harness)
    return list(harness.waker.sessions)


def test_hooks_guard_a_task_as_they_guard_a_tool(harness: Harness, broker: Broker) -> None:
    """If a hook rejects the call, no task is sent. If a hook rejects the result, the model does not read the result."""

    def no_charges(call: ToolCalling) -> None:
        if call.tool == "charge":
            raise GuardRejected("No charges today.")

    def no_secrets(call: ToolCalled) -> None:
        if "secret" in call.result:
            raise GuardRejected("The result is withheld.")

    harness.equip(export, charge, before_tool=[required(no_charges)], after_tool=[required(no_secrets)])
    turn = ask_and_wait(harness, ("charge", {}), ("reports_export", {}), ("reports_export", {}))
    assert [each.task for each in broker.sent] == ["reports.export"] * 2
    end_task(harness, broker.sent[0], "a secret")
    end_task(harness, broker.sent[1], "harmless")
    harness.resume(turn)
    assert harness.results(turn) == ["Error: No charges today.", "Error: The result is withheld.", "harmless"]


def test_a_hook_changes_the_arguments_of_a_task_and_its_result(harness: Harness, broker: Broker) -> None:
    """The row and the task have the changed arguments; a wait ends at the changed time."""
    late = moment_after(harness, 900)

    def change(call: ToolCalling) -> ToolCalling:
        return call.replace(arguments={"moment": late} if call.tool == "sleep_until" else {"year": 2031})

    harness.equip(
        export, sleep_until, before_tool=[required(change)],
        after_tool=[lambda called: called.replace(result=called.result.upper())],
    )  # fmt: skip
    turn = ask_and_wait(harness, ("reports_export", {}), ("sleep_until", {"moment": moment_after(harness, 60)}))
    assert [each.arguments for each in broker.sent] == [{"year": 2031}]
    rows = harness.sql("SELECT arguments::json AS given, decide_at FROM tool_effects ORDER BY position")
    assert [row.given for row in rows] == [{"year": 2031}, {"moment": late}]
    end_task(harness, broker.sent[0], "ready")
    harness.move(61)
    harness.run(UUID(turn["session_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "parked"
    harness.move(900)
    harness.resume(turn)
    assert harness.results(turn)[0] == "READY"


def test_a_hook_guards_a_task_that_is_sent_after_a_crash(harness: Harness, broker: Broker) -> None:
    """If a worker dies before it runs the hook, the next worker runs the hook once, then sends the task."""
    seen: list[UUID] = []
    harness.equip(export, before_tool=[required(lambda call: seen.append(call.effect_id))])
    harness.script(calls(("reports_export", {})), says("done"))
    accepted = harness.send()
    with harness.crashing("after", "turns.step", nth=1):
        harness.run(accepted.session_id)
    assert (seen, broker.sent) == ([], [])
    harness.move(harness.settings.turn.lease_s + 10)
    harness.run(accepted.session_id)
    assert seen == [each.task_id for each in broker.sent]
    assert len(seen) == 1


def test_a_result_found_at_the_time_limit_is_cut_to_the_tools_limit(harness: Harness, broker: Broker) -> None:
    """A result read from the result backend at the time limit is cut to the tool's `max_result_chars`."""
    harness.equip(celery_tool("reports.export", timeout_s=TIMEOUT_S, name="short", max_result_chars=40))
    turn = ask_and_wait(harness, ("short", {}))
    harness.move(TIMEOUT_S + 1)
    broker.states[broker.sent[0].task_id] = TaskEnded(failed=False, value="x" * 5_000)
    harness.resume(turn)
    assert len(harness.results(turn)[0]) < 200


def test_a_revocation_waits_for_the_broker(harness: Harness, broker: Broker) -> None:
    """If the turn is cancelled during a broker outage, its task is revoked after the outage."""
    turn = ask_and_wait(harness)
    cancel(harness.runtime, UUID(turn["turn_id"]))
    broker.outcome = TaskSent.NO
    sweep_again(harness)
    assert broker.revoked == []
    broker.outcome = TaskSent.YES
    for _ in range(2):
        sweep_again(harness)
    assert broker.revoked == [broker.sent[0].task_id]


def test_a_lost_wake_up_is_published_again(harness: Harness, broker: Broker) -> None:
    """If the broker is unavailable when the result arrives, the sweeper's next round wakes the turn."""
    turn = ask_and_wait(harness)
    harness.waker.away = True
    end_task(harness, broker.sent[0])
    harness.waker.away = False
    assert _sessions_swept(harness) == [UUID(turn["session_id"])]
    assert harness.resume(turn)["attempts"] == 1


def test_a_message_that_interrupts_ends_the_wait(harness: Harness, broker: Broker) -> None:
    """An interrupting message cancels the waiting turn and revokes its task. Then the message's own turn runs."""
    turn = ask_and_wait(harness)
    harness.script(says("at your service"))
    sent = harness.send("never mind", on_busy="interrupt")
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "cancelled"
    sweep_again(harness)
    assert broker.revoked == [broker.sent[0].task_id]
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"


def test_later_messages_of_the_session_wait_for_the_turn(harness: Harness, broker: Broker) -> None:
    """While a turn waits, a later message's turn does not start. It runs after the waiting turn is settled."""
    turn = ask_and_wait(harness)
    second = harness.send("and another")
    assert isinstance(harness.run(second.session_id), NotNeeded)
    end_task(harness, broker.sent[0])
    harness.resume(turn)
    assert [harness.turn(each)["status"] for each in (UUID(turn["turn_id"]), second.turn_id)] == ["done", "done"]


def test_a_breaker_that_closes_does_not_wake_a_turn_that_waits_for_a_task(harness: Harness, broker: Broker) -> None:
    """When a circuit breaker closes, only turns that wait for a model are woken."""
    ask_and_wait(harness)
    assert harness.database.run(RECALL, {}) == []


def test_the_user_is_shown_what_the_turn_waits_for(harness: Harness, broker: Broker) -> None:
    """`Delays` returns a message that names the awaited tool, once per wait."""
    turn = ask_and_wait(harness)
    delays = Delays(harness.database, UUID(turn["turn_id"]))
    message = delays.look()
    assert message is not None
    assert "reports_export" in message
    assert delays.look() is None
    end_task(harness, broker.sent[0])
    harness.resume(turn)
    assert Delays(harness.database, UUID(turn["turn_id"])).look() is None
