"""While a call waits for a Celery task or a time, its turn is parked without a lease. Each outcome is one commit."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from perdure import GuardRejected, ToolCalled, ToolCalling, celery_tool, required, sleep_until, tool
from perdure.memory.redis.memory import RedisMemory
from perdure.sessions.ending import request_end
from perdure.tools.awaited.port import Sent, TaskCall, TaskEnded, TaskRuns
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.calls.awaited import ENDED, RETRY_S, UNSENT, finish, probe_due
from perdure.turns.calls.result_values import LOST
from perdure.turns.cancel import cancel
from perdure.turns.lease.claim import NotNeeded
from perdure.turns.lease.queries import RECALL
from perdure.turns.reading import Delays
from perdure.turns.sweep import sweep
from tests.turns.broker import Broker
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls, says

TIMEOUT_S = 3_600

export = celery_tool("reports.export", effect="idempotent", timeout_s=TIMEOUT_S)
charge = celery_tool("shop.charge", timeout_s=TIMEOUT_S / 2, queue="money", name="charge")
refund = celery_tool("shop.refund", timeout_s=TIMEOUT_S, name="refund", requires_approval=True)


@tool(effect="pure")
def look() -> str:
    """Return `seen`."""
    return "seen"


@pytest.fixture
def broker(harness: Harness) -> Broker:
    """The task queue of an agent that is equipped with tools of each kind."""
    made = Broker()
    harness.calls = made
    harness.equip(export, charge, refund, look, sleep_until)
    return made


def _waiting(harness: Harness, *wanted: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Run a turn whose model makes the calls `wanted`, until it waits for their results."""
    harness.script(calls(*(wanted or (("reports_export", {"year": 2025}),))), says("done"))
    turn = harness.ask()
    assert turn["status"] == "parked"
    return turn


def _resume(harness: Harness, turn: dict[str, Any]) -> dict[str, Any]:
    harness.run(UUID(turn["session_id"]))
    return harness.turn(UUID(turn["turn_id"]))


def _results(harness: Harness, turn: dict[str, Any]) -> list[str]:
    return [text for role, text in harness.lines(UUID(turn["session_id"])) if role == "tool"]


def _ends(harness: Harness, task: TaskCall, value: Any = "made", *, failed: bool = False) -> bool:
    return finish(harness.runtime, task.task_id, TaskEnded(failed=failed, value=value))


def _effects(harness: Harness) -> list[tuple[str, str | None]]:
    return [tuple(row) for row in harness.sql("SELECT status, result FROM tool_effects ORDER BY message_seq, position")]


def test_the_turn_waits_without_a_worker_and_its_result_resumes_it(harness: Harness, broker: Broker) -> None:
    """The wait costs no lease, strike or attempt.

    The task has the effect's id, and the task's result becomes the call's result.
    """
    turn = _waiting(harness)
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
    assert _ends(harness, sent, {"rows": 12}) is True
    assert harness.waker.sessions == [row.session_id]
    done = _resume(harness, turn)
    assert (done["status"], done["attempts"], done["waiting_for"]) == ("done", 1, None)
    assert _results(harness, turn) == ['{"rows": 12}']
    assert len(broker.sent) == 1


def test_a_tasks_failure_becomes_the_calls_error(harness: Harness, broker: Broker) -> None:
    """The error is one bounded line without NUL or traceback."""
    turn = _waiting(harness)
    _ends(harness, broker.sent[0], "Boom: no\x00 paper\nTraceback " + "x" * 10_000, failed=True)
    assert _resume(harness, turn)["status"] == "done"
    assert _results(harness, turn) == ["Error: Boom: no\N{REPLACEMENT CHARACTER} paper"]


def test_a_long_result_is_bounded(harness: Harness, broker: Broker) -> None:
    """A result of ten million characters is cut to the tool's `max_result_chars`."""
    turn = _waiting(harness)
    _ends(harness, broker.sent[0], ["x" * 10_000_000])
    _resume(harness, turn)
    [result] = _results(harness, turn)
    assert len(result) <= export.max_result_chars


