"""What an agent's author has called around turns and tools, and how failures are worded."""

from __future__ import annotations

import sys
import threading
from typing import Any
from uuid import UUID

import pytest

from perdure import tool
from perdure.agents import ErrorTexts
from perdure.errors import CircuitBreakerOpen, GuardRejected
from perdure.hooks import ToolCalled, ToolCalling, TurnEnding, TurnStarted, required
from perdure.models.protocol import CallAborted, ModelCall, ModelReply, ModelRequest
from perdure.turns.run.runner import Runner
from tests.turns.scripted import calls, says
from tests.turns.stage import PATIENCE_S, Stage, until

_ran: list[int] = []


@tool
def act(number: int) -> str:
    """Act."""
    _ran.append(number)
    return f"acted {number}"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _ran.clear()


def _fails(seen: Any) -> None:
    raise ValueError("a bug")


def _refuses(seen: Any) -> None:
    raise GuardRejected("Not with me.")


def test_they_see_what_happens_in_order(stage: Stage) -> None:
    """Each is given what it needs, and what it does is nobody else's business."""
    seen: list[Any] = []
    hooks = {name: [seen.append, _fails] for name in ("before_turn", "after_turn", "before_tool", "after_tool")}
    stage.equip(act, **hooks)
    stage.script(calls(("act", {"number": 1})), says("done"))
    turn = stage.ask("do it")
    assert turn["reply"]["text"] == "done"
    before, call, result, after = seen
    assert isinstance(before, TurnStarted)
    assert (before.text, before.user_id, str(before.turn_id)) == ("do it", "ana", turn["turn_id"])
    assert isinstance(call, ToolCalling)
    assert (call.tool, dict(call.arguments)) == ("act", {"number": 1})
    assert result == ToolCalled(call, "acted 1")
    assert after == TurnEnding(before, "done", "done")


def test_a_required_one_keeps_a_turn_from_beginning(stage: Stage) -> None:
    """The model is not asked; what people read is the hook's word, or none of its insides."""
    for hook, sentence in ((_refuses, "Not with me."), (_fails, "A guard of this installation refused this.")):
        stage.equip(before_turn=[required(hook)])
        turn = stage.ask()
        assert turn["error"] == {"code": "GUARD_REJECTED", "message": sentence}
        assert turn["reply"]["text"] == sentence
    assert stage.model.requests == []


def test_a_required_one_takes_a_reply_back(stage: Stage) -> None:
    """What the model said is in no transcript; a failure stays the failure that it is."""
    stage.equip(after_turn=[required(_refuses)])
    stage.script(says("a secret"), GuardRejected("The first refusal."))
    turn = stage.ask()
    assert (turn["status"], turn["reply"]["text"]) == ("failed", "Not with me.")
    assert stage.lines(UUID(turn["session_id"])) == [("user", "hello"), ("assistant", "Not with me.")]
    assert stage.ask("again")["reply"]["text"] == "The first refusal."


def test_a_required_one_keeps_a_tool_from_running_or_its_result_from_the_model(stage: Stage) -> None:
    """The model is told so, and goes on."""
    for name, ran in (("before_tool", []), ("after_tool", [1])):
        _ran.clear()
        stage.equip(act, **{name: [required(_refuses)]})
        stage.script(calls(("act", {"number": 1})), says("well"))
        turn = stage.ask(user_id=name)
        assert turn["status"] == "done"
        assert _ran == ran
        assert ("tool", "Error: Not with me.") in stage.lines(UUID(turn["session_id"]))


def test_failures_in_the_agents_own_words(stage: Stage) -> None:
    """By code, in the message's language where there is one; the code stays, and broken words do no harm."""
    words = ErrorTexts({"GUARD_REJECTED": "No."}, {"de": {"GUARD_REJECTED": "Nein."}})
    stage.equip(before_turn=[required(_refuses)], error_messages=words)
    assert stage.ask()["error"] == {"code": "GUARD_REJECTED", "message": "No."}
    german = stage.ask(metadata={"language": "de"})
    assert (german["error"]["code"], german["reply"]["text"]) == ("GUARD_REJECTED", "Nein.")
    assert stage.ask(metadata={"language": {"not": "text"}})["reply"]["text"] == "No."

    for tag, sentence in (("de-AT", "Nein."), ("DE_ch", "Nein."), ("fr-BE", "No."), ("deu", "No."), ("-", "No.")):
        assert words.find("GUARD_REJECTED", tag) == sentence

    class Broken:
        """Finds nothing."""

        def find(self, code: str, language: str | None) -> str | None:
            """Fail."""
            raise KeyError(code)

    stage.equip(before_turn=[required(_refuses)], error_messages=Broken())
    assert stage.ask()["reply"]["text"] == "Not with me."


