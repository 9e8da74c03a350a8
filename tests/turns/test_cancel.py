"""Cancelling a turn, wherever it stands; and a reply or a cancellation, never both."""

from __future__ import annotations

import threading
from uuid import UUID, uuid4

import pytest

from perdure import tool
from perdure.errors import NotFound
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.turns.calls.results import UNKNOWN_OUTCOME
from perdure.turns.cancel import cancel
from perdure.turns.run.runner import Ran, Runner
from tests.turns.scripted import calls, says
from tests.turns.stage import PATIENCE_S, Stage, side_by_side


@tool(effect="pure")
def double(number: int) -> int:
    """Double it."""
    return number * 2


def _assert_cancelled(stage: Stage, turn_id: UUID) -> None:
    turn = stage.turn(turn_id)
    assert (turn["status"], turn["reply"]) == ("cancelled", None)
    assert turn["error"]["code"] == "TURN_CANCELLED"
    assert turn["settled_at"] is not None


def test_a_turn_that_has_not_begun_is_cancelled_at_once(stage: Stage) -> None:
    """No worker is needed for it, and its text never enters the transcript."""
    stage.send("first")
    sent = stage.send("second", reply_to={"url": "https://a.example"})
    cancel(stage.runtime, sent.turn_id)
    _assert_cancelled(stage, sent.turn_id)
    assert len(stage.waker.deliveries) == 1
    assert stage.run(sent.session_id) == Ran(1)
    assert ("user", "second") not in stage.lines(sent.session_id)
    assert stage.ask("third")["seq"] == 3


def test_between_steps(stage: Stage) -> None:
    """Asked for while a tool runs: its result is kept, the model is not asked again."""
    sent_id: list[UUID] = []

    @tool
    def act() -> str:
        """Act, and have the turn cancelled meanwhile."""
        cancel(stage.runtime, sent_id[0])
        return "acted"

    stage.equip(act)
    stage.script(calls(("act", {})), says("never"))
    sent = stage.send()
    sent_id.append(sent.turn_id)
    stage.run(sent.session_id)
    _assert_cancelled(stage, sent.turn_id)
    assert len(stage.model.requests) == 1
    assert stage.lines(sent.session_id)[-1] == ("tool", "acted")
    stage.script(says("on we go"))
    assert stage.ask("next")["reply"]["text"] == "on we go"


def test_before_its_tools_begin(stage: Stage) -> None:
    """Asked for between the intents and the calls: none is begun, all are closed."""
    ran: list[int] = []

    @tool
    def act() -> str:
        """Act."""
        ran.append(1)
        return "acted"

    stage.equip(act)
    stage.script(calls(("act", {}), ("act", {})))
    sent = stage.send()

    def during_the_commit(moment: str, name: str) -> None:
        if (moment, name) == ("before", "turns.step"):
            cancel(stage.runtime, sent.turn_id)

    with stage.hooked(during_the_commit):
        stage.run(sent.session_id)
    _assert_cancelled(stage, sent.turn_id)
    assert ran == []
    assert [content for role, content in stage.lines(sent.session_id) if role == "tool"] == [UNKNOWN_OUTCOME] * 2


def test_a_parked_turn(stage: Stage) -> None:
    """Nobody runs it: a worker is woken, which claims it and settles it as cancelled."""
    sent = stage.send()
    runner = Runner(stage.runtime, "draining")
    runner.keeper.drain()
    runner.run(sent.session_id)
    stage.waker.sessions.clear()
    cancel(stage.runtime, sent.turn_id)
    assert stage.waker.sessions == [sent.session_id]
    assert stage.run(sent.session_id) == Ran(1)
    _assert_cancelled(stage, sent.turn_id)
    assert stage.model.requests == []