def test_calls_of_all_kinds_enter_the_transcript_together_in_their_order(harness: Harness, broker: Broker) -> None:
    """After the approval, ordinary calls run and tasks are sent. The last result wakes the turn."""
    wanted = [("charge", {}), ("look", {}), ("refund", {"order": 7}), ("nobody", {}), ("reports_export", {})]
    harness.script(calls(*wanted), says("done"))
    turn = harness.ask()
    assert (turn["status"], broker.sent) == ("waiting_approval", [])
    decision = parse_decision({"call_id": "call_2", "decision": "approve", "arguments": {"order": 8}})
    decide(harness.runtime, UUID(turn["turn_id"]), decision)
    turn = _resume(harness, turn)
    assert turn["status"] == "parked"
    assert turn["waiting_for"]["name"] == "charge", "it is due first"
    assert [(each.task, each.queue) for each in broker.sent] == [
        ("shop.charge", "money"), ("shop.refund", None), ("reports.export", None),
    ]  # fmt: skip
    assert broker.sent[1].arguments == {"order": 8}
    assert _results(harness, turn) == []
    for number, task in enumerate(reversed(broker.sent)):
        harness.waker.sessions.clear()
        _ends(harness, task, f"result of {task.task}")
        assert len(harness.waker.sessions) == (number == 2)
    assert _resume(harness, turn)["status"] == "done"
    charged, seen, refunded, unknown, exported = _results(harness, turn)
    assert (charged, seen, exported) == ("result of shop.charge", "seen", "result of reports.export")
    assert refunded.startswith("A person changed the arguments")
    assert "no tool 'nobody'" in unknown
    assert harness.turn(UUID(turn["turn_id"]))["attempts"] == 1


def test_concurrent_results_wake_the_turn_once(harness: Harness, broker: Broker) -> None:
    """Two concurrent results publish one wake-up. If neither transaction saw the other's result, none would be sent."""
    for _ in range(5):
        turn = _waiting(harness, ("reports_export", {"n": 1}), ("reports_export", {"n": 2}))
        harness.waker.sessions.clear()
        first, second = broker.sent[-2:]
        assert side_by_side(partial(_ends, harness, first), partial(_ends, harness, second)) == [True, True]
        assert harness.waker.sessions == [UUID(turn["session_id"])]
        assert _resume(harness, turn)["status"] == "done"


def test_a_repeated_or_forged_result_changes_nothing(harness: Harness, broker: Broker) -> None:
    """A repeated result, a forged id and the id of an ordinary call are ignored."""
    turn = _waiting(harness, ("look", {}), ("reports_export", {}))
    assert _ends(harness, broker.sent[0], "first")
    assert not _ends(harness, broker.sent[0], "second")
    [ordinary] = harness.sql("SELECT effect_id FROM tool_effects WHERE tool = 'look'")
    assert not finish(harness.runtime, ordinary.effect_id, TaskEnded(failed=False, value="forged"))
    assert not finish(harness.runtime, UUID(turn["turn_id"]), TaskEnded(failed=False, value="forged"))
    _resume(harness, turn)
    assert _results(harness, turn) == ["seen", "first"]


def test_a_task_that_does_not_end_in_time_is_lost(harness: Harness, broker: Broker) -> None:
    """The model reads that the outcome is unknown. The task is revoked. Only the effect's row stores a late result."""
    turn = _waiting(harness)
    harness.move(TIMEOUT_S + 1)
    assert _sessions_swept(harness) == [UUID(turn["session_id"])]
    done = _resume(harness, turn)
    assert (done["status"], done["attempts"]) == ("done", 1)
    assert _results(harness, turn) == [LOST]
    sweep_again(harness)
    assert broker.revoked == [broker.sent[0].task_id]
    assert _ends(harness, broker.sent[0], "late")
    assert _effects(harness) == [("unknown", "late")]
    assert _results(harness, turn) == [LOST]
    sweep_again(harness)
    assert len(broker.revoked) == 1


def test_the_result_backend_is_polled_once_more_at_the_time_limit(harness: Harness, broker: Broker) -> None:
    """If a task's callback was lost, its result may still be in the result backend."""
    turn = _waiting(harness)
    harness.move(TIMEOUT_S + 1)
    broker.states[broker.sent[0].task_id] = TaskEnded(failed=False, value="just in time")
    _resume(harness, turn)
    assert _results(harness, turn) == ["just in time"]