@pytest.mark.parametrize("name", ["before_turn", "after_turn", "before_tool", "after_tool"])
def test_a_late_one_stops_nothing_unless_it_is_required(stage: Stage, name: str) -> None:
    """It is waited for so long and no longer; its thread, which nobody can end, is counted as long as it is there."""
    let_go = threading.Event()

    def hangs(seen: Any) -> None:
        let_go.wait(PATIENCE_S)

    stage.set(hook_timeout_s=0.05)
    stage.equip(act, **{name: [hangs]})
    stage.script(calls(("act", {"number": 1})), says("done"))
    assert stage.ask()["reply"]["text"] == "done"
    assert _ran == [1]

    stage.equip(act, **{name: [required(hangs)]})
    stage.script(calls(("act", {"number": 2})), says("well"))
    runtime = stage.runtime
    sent = stage.send(user_id="bea")
    Runner(runtime, "stage").run(sent.session_id)
    turn, refused = stage.turn(sent.turn_id), "A guard of this installation refused this."
    if name.endswith("turn"):
        assert turn["error"] == {"code": "GUARD_REJECTED", "message": refused}
    else:
        assert ("tool", f"Error: {refused}") in stage.lines(sent.session_id)
    assert _ran == ([1] if name.startswith("before") else [1, 2])
    assert runtime.leaks.count == 1
    let_go.set()
    until(lambda: runtime.leaks.count == 0, "its thread ends")


def test_one_that_leaves_its_thread_has_failed(stage: Stage) -> None:
    """Like any other failure: it takes nobody with it."""

    def leaves(seen: Any) -> None:
        sys.exit(3)

    stage.equip(before_turn=[leaves])
    assert stage.ask()["status"] == "done"
    stage.equip(before_turn=[required(leaves)])
    assert stage.ask()["error"]["code"] == "GUARD_REJECTED"


def test_before_a_turn_they_are_called_once_however_often_it_is_parked(stage: Stage) -> None:
    """For a model that is down, and for a worker that shuts down; what they let through is committed at once."""
    seen: list[Any] = []
    stage.set(on_unavailable="park")
    stage.equip(before_turn=[required(seen.append)])
    sent = stage.send("count me")

    def drains(request: ModelRequest, call: ModelCall) -> ModelReply:
        runner.keeper.drain()
        raise CallAborted("the worker leaves")

    stage.script(CircuitBreakerOpen(retry_after_s=60), CircuitBreakerOpen(retry_after_s=60), drains, says("counted"))
    for number in range(3):
        runner = Runner(stage.runtime, "stage")
        runner.run(sent.session_id)
        assert stage.turn(sent.turn_id)["status"] == "parked", number
        assert stage.lines(sent.session_id) == [("user", "count me")]
        stage.move(61)
    stage.run(sent.session_id)

    assert stage.turn(sent.turn_id)["reply"]["text"] == "counted"
    assert len(seen) == 1
    assert [request.messages[-1].content for request in stage.model.requests] == ["count me"] * 4


def test_after_a_crash_they_may_be_called_again(stage: Stage) -> None:
    """Between a hook and the commit that says so nobody knows; its ids are the same. Afterwards they are not."""
    seen: list[Any] = []
    stage.equip(before_turn=[seen.append])
    sent = stage.send()
    with stage.crashing("before", "turns.step"):
        stage.run(sent.session_id)
    stage.move(stage.settings.turn.lease_s + 1)
    with stage.crashing("after", "turns.step"):
        stage.run(sent.session_id)
    assert seen == [seen[0]] * 2
    stage.move(stage.settings.turn.lease_s + 1)
    stage.run(sent.session_id, alone=True)
    assert stage.turn(sent.turn_id)["status"] == "done"
    assert len(seen) == 2
