"""What an agent's author has called around turns and tools, and how failures are worded."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from perdure import tool
from perdure.agents import Sentences
from perdure.errors import GuardRejected
from perdure.hooks import CallOver, CallSeen, TurnOver, TurnSeen, required
from tests.turns.scripted import calls, says
from tests.turns.stage import Stage

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
    assert isinstance(before, TurnSeen)
    assert (before.text, before.user_id, str(before.turn_id)) == ("do it", "ana", turn["turn_id"])
    assert isinstance(call, CallSeen)
    assert (call.tool, dict(call.arguments)) == ("act", {"number": 1})
    assert result == CallOver(call, "acted 1")
    assert after == TurnOver(before, "done", "done")


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
    words = Sentences({"GUARD_REJECTED": "No."}, {"de": {"GUARD_REJECTED": "Nein."}})
    stage.equip(before_turn=[required(_refuses)], error_messages=words)
    assert stage.ask()["error"] == {"code": "GUARD_REJECTED", "message": "No."}
    german = stage.ask(metadata={"language": "de"})
    assert (german["error"]["code"], german["reply"]["text"]) == ("GUARD_REJECTED", "Nein.")
    assert stage.ask(metadata={"language": {"not": "text"}})["reply"]["text"] == "No."

    class Broken:
        """Finds nothing."""

        def find(self, code: str, language: str | None) -> str | None:
            """Fail."""
            raise KeyError(code)

    stage.equip(before_turn=[required(_refuses)], error_messages=Broken())
    assert stage.ask()["reply"]["text"] == "Not with me."