def test_a_lost_result_is_found_in_the_result_backend(harness: Harness, broker: Broker) -> None:
    """The sweeper polls the result backend, at growing intervals, for progress and for the result."""
    turn = _waiting(harness)
    task = broker.sent[0].task_id
    broker.states[task] = TaskRuns({"done": 1, "of": 2})
    sweep_again(harness)
    assert harness.turn(UUID(turn["turn_id"]))["waiting_for"]["progress"] == '{"done": 1, "of": 2}'
    broker.states[task] = TaskEnded(failed=False, value="found")
    assert probe_due(harness.runtime) == 0, "not polled again before its interval"
    sweep_again(harness)
    assert harness.waker.sessions[-1] == UUID(turn["session_id"])
    _resume(harness, turn)
    assert _results(harness, turn) == ["found"]


def test_erasing_a_user_revokes_queued_tasks(harness: Harness, broker: Broker, redis_url: str) -> None:
    """Tasks are revoked twice, since a worker paused during the erasure may send a task after the first revocation."""
    export_all = celery_tool("reports.export", effect="idempotent", max_parallel=2, timeout_s=TIMEOUT_S, name="all")
    harness.equip(export, export_all, sleep_until)
    lists = {"calls": [{"year": year} for year in (2023, 2024, 2025)]}
    _waiting(
        harness, ("reports_export", {"year": 2022}), ("all", lists), ("sleep_until", {"moment": _moment(harness, 60)})
    )
    queued = {each.task_id for each in broker.sent}
    assert len(queued) == 3
    harness.redis_memory = RedisMemory.at(
        redis_url, harness.settings.memory, harness.clock, harness.settings.redis_prefix
    )
    harness.runtime.eraser.erase("ana")
    broker.outcome = Sent.NO
    sweep_again(harness)
    assert broker.revoked == []
    broker.outcome = Sent.YES
    sweep_again(harness)
    assert {*broker.revoked} == queued
    sweep_again(harness)
    assert len(broker.revoked) == 3
    harness.move(harness.settings.turn.lease_s + 1)
    sweep_again(harness)
    assert (len(broker.revoked), {*broker.revoked}) == (6, queued)
    assert harness.sql("SELECT FROM erasures") == []


