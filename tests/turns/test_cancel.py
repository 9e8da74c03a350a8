"""A turn can be cancelled at any time before it is settled. It then ends either with its reply or as cancelled."""

from __future__ import annotations

import threading
from uuid import UUID, uuid4

import pytest

from perdure import tool
from perdure.errors import NotFound
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.turns.cancel import cancel
from perdure.turns.lease.claim import Ran
from perdure.turns.run.loop import Runner
from tests.turns.harness import PATIENCE_S, Harness, side_by_side
from tests.turns.scripted import calls, says


@tool(effect="pure")
def double(number: int) -> int:
    """Double the number."""
    return number * 2


def _assert_cancelled(harness: Harness, turn_id: UUID) -> None:
    turn = harness.turn(turn_id)
    assert (turn["status"], turn["reply"]) == ("cancelled", None)
    assert turn["error"]["code"] == "TURN_CANCELLED"
    assert turn["settled_at"] is not None


def test_a_turn_that_has_not_begun_is_cancelled_at_once(harness: Harness) -> None:
    """The cancellation needs no worker, and the message's text never enters the transcript."""
    harness.send("first")
    sent = harness.send("second", reply_to={"url": "https://a.example"})
    cancel(harness.runtime, sent.turn_id)
    _assert_cancelled(harness, sent.turn_id)
    assert len(harness.waker.deliveries) == 1
    assert harness.run(sent.session_id) == Ran(1)
    assert ("user", "second") not in harness.lines(sent.session_id)
    assert harness.ask("third")["seq"] == 3


def test_cancelled_between_steps(harness: Harness) -> None:
    """A cancellation during a tool call keeps the tool's result and prevents the next model call."""
    sent_id: list[UUID] = []

    @tool
    def act() -> str:
        """Act, and cancel the turn during the call."""
        cancel(harness.runtime, sent_id[0])
        return "acted"

    harness.equip(act)
    harness.script(calls(("act", {})), says("never"))
    sent = harness.send()
    sent_id.append(sent.turn_id)
    harness.run(sent.session_id)
    _assert_cancelled(harness, sent.turn_id)
    assert len(harness.model.requests) == 1
    assert harness.lines(sent.session_id)[-1] == ("tool", "acted")
    harness.script(says("on we go"))
    assert harness.ask("next")["reply"]["text"] == "on we go"


def test_cancelled_before_its_tools_begin(harness: Harness) -> None:
    """If a turn is cancelled before its tool calls begin, no call begins, and all outcomes are recorded as unknown."""
    ran: list[int] = []

    @tool
    def act() -> str:
        """Record that the tool ran."""
        ran.append(1)
        return "acted"

    harness.equip(act)
    harness.script(calls(("act", {}), ("act", {})))
    sent = harness.send()

    def during_the_commit(moment: str, name: str) -> None:
        if (moment, name) == ("before", "turns.step"):
            cancel(harness.runtime, sent.turn_id)

    with harness.hooked(during_the_commit):
        harness.run(sent.session_id)
    _assert_cancelled(harness, sent.turn_id)
    assert ran == []
    assert [content for role, content in harness.lines(sent.session_id) if role == "tool"] == [UNKNOWN_OUTCOME] * 2


def test_cancelling_a_parked_turn(harness: Harness) -> None:
    """No worker runs a parked turn. The cancellation wakes a worker, which settles the turn as cancelled."""
    sent = harness.send()
    runner = Runner(harness.runtime, "draining")
    runner.keeper.begin_shutdown()
    runner.run(sent.session_id)
    harness.waker.sessions.clear()
    cancel(harness.runtime, sent.turn_id)
    assert harness.waker.sessions == [sent.session_id]
    assert harness.run(sent.session_id) == Ran(1)
    _assert_cancelled(harness, sent.turn_id)
    assert harness.model.requests == []