def test_a_turn_whose_runner_died_in_its_tool_calls(stage: Stage) -> None:
    """Whoever claims it next runs nothing again and closes what is open."""
    stage.equip(double)
    stage.script(calls(("double", {"number": 1})))
    sent = stage.send()
    with stage.crashing("after", "turns.step"):
        stage.run(sent.session_id)
    cancel(stage.runtime, sent.turn_id)
    stage.move(31)
    assert stage.run(sent.session_id) == Ran(1)
    _assert_cancelled(stage, sent.turn_id)
    assert stage.lines(sent.session_id)[-1] == ("tool", UNKNOWN_OUTCOME)


def test_a_settled_turn_stays_as_it_is(stage: Stage) -> None:
    """There is nothing left to cancel, and nobody is woken for it."""
    sent = stage.send()
    stage.run(sent.session_id)
    before = stage.turn(sent.turn_id)
    stage.waker.sessions.clear()
    cancel(stage.runtime, sent.turn_id)
    assert stage.turn(sent.turn_id) == before
    assert stage.waker.sessions == []


def test_cancelling_twice_is_cancelling_once(stage: Stage) -> None:
    """The counters of the session move once."""
    sent = stage.send()
    cancel(stage.runtime, sent.turn_id)
    cancel(stage.runtime, sent.turn_id)
    row = stage.session(sent.session_id)
    assert (row.unsettled, row.turn_count) == (0, 1)


def test_an_unknown_turn(stage: Stage) -> None:
    """Cancelling what does not exist is said, not swallowed."""
    with pytest.raises(NotFound):
        cancel(stage.runtime, uuid4())


def test_a_cancel_beside_a_settle_gives_one_of_the_two(stage: Stage) -> None:
    """Done with its reply, or cancelled without: both lock the session, so one of them is first."""
    seen = set()
    for number in range(25):
        gate = threading.Event()

        def wait(request: ModelRequest, call: ModelCall, gate: threading.Event = gate) -> ModelReply:
            gate.set()
            return says("the reply")

        stage.script(wait)
        sent = stage.send(str(number), reply_to={"url": "https://a.example"})

        def call_off(turn_id: UUID = sent.turn_id, gate: threading.Event = gate) -> None:
            assert gate.wait(PATIENCE_S)
            cancel(stage.runtime, turn_id)

        found = side_by_side(call_off, lambda session_id=sent.session_id: stage.run(session_id))  # type: ignore[misc]
        assert not any(isinstance(each, Exception) for each in found)
        turn = stage.turn(sent.turn_id)
        seen.add(turn["status"])
        assert (turn["status"], turn["reply"] is not None, turn["error"] is None) in {
            ("done", True, True), ("cancelled", False, False),
        }  # fmt: skip
        assert stage.counts()["deliveries"] == number + 1, "one delivery, whichever it was"
    assert seen <= {"done", "cancelled"}


def test_a_reply_in_the_commit_that_meets_the_cancel_wins(stage: Stage) -> None:
    """The request came while the reply was being committed: what is said is said."""
    stage.script(says("the reply"))
    sent = stage.send()

    def during_the_commit(moment: str, name: str) -> None:
        if (moment, name) == ("before", "turns.settle"):
            cancel(stage.runtime, sent.turn_id)

    with stage.hooked(during_the_commit):
        stage.run(sent.session_id)
    assert stage.turn(sent.turn_id)["status"] == "done"
    assert stage.turn(sent.turn_id)["reply"]["text"] == "the reply"


def test_the_turn_behind_a_cancelled_one_runs(stage: Stage) -> None:
    """The runner that stops the one goes on with the other, unstopped."""
    first, second = stage.send("first"), stage.send("second")

    def called_off(request: ModelRequest, call: ModelCall) -> ModelReply:
        cancel(stage.runtime, first.turn_id)
        runner.keeper.beat()
        call.check()
        raise AssertionError("the call was aborted")

    stage.script(called_off, says("for the second"))
    runner = Runner(stage.runtime, "one")
    assert runner.run(first.session_id) == Ran(2)
    _assert_cancelled(stage, first.turn_id)
    assert stage.turn(second.turn_id)["reply"]["text"] == "for the second"
