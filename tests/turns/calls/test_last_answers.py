"""Tests of results and answers that arrive while a worker ends a cancelled or failed turn that waits for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from perdure import Agent, Allow, TurnContext, Verdict, ask_user, external_tool
from perdure.agents import Agents
from perdure.database.engine import Moment, Statement
from perdure.database.fencing import Fence
from perdure.errors import Conflict
from perdure.ids import new_id
from perdure.turns.calls.outside import answer, parse_result
from perdure.turns.calls.queries import CLOSE_CALLS
from perdure.turns.calls.result_values import UNANSWERED, UNUSED
from perdure.turns.outcome import CANCELLED, Cancelled
from perdure.turns.queries import CANCEL
from perdure.turns.run.loop import Runner
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls

End = Callable[[Harness, UUID], None]

scan = external_tool("scan", "Scan a code.", {"type": "object"})
which = ask_user(name="which")

_MOST = 20
"""More statements than a worker runs to end such a turn."""


def _allow(_text: str, _turn: TurnContext) -> Verdict:
    return Allow()


def _cancelled(harness: Harness, turn_id: UUID) -> None:
    """A worker claims the session between the two commits with which a waiting turn is cancelled."""
    given = {"turn_id": turn_id, "message": CANCELLED, "delivery_id": new_id(harness.clock)}
    harness.database.run(CANCEL, given)


def _out_of_time(harness: Harness, turn_id: UUID) -> None:
    """The turn was parked shortly before its time limit, and is claimed after it."""
    harness.sql(
        "UPDATE sessions SET spent_s = 6, not_before = perdure_now()"
        " WHERE session_id = (SELECT session_id FROM turns WHERE turn_id = %(id)s)",
        id=turn_id,
    )


def _bring(harness: Harness, turn_id: UUID) -> bool:
    try:
        answer(harness.runtime, turn_id, parse_result({"call_id": "call_0", "result": "4006381"}))
    except Conflict:
        return False
    return True


def _say(harness: Harness, turn_id: UUID) -> bool:
    conversation = harness.sql(
        "SELECT scope FROM sessions JOIN turns USING (session_id) WHERE turn_id = %(id)s", id=turn_id
    )
    return harness.send("4006381", conversation=conversation[0].scope.removeprefix("/")).turn_id == turn_id


@pytest.mark.parametrize(
    ("tool", "arrive"), [(scan, _bring), (which, _bring), (which, _say)], ids=["result", "value", "message"]
)
@pytest.mark.parametrize("end", [_cancelled, _out_of_time])
def test_what_arrives_while_a_worker_ends_the_turn(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, tool: Any, arrive: Callable[[Harness, UUID], bool], end: End
) -> None:
    """It is in the transcript, or is not taken as the turn's, whichever statement of the worker it precedes."""
    harness.equip(tool, timeout_s=5)
    run = harness.database.run
    before: list[str] = []
    accepted: list[bool] = []

    def running(statement: Statement, *values: Any, **options: Any) -> Any:
        before.append(statement.name)
        if len(before) == nth:
            with monkeypatch.context() as restored:
                restored.setattr(harness.database, "run", run)
                accepted.append(arrive(harness, UUID(turn["turn_id"])))
        return run(statement, *values, **options)

    for nth in range(1, _MOST):
        harness.script(calls((tool.name, {"question": "Which?"} if tool is which else {})))
        turn = harness.ask(conversation=f"{nth}")
        end(harness, UUID(turn["turn_id"]))
        before.clear()
        with monkeypatch.context() as patched:
            patched.setattr(harness.database, "run", running)
            harness.run(UUID(turn["session_id"]))
        said = [text for text in harness.results(turn) if "4006381" in text]
        assert harness.turn(UUID(turn["turn_id"]))["status"] in {"cancelled", "failed"}
        assert bool(said) == accepted.pop(), before
        if before[nth - 1] == "turns.settle":
            return
    raise AssertionError(f"no worker settled the turn: {before}")


@pytest.mark.parametrize("end", [_cancelled, _out_of_time])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_when_the_calls_are_closed(harness: Harness, moment: Moment, end: End) -> None:
    """The successor settles the turn, and a result is refused once the calls are closed."""
    harness.equip(scan, timeout_s=5)
    harness.script(calls(("scan", {})))
    turn = harness.ask()
    end(harness, UUID(turn["turn_id"]))
    with harness.crashing(moment, "turns.close_calls"):
        harness.resume(turn)
    assert _bring(harness, UUID(turn["turn_id"])) == (moment == "before")
    harness.move(31)
    assert harness.resume(turn)["settled_at"] is not None
    assert harness.results(turn) == ["4006381" if moment == "before" else UNANSWERED]


def test_a_result_races_with_the_end_of_its_turn(harness: Harness) -> None:
    """Of both transactions, the one that locks the session's row first decides what the transcript has."""
    harness.equip(scan, timeout_s=5)
    for number in range(6):
        harness.script(calls(("scan", {})))
        turn = harness.ask(conversation=f"{number}")
        turn_id, session_id = UUID(turn["turn_id"]), UUID(turn["session_id"])
        _cancelled(harness, turn_id)
        is_accepted, _ = side_by_side(partial(_bring, harness, turn_id), partial(harness.run, session_id))
        harness.run(session_id)
        assert harness.results(turn) == ["4006381" if is_accepted else UNANSWERED]


def test_a_worker_that_lost_its_lease_closes_no_calls(harness: Harness) -> None:
    """The worker that has the session now waits for them."""
    harness.equip(scan)
    harness.script(calls(("scan", {})))
    turn = harness.ask()
    given = Fence(0, UUID(int=0)).on(UUID(turn["session_id"]))
    harness.database.run(CLOSE_CALLS, {**given, "turn_id": turn["turn_id"]})
    assert _bring(harness, UUID(turn["turn_id"]))
    harness.resume(turn)
    assert harness.results(turn) == ["4006381"]


def test_an_answer_that_no_guard_has_judged_is_not_quoted(harness: Harness) -> None:
    """The turn ended before the agent's guards could read it."""
    harness.agents = Agents([Agent("assistant", "You help.", [which], input_guards=[_allow])])
    harness.script(calls(("which", {"question": "Which?"})))
    turn = harness.ask()
    assert harness.send("4006381", message_id="answer").turn_id == UUID(turn["turn_id"])
    _cancelled(harness, UUID(turn["turn_id"]))
    assert harness.resume(turn)["status"] == "cancelled"
    assert harness.results(turn) == [UNUSED]


def test_a_turn_that_is_settled_unread_takes_no_result(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a turn whose process was killed: its rows are not parsed."""
    harness.equip(scan)
    harness.script(calls(("scan", {})))
    turn = harness.ask()
    turn_id, session_id = UUID(turn["turn_id"]), UUID(turn["session_id"])
    _cancelled(harness, turn_id)
    run, refused = harness.database.run, []

    def running(statement: Statement, *values: Any, **options: Any) -> Any:
        if statement.name == "turns.settle":
            refused.append(not _bring(harness, turn_id))
        return run(statement, *values, **options)

    monkeypatch.setattr(harness.database, "run", running)
    assert Runner(harness.runtime, "harness").settle_unrun(session_id, turn_id, Cancelled())
    assert (refused, harness.turn(turn_id)["status"]) == ([True], "cancelled")