def test_a_turn_whose_runner_died_in_its_tool_calls(harness: Harness) -> None:
    """The next runner does not repeat the dead runner's call. It closes the call and settles the cancelled turn."""
    harness.equip(double)
    harness.script(calls(("double", {"number": 1})))
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    cancel(harness.runtime, sent.turn_id)
    harness.move(31)
    assert harness.run(sent.session_id) == Ran(1)
    _assert_cancelled(harness, sent.turn_id)
    assert harness.lines(sent.session_id)[-1] == ("tool", UNKNOWN_OUTCOME)


def test_a_settled_turn_stays_as_it_is(harness: Harness) -> None:
    """Cancelling a settled turn changes nothing and wakes no worker."""
    sent = harness.send()
    harness.run(sent.session_id)
    before = harness.turn(sent.turn_id)
    harness.waker.sessions.clear()
    cancel(harness.runtime, sent.turn_id)
    assert harness.turn(sent.turn_id) == before
    assert harness.waker.sessions == []


def test_a_second_cancellation_changes_nothing(harness: Harness) -> None:
    """The session's counters count the cancelled turn once."""
    sent = harness.send()
    cancel(harness.runtime, sent.turn_id)
    cancel(harness.runtime, sent.turn_id)
    row = harness.session(sent.session_id)
    assert (row.unsettled, row.turn_count) == (0, 1)


def test_cancelling_an_unknown_turn_raises(harness: Harness) -> None:
    """Cancelling an unknown turn raises `NotFound`."""
    with pytest.raises(NotFound):
        cancel(harness.runtime, uuid4())


@pytest.mark.long
def test_a_concurrent_cancel_and_settle_leave_one_outcome(harness: Harness) -> None:
    """Cancelling and settling lock the session, so the turn ends either with its reply or as cancelled."""
    seen = set()
    for number in range(25):
        gate = threading.Event()

        def wait(request: ModelRequest, call: ModelCall, gate: threading.Event = gate) -> ModelReply:
            gate.set()
            return says("the reply")

        harness.script(wait)
        sent = harness.send(str(number), reply_to={"url": "https://a.example"})

        def request_cancel(turn_id: UUID = sent.turn_id, gate: threading.Event = gate) -> None:
            assert gate.wait(PATIENCE_S)
            cancel(harness.runtime, turn_id)

        found = side_by_side(request_cancel, lambda session_id=sent.session_id: harness.run(session_id))  # type: ignore[misc]
        assert not any(isinstance(each, Exception) for each in found)
        turn = harness.turn(sent.turn_id)
        seen.add(turn["status"])
        assert (turn["status"], turn["reply"] is not None, turn["error"] is None) in {
            ("done", True, True), ("cancelled", False, False),
        }  # fmt: skip
        assert harness.counts()["deliveries"] == number + 1, "one delivery for either outcome"
    assert seen <= {"done", "cancelled"}


def test_a_reply_being_committed_wins_over_a_cancellation(harness: Harness) -> None:
    """A cancellation requested just before the reply's commit has no effect."""
    harness.script(says("the reply"))
    sent = harness.send()

    def during_the_commit(moment: str, name: str) -> None:
        if (moment, name) == ("before", "turns.settle"):
            cancel(harness.runtime, sent.turn_id)

    with harness.hooked(during_the_commit):
        harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert harness.turn(sent.turn_id)["reply"]["text"] == "the reply"


def test_the_turn_after_a_cancelled_one_runs(harness: Harness) -> None:
    """After a cancelled turn the runner continues with the next turn. The cancellation does not affect that turn."""
    first, second = harness.send("first"), harness.send("second")

    def cancelling(request: ModelRequest, call: ModelCall) -> ModelReply:
        cancel(harness.runtime, first.turn_id)
        runner.keeper.beat()
        call.check()
        raise AssertionError("the call was not aborted")

    harness.script(cancelling, says("for the second"))
    runner = Runner(harness.runtime, "one")
    assert runner.run(first.session_id) == Ran(2)
    _assert_cancelled(harness, first.turn_id)
    assert harness.turn(second.turn_id)["reply"]["text"] == "for the second"
