"""A tool call with a list of arguments sends one task for each item, and collects the tasks' results in order.

Each task is a part of the call.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from perdure import celery_tool
from perdure.database.engine import Moment
from perdure.tools.awaited.port import TaskCall, TaskEnded, TaskSent
from perdure.tools.registry import Effect
from perdure.turns.calls.awaited import finish
from perdure.turns.cancel import cancel
from tests.turns.awaiting import (
    TIMEOUT_S,
    ask_and_wait,
    sweep_again,
)
from tests.turns.broker import Broker
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls, says


def _many(harness: Harness, count: int, *, effect: str = "idempotent") -> dict[str, Any]:
    """Run a turn until it waits for a call with `count` items. At most two tasks of the call run at a time."""
    harness.equip(
        celery_tool("reports.export", effect=Effect(effect), timeout_s=TIMEOUT_S, name="many", max_parallel=2)
    )
    return ask_and_wait(harness, ("many", {"calls": [{"n": number} for number in range(count)]}))


def _part_ends(harness: Harness, task: TaskCall, value: Any = "made", *, failed: bool = False) -> None:
    finish(harness.runtime, task.effect_id, TaskEnded(failed=failed, value=value), task.part)


def test_a_list_of_arguments_fans_out_and_its_results_keep_the_order(harness: Harness, broker: Broker) -> None:
    """At most two tasks are pending at a time. Each result causes the next send. A repeated result is ignored."""
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
    assert harness.resume(turn)["attempts"] == 1
    [result] = harness.results(turn)
    assert json.loads(result) == [
        {"result": "result 0"}, {"result": "one"}, {"result": "result 2"}, {"error": "result 3"},
        {"result": "result 4"},
    ]  # fmt: skip


def test_results_of_a_list_that_arrive_at_once_are_all_kept(harness: Harness, broker: Broker) -> None:
    """Two concurrent results are both stored: each transaction locks the session before it reads the other results."""
    turn = _many(harness, 2)
    side_by_side(*(partial(_part_ends, harness, each) for each in broker.sent))
    harness.resume(turn)
    assert json.loads(harness.results(turn)[0]) == [{"result": "made"}] * 2


@pytest.mark.parametrize(("effect", "sent_again"), [("idempotent", 2), ("unsafe", 0)])
@pytest.mark.parametrize("commit", ["turns.note_parts", "turns.note_sent"])
def test_a_crash_while_a_list_is_sent(
    harness: Harness, broker: Broker, effect: str, sent_again: int, commit: str
) -> None:
    """If it is unknown whether a task was sent, an idempotent task is sent again, and an unsafe task is not."""
    harness.equip(
        celery_tool("reports.export", effect=Effect(effect), timeout_s=TIMEOUT_S, name="many", max_parallel=2)
    )
    harness.script(calls(("many", {"calls": [{"n": number} for number in range(3)]})), says("done"))
    accepted = harness.send()
    with harness.crashing("before", commit):
        harness.run(accepted.session_id)
    assert len(broker.sent) == 2
    harness.move(harness.settings.turn.lease_s + 10)
    harness.run(accepted.session_id)
    sweep_again(harness)
    assert len(broker.sent) == 2 + (sent_again if commit == "turns.note_parts" else 0)
    for task in broker.sent[:2]:
        _part_ends(harness, task)
    _part_ends(harness, broker.sent[-1])
    turn = harness.resume(harness.turn(accepted.turn_id))
    assert (turn["status"], len({each.task_id for each in broker.sent})) == ("done", 3)
    assert json.loads(harness.results(turn)[0]) == [{"result": "made"}] * 3


def test_a_list_that_is_not_done_in_time_keeps_its_finished_results(harness: Harness, broker: Broker) -> None:
    """At the time limit, the model reads the results of the finished tasks. The unfinished tasks are revoked."""
    turn = _many(harness, 4)
    first, second = broker.sent
    _part_ends(harness, first, "first")
    harness.move(TIMEOUT_S + 1)
    harness.resume(turn)
    shown = json.loads(harness.results(turn)[0])
    assert [next(iter(each)) for each in shown] == ["result", "unknown", "unknown", "error"]
    sweep_again(harness)
    assert broker.revoked == [second.task_id, broker.sent[2].task_id]


def test_the_parts_of_a_list_are_polled_once_more_at_the_time_limit(harness: Harness, broker: Broker) -> None:
    """If no callback reported a task's result, the result is read from the result backend at the time limit."""
    turn = _many(harness, 2)
    first, second = broker.sent
    harness.move(TIMEOUT_S + 1)
    broker.states[second.task_id] = TaskEnded(failed=False, value="just in time")
    harness.resume(turn)
    shown = json.loads(harness.results(turn)[0])
    assert [next(iter(each)) for each in shown] == ["unknown", "result"]
    assert shown[1]["result"] == "just in time"
    sweep_again(harness)
    assert broker.revoked == [first.task_id, second.task_id]


@pytest.mark.parametrize("ended", [1, 2])
def test_parts_that_end_after_the_last_poll_count(
    harness: Harness, broker: Broker, monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    """Their callbacks report them before the worker has committed the result of the call."""
    turn = _many(harness, 2)
    harness.move(TIMEOUT_S + 1)

    def poll(task_id: UUID) -> None:
        if task_id == broker.sent[1].task_id:
            for task in broker.sent[:ended]:
                _part_ends(harness, task)

    monkeypatch.setattr(broker, "ask", poll)
    harness.resume(turn)
    shown = json.loads(harness.results(turn)[0])
    assert [next(iter(each)) for each in shown] == ["result"] * ended + ["unknown"] * (2 - ended)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_when_a_list_is_closed(harness: Harness, broker: Broker, moment: Moment) -> None:
    """The successor shows the results of the tasks that have ended."""
    turn = _many(harness, 2)
    _part_ends(harness, broker.sent[0])
    harness.move(TIMEOUT_S + 1)
    with harness.crashing(moment, "turns.close_call"):
        harness.resume(turn)
    harness.move(31)
    harness.resume(turn)
    assert [next(iter(each)) for each in json.loads(harness.results(turn)[0])] == ["result", "unknown"]
    sweep_again(harness)
    assert broker.revoked == [broker.sent[1].task_id]


def test_a_part_that_may_run_stays_in_doubt(harness: Harness, broker: Broker) -> None:
    """A task whose first send was uncertain may run. Its result is polled even if the second send fails."""
    harness.equip(celery_tool("reports.export", effect="idempotent", timeout_s=TIMEOUT_S, name="many", max_parallel=1))
    broker.outcome = TaskSent.MAYBE
    harness.script(calls(("many", {"calls": [{"n": n} for n in range(2)]})), says("done"))
    turn = harness.ask()
    broker.outcome = TaskSent.NO
    sweep_again(harness)
    broker.outcome = TaskSent.YES
    broker.states[broker.sent[0].task_id] = TaskEnded(failed=False, value="it ran")
    harness.move(TIMEOUT_S + 1)
    harness.resume(turn)
    shown = json.loads(harness.results(turn)[0])
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
    assert "refused" in harness.results(harness.ask())[0]
    assert broker.sent == []
