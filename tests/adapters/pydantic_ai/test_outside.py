"""Calls that someone outside runs, for perdure's own agents and for those of pydantic-ai.

The turn waits without a worker, the first result counts, and a crash at any commit neither loses a result nor runs
anything twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from uuid import UUID

import pytest

from perdure.access.tenants import UserKey
from perdure.database.engine import Statement
from perdure.errors import Conflict, InvalidRequest, NotFound
from perdure.sessions.ending import request_end
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.calls.outside import answer, parse_result
from perdure.turns.calls.result_values import UNANSWERED, UNKNOWN_OUTCOME
from perdure.turns.cancel import cancel
from perdure.turns.lease.claim import NotNeeded
from perdure.turns.sweep import sweep
from tests.adapters.pydantic_ai.conftest import DEFERRING, KINDS, Bench, Tool
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls, says

SCAN = Tool("scan", outside=True)


@pytest.fixture(params=[*KINDS, DEFERRING])
def kind(request: pytest.FixtureRequest) -> str:
    """Of which library the agent is, and how its tools say that they run outside."""
    return str(request.param)


def _ask(harness: Harness, bench: Bench, *wanted: tuple[str, dict[str, Any]], tools: tuple[Tool, ...] = ()) -> Any:
    """Run a turn until it waits."""
    bench.equip(SCAN, *tools)
    harness.script(calls(*(wanted or (("scan", {"amount": 1}),))), says("done"))
    return harness.ask()


def _bring(harness: Harness, turn: dict[str, Any], result: Any = "4006381", call_id: str = "call_0") -> None:
    answer(harness.runtime, UUID(turn["turn_id"]), parse_result({"call_id": call_id, "result": result}))


def _statuses(harness: Harness) -> list[str]:
    return [row.status for row in harness.sql("SELECT status FROM tool_effects ORDER BY message_seq, position")]


@pytest.mark.long
def test_the_turn_waits_without_a_worker_and_the_result_resumes_it(harness: Harness, bench: Bench) -> None:
    """The turn says what it waits for, holds no lease, and goes on with the result; each run is a new worker."""
    turn = _ask(harness, bench)
    assert (turn["status"], turn["waiting_for"]["kind"], turn["waiting_for"]["name"]) == ("parked", "client", "scan")
    [pending] = turn["pending_calls"]
    assert (pending["call_id"], pending["tool"], pending["arguments"]) == ("call_0", "scan", {"amount": 1})
    assert pending["metadata"] == ({"amount": 1} if bench.kind == DEFERRING else None)
    row = harness.session(UUID(turn["session_id"]))
    assert (row.state, row.lease_until, row.strikes) == ("active", None, 0)
    assert isinstance(harness.run(row.session_id), NotNeeded)
    harness.move(harness.settings.turn.sweep_s * 100)
    swept = sweep(harness.runtime)
    assert swept is not None
    assert swept.sessions == 0
    harness.waker.sessions.clear()
    _bring(harness, turn, {"code": 7})
    assert harness.waker.sessions == [row.session_id]
    done = harness.resume(turn)
    assert (done["status"], done["attempts"], done["waiting_for"], done["pending_calls"]) == ("done", 1, None, [])
    assert (harness.results(), _statuses(harness)) == (['{"code": 7}'], ["done"])
    assert bench.counts == ({"scan": 1} if bench.kind == DEFERRING else {})


def test_the_first_result_counts(harness: Harness, bench: Bench) -> None:
    """A repeated result is no error and changes nothing, before and after the turn is settled."""
    turn = _ask(harness, bench)
    side_by_side(partial(_bring, harness, turn, "one"), partial(_bring, harness, turn, "one"))
    _bring(harness, turn, "two")
    assert harness.resume(turn)["status"] == "done"
    _bring(harness, turn, "three")
    assert harness.results() == ["one"]


def test_an_error_is_the_calls_failure(harness: Harness, bench: Bench) -> None:
    """The model reads the error."""
    turn = _ask(harness, bench)
    answer(harness.runtime, UUID(turn["turn_id"]), parse_result({"call_id": "call_0", "error": "No camera."}))
    assert harness.resume(turn)["status"] == "done"
    assert harness.results() == ["Error: No camera." if bench.kind == "native" else '{"error":"No camera."}']
    assert _statuses(harness) == ["failed"]


def test_a_call_that_is_not_run_outside_takes_no_result(harness: Harness, bench: Bench) -> None:
    """An unknown call, an ordinary one and a body with both or neither of result and error are refused."""
    turn = _ask(harness, bench, ("look", {}), ("scan", {}), tools=(Tool("look", "pure"),))
    turn_id = UUID(turn["turn_id"])
    with pytest.raises(Conflict):
        answer(harness.runtime, turn_id, parse_result({"call_id": "call_0", "result": 1}))
    with pytest.raises(NotFound):
        answer(harness.runtime, turn_id, parse_result({"call_id": "call_9", "result": 1}))
    for given in ({}, {"result": 1, "error": "no"}, {"error": ""}):
        with pytest.raises(InvalidRequest):
            parse_result({"call_id": "call_1", **given})


def test_results_enter_the_transcript_together(harness: Harness, bench: Bench) -> None:
    """The other call of the reply runs once; the last result wakes the turn."""
    turn = _ask(harness, bench, ("scan", {}), ("look", {"amount": 2}), ("scan", {}), tools=(Tool("look"),))
    assert [each["call_id"] for each in turn["pending_calls"]] == ["call_0", "call_2"]
    harness.waker.sessions.clear()
    _bring(harness, turn, "second", "call_2")
    assert (harness.waker.sessions, harness.results()) == ([], [])
    _bring(harness, turn, "first", "call_0")
    assert harness.waker.sessions == [UUID(turn["session_id"])]
    assert harness.resume(turn)["status"] == "done"
    assert (harness.results(), bench.counts["look"]) == (["first", "look 2", "second"], 1)


def test_an_approval_and_a_result_of_one_reply(harness: Harness, bench: Bench) -> None:
    """Both are waited for, whichever comes first."""
    turn = _ask(harness, bench, ("scan", {}), ("pay", {"amount": 3}), tools=(Tool("pay", requires_approval=True),))
    assert turn["status"] == "waiting_approval"
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": "call_1", "decision": "approve"}))
    turn = harness.resume(turn)
    assert (turn["status"], [each["call_id"] for each in turn["pending_calls"]]) == ("parked", ["call_0"])
    _bring(harness, turn, "scanned")
    assert harness.resume(turn)["status"] == "done"
    assert (harness.results(), bench.counts["pay"]) == (["scanned", "pay 3"], 1)


@pytest.mark.parametrize("kind", [kind for kind in (*KINDS, DEFERRING) if kind != "adapted"])
def test_a_call_outside_may_need_approval(harness: Harness, bench: Bench) -> None:
    """The call waits for the decision, then for its result. The tools of an `ExternalToolset` need no approval."""
    bench.equip(Tool("scan", outside=True, requires_approval=True))
    harness.script(calls(("scan", {})), says("done"))
    turn = harness.ask()
    assert (turn["status"], turn["pending_calls"]) == ("waiting_approval", [])
    with pytest.raises(Conflict):
        _bring(harness, turn)
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": "call_0", "decision": "approve"}))
    turn = harness.resume(turn)
    assert (turn["status"], turn["waiting_for"]["kind"]) == ("parked", "client")
    _bring(harness, turn, "scanned")
    assert harness.resume(turn)["status"] == "done"
    assert harness.results() == ["scanned"]
    assert bench.counts.get("scan", 0) <= 1


def test_a_result_that_does_not_come_in_time(harness: Harness, bench: Bench) -> None:
    """The model is told that the outcome is unknown; a late result is refused."""
    turn = _ask(harness, bench)
    harness.move(harness.settings.approval.expires_s + 1)
    done = harness.resume(turn)
    assert (done["status"], done["attempts"]) == ("done", 1)
    assert (harness.results(), _statuses(harness)) == ([UNANSWERED], ["unknown"])
    with pytest.raises(Conflict):
        _bring(harness, turn)


def _late(harness: Harness, turn: dict[str, Any]) -> None:
    del turn
    harness.move(harness.settings.approval.expires_s + 1)


def _over(harness: Harness, turn: dict[str, Any]) -> None:
    request_end(harness.database, UUID(turn["session_id"]), "test")


@pytest.mark.parametrize("ends", [_late, _over])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("error", [None, "No camera."])
def test_a_result_that_is_accepted_while_a_worker_ends_the_wait(
    harness: Harness,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ends: Callable[[Harness, dict[str, Any]], None],
    nth: int,
    error: str | None,
) -> None:
    """Each result is either accepted and read by the model, or refused: before, between and after the worker's reads.

    `nth` numbers the moments: the reads of the rows of the calls, and the commits.
    """
    turn = _ask(harness, bench)
    ends(harness, turn)
    seen = itertools.count(1)
    accepted: list[bool] = []
    run = harness.database.run

    def bring() -> None:
        if accepted or next(seen) != nth:
            return
        accepted.append(True)
        given = {"call_id": "call_0", **({"result": "4006381"} if error is None else {"error": error})}
        try:
            answer(harness.runtime, UUID(turn["turn_id"]), parse_result(given))
        except Conflict:
            accepted[0] = False

    def running(statement: Statement, *given: Any, **options: Any) -> Any:
        if statement.name == "turns.step":
            bring()
        rows = run(statement, *given, **options)
        if statement.name in {"turns.claim", "turns.effects_of_step", "turns.is_ending"}:
            bring()
        return rows

    monkeypatch.setattr(harness.database, "run", running)
    assert harness.resume(turn)["status"] == "done"
    text = "4006381" if error is None else "Error: No camera." if bench.kind == "native" else '{"error":"No camera."}'
    status = "done" if error is None else "failed"
    expected = (text, status) if accepted[0] else (UNANSWERED, "unknown")
    assert [*harness.results(), *_statuses(harness)] == [*expected]
    harness.check()


def test_a_wait_that_ends_while_a_result_is_brought(
    harness: Harness, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request has read that the call waits, and is refused when it records the result."""
    turn = _ask(harness, bench)
    harness.move(harness.settings.approval.expires_s + 1)
    run = harness.database.run

    def running(statement: Statement, *given: Any, **options: Any) -> Any:
        rows = run(statement, *given, **options)
        if statement.name == "turns.find_call":
            harness.resume(turn)
        return rows

    monkeypatch.setattr(harness.database, "run", running)
    with pytest.raises(Conflict):
        _bring(harness, turn)
    assert harness.results() == [UNANSWERED]