@pytest.mark.parametrize("name", ["reports_export", "charge", "sleep_until"])
def test_cancelling_settles_at_once_and_revokes(harness: Harness, broker: Broker, name: str) -> None:
    """Cancelling needs no worker. A later result is stored in the effect's row, never in the transcript."""
    turn = _waiting(harness, (name, {"moment": _moment(harness, 60)} if name == "sleep_until" else {}))
    cancel(harness.runtime, UUID(turn["turn_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "cancelled"
    before = _results(harness, turn)
    assert len(before) == 1
    sweep_again(harness)
    assert broker.revoked == [each.task_id for each in broker.sent]
    for task in broker.sent:
        _ends(harness, task, "late")
        assert _effects(harness) == [("unknown", "late")]
    assert _results(harness, turn) == before
    assert isinstance(harness.run(UUID(turn["session_id"])), NotNeeded)


def test_a_requested_end_of_the_session_ends_the_wait(harness: Harness, broker: Broker) -> None:
    """The turn continues at once without the results. Its tasks are revoked. Then the session ends."""
    moment = _moment(harness, 3_000)
    turn = _waiting(harness, ("reports_export", {}), ("sleep_until", {"moment": moment}), ("look", {}))
    session_id = UUID(turn["session_id"])
    requested = request_end(harness.database, session_id, "test")
    assert (requested.may_end, requested.freed) == (False, 5)
    done = _resume(harness, turn)
    assert (done["status"], done["attempts"]) == ("done", 1)
    assert _results(harness, turn) == [LOST, ENDED, "seen"]
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
    assert (turn["status"], _results(harness, turn)) == ("done", [LOST])


def test_a_result_that_arrives_before_the_wait_prevents_it(harness: Harness, broker: Broker) -> None:
    """A fast task, or a task in Celery's eager mode, may end before the session is released. Its turn does not wait."""
    harness.script(calls(("reports_export", {}), ("look", {})), says("done"))
    accepted = harness.send()

    def end(moment: str, name: str) -> None:
        if (moment, name) == ("after", "turns.note_sent"):
            _ends(harness, broker.sent[0], "fast")

    with harness.hooked(end):
        harness.run(accepted.session_id)
    turn = harness.turn(accepted.turn_id)
    assert (turn["status"], turn["attempts"], _results(harness, turn)) == ("done", 1, ["fast", "seen"])


def test_without_a_broker_an_idempotent_task_is_sent_later_and_an_unsafe_one_fails(
    harness: Harness, broker: Broker
) -> None:
    """The idempotent task is sent later. The model reads that the unsafe task failed."""
    broker.outcome = Sent.NO
    turn = _waiting(harness, ("reports_export", {}), ("charge", {}))
    assert [status for status, _ in _effects(harness)] == ["intended", "failed"]
    harness.move(RETRY_S + 1)
    assert _sessions_swept(harness) == [UUID(turn["session_id"])]
    assert _resume(harness, turn)["status"] == "parked"
    broker.outcome = Sent.YES
    harness.move(RETRY_S + 1)
    assert _resume(harness, turn)["status"] == "parked"
    [task] = broker.sent
    [effect] = harness.sql("SELECT effect_id FROM tool_effects WHERE tool = 'reports_export'")
    assert task.task_id == effect.effect_id
    assert task.expires_s < TIMEOUT_S - RETRY_S
    _ends(harness, task)
    assert _resume(harness, turn)["attempts"] == 1
    assert _results(harness, turn) == ["made", f"Error: {UNSENT}"]


@pytest.mark.parametrize(("name", "sent_again"), [("reports_export", True), ("charge", False)])
def test_after_a_crash_while_sending_only_an_idempotent_task_is_sent_again(
    harness: Harness, broker: Broker, name: str, *, sent_again: bool
) -> None:
    """The crash leaves open whether the task was sent. Only an idempotent task is sent again, under the same id."""
    harness.script(calls((name, {})), says("done"))
    accepted = harness.send()
    with harness.crashing("before", "turns.note_sent"):
        harness.run(accepted.session_id)
    harness.move(harness.settings.turn.lease_s + 1)
    harness.run(accepted.session_id)
    turn = harness.turn(accepted.turn_id)
    assert turn["status"] == "parked"
    assert len(broker.sent) == 1 + sent_again
    assert len({each.task_id for each in broker.sent}) == 1
    _ends(harness, broker.sent[0], "once")
    assert _resume(harness, turn)["status"] == "done"
    assert _results(harness, turn) == ["once"]


def test_a_task_of_a_removed_tool_is_still_waited_for(harness: Harness, broker: Broker) -> None:
    """If a tool is removed after its task was sent, the task's result still reaches the model."""
    turn = _waiting(harness)
    harness.equip(look)
    _ends(harness, broker.sent[0])
    _resume(harness, turn)
    assert _results(harness, turn) == ["made"]


def test_refusing_the_call_of_a_removed_tool_repeats_no_unsafe_call(harness: Harness) -> None:
    """If the worker dies in an approved unsafe call, refusing the other call must not start the unsafe one again."""
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
    with harness.crashing("before", "turns.step", nth=1):
        harness.run(UUID(turn["session_id"]))
    harness.move(harness.settings.turn.lease_s * 3)
    assert _resume(harness, turn)["status"] == "done"
    assert ran == [1]


def test_sleep_until_waits_for_its_moment(harness: Harness, broker: Broker) -> None:
    """The turn waits without a worker. The sweeper wakes it at the given time."""
    moment = _moment(harness, 7_200)
    turn = _waiting(harness, ("sleep_until", {"moment": moment}))
    waiting = turn["waiting_for"]
    assert (waiting["kind"], waiting["name"]) == ("timer", "sleep_until")
    harness.move(7_000)
    assert _sessions_swept(harness) == []
    assert isinstance(harness.run(UUID(turn["session_id"])), NotNeeded)
    harness.move(201)
    assert _sessions_swept(harness) == [UUID(turn["session_id"])]
    done = _resume(harness, turn)
    assert (done["status"], done["attempts"]) == ("done", 1)
    assert _results(harness, turn)[0].startswith("The time has come")


@pytest.mark.parametrize(
    ("moment", "why"),
    [
        ("tomorrow", "is not a date and time"),
        ("2001-01-01T00:00:00Z", "is past"),
        ("2999-01-01T00:00:00Z", "ahead"),
        ("9999-12-31T23:59:59-23:59", "ahead"),
        ("0001-01-01T00:00:00+23:59", ""),
        ("9" * 5_000, "is not a date and time"),
    ],
)
def test_a_moment_that_cannot_be_waited_for_is_refused(harness: Harness, broker: Broker, moment: str, why: str) -> None:
    """The model reads why the time was refused."""
    harness.script(calls(("sleep_until", {"moment": moment})), says("done"))
    turn = harness.ask()
    assert turn["status"] == "done"
    assert why in _results(harness, turn)[0]


def _moment(harness: Harness, seconds: float) -> str:
    return (harness.clock.now() + timedelta(seconds=seconds)).isoformat()


def _sessions_swept(harness: Harness) -> list[UUID]:
    harness.waker.sessions.clear()
    sweep_again(harness)
    return list(harness.waker.sessions)


def sweep_again(harness: Harness) -> None:
    """Run the sweeper's next round, one interval later."""
    harness.move(harness.settings.turn.sweep_s + 1)
    assert sweep(harness.runtime) is not None


def test_hooks_guard_a_task_as_they_guard_a_tool(harness: Harness, broker: Broker) -> None:
    """A hook that rejects the call prevents the task. A hook that rejects the result hides it from the model."""

    def no_charges(call: ToolCalling) -> None:
        if call.tool == "charge":
            raise GuardRejected("No charges today.")

    def no_secrets(call: ToolCalled) -> None:
        if "secret" in call.result:
            raise GuardRejected("The result is withheld.")

    harness.equip(export, charge, before_tool=[required(no_charges)], after_tool=[required(no_secrets)])
    turn = _waiting(harness, ("charge", {}), ("reports_export", {}), ("reports_export", {}))
    assert [each.task for each in broker.sent] == ["reports.export"] * 2
    _ends(harness, broker.sent[0], "a secret")
    _ends(harness, broker.sent[1], "harmless")
    _resume(harness, turn)
    assert _results(harness, turn) == ["Error: No charges today.", "Error: The result is withheld.", "harmless"]


def test_a_hook_guards_a_task_that_is_sent_after_a_crash(harness: Harness, broker: Broker) -> None:
    """If the worker dies before the hook, the next worker runs the hook once, then sends the task."""
    seen: list[UUID] = []
    harness.equip(export, before_tool=[required(lambda call: seen.append(call.effect_id))])
    harness.script(calls(("reports_export", {})), says("done"))
    accepted = harness.send()
    with harness.crashing("after", "turns.step", nth=1):
        harness.run(accepted.session_id)
    assert (seen, broker.sent) == ([], [])
    harness.move(harness.settings.turn.lease_s + 1)
    harness.run(accepted.session_id)
    assert seen == [each.task_id for each in broker.sent]
    assert len(seen) == 1


def _many(harness: Harness, count: int, *, effect: str = "idempotent") -> dict[str, Any]:
    """A turn that waits for a call with a list of arguments. At most two of its tasks run at a time."""
    harness.equip(celery_tool("reports.export", effect=effect, timeout_s=TIMEOUT_S, name="many", max_parallel=2))
    return _waiting(harness, ("many", {"calls": [{"n": number} for number in range(count)]}))


def _part_ends(harness: Harness, task: TaskCall, value: Any = "made", *, failed: bool = False) -> None:
    finish(harness.runtime, task.effect_id, TaskEnded(failed=failed, value=value), task.part)


def test_a_list_of_arguments_fans_out_and_its_results_keep_the_order(harness: Harness, broker: Broker) -> None:
    """At most two tasks are pending. Each result causes the next task to be sent. A repeated result is ignored."""
    turn = _many(harness, 5)
    assert [each.arguments for each in broker.sent] == [{"n": 0}, {"n": 1}]
    assert len({each.task_id for each in broker.sent}) == 2
    _part_ends(harness, broker.sent[1], "one")
    _part_ends(harness, broker.sent[1], "again")
    assert [each.part for each in broker.sent] == [0, 1, 2]
    waiting = harness.turn(UUID(turn["turn_id"]))["waiting_for"]
    assert waiting["progress"] == "1 of 5 done"
    harness.waker.sessions.clear()
    for number in (2, 0, 3, 4):
        assert harness.waker.sessions == []
        task = next(each for each in broker.sent if each.part == number)
        _part_ends(harness, task, f"result {number}", failed=number == 3)
    assert harness.waker.sessions == [UUID(turn["session_id"])]
    assert _resume(harness, turn)["attempts"] == 1
    [result] = _results(harness, turn)
    assert json.loads(result) == [
        {"result": "result 0"}, {"result": "one"}, {"result": "result 2"}, {"error": "result 3"},
        {"result": "result 4"},
    ]  # fmt: skip


def test_results_of_a_list_that_arrive_at_once_are_all_kept(harness: Harness, broker: Broker) -> None:
    """Recording a result locks the session before it reads the other parts, so that no result is overwritten."""
    turn = _many(harness, 2)
    side_by_side(*(partial(_part_ends, harness, each) for each in broker.sent))
    _resume(harness, turn)
    assert json.loads(_results(harness, turn)[0]) == [{"result": "made"}] * 2


@pytest.mark.parametrize(("effect", "sent_again"), [("idempotent", 2), ("unsafe", 0)])
@pytest.mark.parametrize("commit", ["turns.note_parts", "turns.note_sent"])
def test_a_crash_while_a_list_is_sent(
    harness: Harness, broker: Broker, effect: str, sent_again: int, commit: str
) -> None:
    """After a crash, a part with the status `taken` is sent again only if the tool is idempotent."""
    harness.equip(celery_tool("reports.export", effect=effect, timeout_s=TIMEOUT_S, name="many", max_parallel=2))
    harness.script(calls(("many", {"calls": [{"n": number} for number in range(3)]})), says("done"))
    accepted = harness.send()
    with harness.crashing("before", commit):
        harness.run(accepted.session_id)
    assert len(broker.sent) == 2
    harness.move(harness.settings.turn.lease_s + 1)
    harness.run(accepted.session_id)
    sweep_again(harness)
    assert len(broker.sent) == 2 + (sent_again if commit == "turns.note_parts" else 0)
    for task in broker.sent[:2]:
        _part_ends(harness, task)
    _part_ends(harness, broker.sent[-1])
    turn = _resume(harness, harness.turn(accepted.turn_id))
    assert (turn["status"], len({each.task_id for each in broker.sent})) == ("done", 3)
    assert json.loads(_results(harness, turn)[0]) == [{"result": "made"}] * 3


def test_a_list_that_is_not_done_in_time_keeps_its_finished_results(harness: Harness, broker: Broker) -> None:
    """At the time limit, finished parts keep their results. The unfinished tasks are revoked."""
    turn = _many(harness, 4)
    first, second = broker.sent
    _part_ends(harness, first, "first")
    harness.move(TIMEOUT_S + 1)
    _resume(harness, turn)
    shown = json.loads(_results(harness, turn)[0])
    assert [next(iter(each)) for each in shown] == ["result", "unknown", "unknown", "error"]
    sweep_again(harness)
    assert broker.revoked == [second.task_id, broker.sent[2].task_id]


def test_the_parts_of_a_list_are_polled_once_more_at_the_time_limit(harness: Harness, broker: Broker) -> None:
    """If a part's callback was lost, the poll at the time limit still finds its result."""
    turn = _many(harness, 2)
    first, second = broker.sent
    harness.move(TIMEOUT_S + 1)
    broker.states[second.task_id] = TaskEnded(failed=False, value="just in time")
    _resume(harness, turn)
    shown = json.loads(_results(harness, turn)[0])
    assert [next(iter(each)) for each in shown] == ["unknown", "result"]
    assert shown[1]["result"] == "just in time"
    sweep_again(harness)
    assert broker.revoked == [first.task_id, second.task_id]


def test_a_result_found_at_the_time_limit_is_cut_to_the_tools_limit(harness: Harness, broker: Broker) -> None:
    """A result found at the time limit obeys `max_result_chars` like one that arrives in time."""
    harness.equip(celery_tool("reports.export", timeout_s=TIMEOUT_S, name="short", max_result_chars=40))
    turn = _waiting(harness, ("short", {}))
    harness.move(TIMEOUT_S + 1)
    broker.states[broker.sent[0].task_id] = TaskEnded(failed=False, value="x" * 5_000)
    _resume(harness, turn)
    assert len(_results(harness, turn)[0]) < 200


def test_a_revocation_waits_for_the_broker(harness: Harness, broker: Broker) -> None:
    """If the turn is cancelled during a broker outage, its task is revoked after the outage."""
    turn = _waiting(harness)
    cancel(harness.runtime, UUID(turn["turn_id"]))
    broker.outcome = Sent.NO
    sweep_again(harness)
    assert broker.revoked == []
    broker.outcome = Sent.YES
    for _ in range(2):
        sweep_again(harness)
    assert broker.revoked == [broker.sent[0].task_id]


def test_a_part_that_may_run_stays_in_doubt(harness: Harness, broker: Broker) -> None:
    """If a part's first send is uncertain and its second send fails, the part may run, so its result is polled."""
    harness.equip(celery_tool("reports.export", effect="idempotent", timeout_s=TIMEOUT_S, name="many", max_parallel=1))
    broker.outcome = Sent.MAYBE
    harness.script(calls(("many", {"calls": [{"n": n} for n in range(2)]})), says("done"))
    turn = harness.ask()
    broker.outcome = Sent.NO
    sweep_again(harness)
    broker.outcome = Sent.YES
    broker.states[broker.sent[0].task_id] = TaskEnded(failed=False, value="it ran")
    harness.move(TIMEOUT_S + 1)
    _resume(harness, turn)
    shown = json.loads(_results(harness, turn)[0])
    assert shown == [{"result": "it ran"}, {"error": "this part was not run."}]


def test_cancelling_a_list_revokes_its_tasks(harness: Harness, broker: Broker) -> None:
    """The sent tasks are revoked. A late result does not cause a further task to be sent."""
    turn = _many(harness, 4)
    cancel(harness.runtime, UUID(turn["turn_id"]))
    sweep_again(harness)
    assert broker.revoked == [each.task_id for each in broker.sent]
    _part_ends(harness, broker.sent[0])
    assert len(broker.sent) == 2


@pytest.mark.parametrize("given", [{}, {"calls": []}, {"calls": [1]}, {"calls": [{}] * 101}, {"n": 1}])
def test_a_malformed_list_is_rejected(harness: Harness, broker: Broker, given: dict[str, Any]) -> None:
    """The model reads the error, and no task is sent."""
    harness.equip(celery_tool("reports.export", name="many", max_parallel=2))
    harness.script(calls(("many", given)), says("done"))
    assert "refused" in _results(harness, harness.ask())[0]
    assert broker.sent == []


def test_a_lost_wake_up_is_published_again(harness: Harness, broker: Broker) -> None:
    """If the broker is unavailable when the result arrives, the sweeper wakes the turn in its next round."""
    turn = _waiting(harness)
    harness.waker.away = True
    _ends(harness, broker.sent[0])
    harness.waker.away = False
    assert _sessions_swept(harness) == [UUID(turn["session_id"])]
    assert _resume(harness, turn)["attempts"] == 1


def test_a_message_that_interrupts_ends_the_wait(harness: Harness, broker: Broker) -> None:
    """The accepting transaction cancels the turn. Its task is revoked. Then the message's own turn runs."""
    turn = _waiting(harness)
    harness.script(says("at your service"))
    sent = harness.send("never mind", on_busy="interrupt")
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "cancelled"
    sweep_again(harness)
    assert broker.revoked == [broker.sent[0].task_id]
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"


def test_later_messages_of_the_session_wait_for_the_turn(harness: Harness, broker: Broker) -> None:
    """A wake-up for a later message starts no turn. The messages are run in the order accepted."""
    turn = _waiting(harness)
    second = harness.send("and another")
    assert isinstance(harness.run(second.session_id), NotNeeded)
    _ends(harness, broker.sent[0])
    _resume(harness, turn)
    assert [harness.turn(each)["status"] for each in (UUID(turn["turn_id"]), second.turn_id)] == ["done", "done"]


def test_a_breaker_that_closes_does_not_wake_a_turn_that_waits_for_a_task(harness: Harness, broker: Broker) -> None:
    """A closing breaker wakes only turns that wait for a model."""
    _waiting(harness)
    assert harness.database.run(RECALL, {}) == []


def test_the_user_is_shown_what_the_turn_waits_for(harness: Harness, broker: Broker) -> None:
    """The message to the user names the tool. It is sent once per wait."""
    turn = _waiting(harness)
    delays = Delays(harness.database, UUID(turn["turn_id"]))
    message = delays.look()
    assert message is not None
    assert "reports_export" in message
    assert delays.look() is None
    _ends(harness, broker.sent[0])
    _resume(harness, turn)
    assert Delays(harness.database, UUID(turn["turn_id"])).look() is None