def test_cancelling_and_ending_do_not_wait(harness: Harness, bench: Bench) -> None:
    """A cancelled turn is settled at once; a session's end lets the turn go on without the result."""
    turn = _ask(harness, bench)
    cancel(harness.runtime, UUID(turn["turn_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "cancelled"
    assert harness.results() == [UNKNOWN_OUTCOME]
    with pytest.raises(Conflict):
        _bring(harness, turn)
    turn = _ask(harness, bench)
    request_end(harness.database, UUID(turn["session_id"]), "test")
    assert harness.resume(turn)["status"] == "done"
    assert harness.results()[1:] == [UNANSWERED]


def test_an_interrupting_message_closes_the_call(harness: Harness, bench: Bench) -> None:
    """The later message runs at once."""
    turn = _ask(harness, bench)
    harness.script(says("next"))
    assert harness.ask("instead", on_busy="interrupt")["reply"]["text"] == "next"
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "cancelled"


def test_erasing_a_user_ends_the_wait(harness: Harness, bench: Bench) -> None:
    """A result of an erased user's call finds no turn."""
    turn = _ask(harness, bench)
    harness.runtime.eraser.erase(UserKey("ana"))
    with pytest.raises(NotFound):
        _bring(harness, turn)
    assert harness.sql("SELECT FROM tool_effects") == []


BEFORE_THE_WAIT = {
    "native": ["turns.step", "turns.wait_calls"],
    "adapted": ["turns.step", "turns.defer_call", "turns.wait_calls"],
    DEFERRING: ["turns.step", "turns.defer_call", "turns.wait_calls"],
}
BOUNDARIES = [
    (kind, moment, name)
    for kind, names in BEFORE_THE_WAIT.items()
    for name in [*names, "turns.finish_task", "turns.claim", "turns.settle"]
    for moment in ("before", "after")
]


@pytest.mark.parametrize(("kind", "moment", "name"), BOUNDARIES, indirect=["kind"])
def test_a_crash_at_every_commit(harness: Harness, bench: Bench, moment: Literal["before", "after"], name: str) -> None:
    """The result enters the transcript once, and a tool that defers its call runs at most once."""
    bench.equip(SCAN)
    lines = [calls(("scan", {"amount": 1})), says("done")]
    harness.script(*lines)
    sent = harness.send()

    def run() -> None:
        said = harness.sql("SELECT count(*) FROM messages WHERE role = 'assistant'")[0][0]
        harness.script(*lines[said:])
        harness.run(sent.session_id)

    later = name in {"turns.finish_task", "turns.claim", "turns.settle"}
    if not later:
        with harness.crashing(moment, name):
            run()
        harness.move(31)
    run()
    turn = harness.turn(sent.turn_id)
    in_doubt = bench.kind == DEFERRING and (name, moment) in {("turns.step", "after"), ("turns.defer_call", "before")}
    if not in_doubt:
        assert turn["status"] == "parked"
        if later:
            with harness.crashing(moment, name):
                _bring(harness, turn)
                run()
            harness.move(31)
        _bring(harness, turn)
        run()
        turn = harness.turn(sent.turn_id)
    assert turn["status"] == "done", turn
    assert turn["reply"]["text"] == "done"
    assert harness.results() == [UNKNOWN_OUTCOME if in_doubt else "4006381"]
    assert bench.counts.get("scan", 0) <= 1
