"""Hooks around turns and tools, and error messages that an agent defines."""

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
from perdure.turns.cancel import cancel
from perdure.turns.run.loop import Runner
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.scripted import UNREPORTED, calls, says

_ran: list[int] = []


@tool
def act(number: int) -> str:
    """Record the number."""
    _ran.append(number)
    return f"acted {number}"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _ran.clear()


def _fails(seen: Any) -> None:
    raise ValueError("a bug")


def _refuses(seen: Any) -> None:
    raise GuardRejected("Not with me.")


def test_no_hook_runs_before_a_turn_that_is_cancelled(harness: Harness) -> None:
    """The turn was cancelled before its first step, for example while it waited for another attempt."""
    seen: list[Any] = []
    harness.equip(before_turn=[seen.append])
    sent = harness.send()
    harness.sql("UPDATE turns SET status = 'parked'")
    cancel(harness.runtime, sent.turn_id)
    harness.run(sent.session_id)
    assert (harness.turn(sent.turn_id)["status"], seen) == ("cancelled", [])


def test_hooks_receive_their_events_in_order(harness: Harness) -> None:
    """An optional hook that raises affects neither the other hooks nor the turn."""
    seen: list[Any] = []
    hooks = {name: [seen.append, _fails] for name in ("before_turn", "after_turn", "before_tool", "after_tool")}
    harness.equip(act, **hooks)
    harness.script(calls(("act", {"number": 1})), says("done"))
    turn = harness.ask("do it")
    assert turn["reply"]["text"] == "done"
    before, call, result, after = seen
    assert isinstance(before, TurnStarted)
    assert (before.text, before.user_id, str(before.turn_id)) == ("do it", "ana", turn["turn_id"])
    assert isinstance(call, ToolCalling)
    assert (call.tool, dict(call.arguments)) == ("act", {"number": 1})
    assert result == ToolCalled(call, "acted 1")
    assert after == TurnEnding(before, "done", "done")


def test_a_required_hook_keeps_a_turn_from_beginning(harness: Harness) -> None:
    """The model is not called. The user reads the hook's message, or a general message if the hook has a bug."""
    for hook, message in ((_refuses, "Not with me."), (_fails, "A guard of this installation refused this.")):
        harness.equip(before_turn=[required(hook)])
        turn = harness.ask()
        assert turn["error"] == {"code": "GUARD_REJECTED", "message": message}
        assert turn["reply"]["text"] == message
    assert harness.model.requests == []


def test_a_required_hook_rejects_a_reply(harness: Harness) -> None:
    """A rejected reply does not enter the transcript. A turn that has already failed keeps its own error."""
    harness.equip(after_turn=[required(_refuses)])
    harness.script(says("a secret"), GuardRejected("The first refusal."))
    turn = harness.ask()
    assert (turn["status"], turn["reply"]["text"]) == ("failed", "Not with me.")
    assert harness.lines(UUID(turn["session_id"])) == [("user", "hello"), ("assistant", "Not with me.")]
    assert harness.ask("again")["reply"]["text"] == "The first refusal."


def test_a_rejected_reply_counts_with_its_usage(harness: Harness) -> None:
    """The tokens of a reply that a hook rejects are spent, so the turn's steps and usage include it."""
    harness.equip(act, after_turn=[required(_refuses)])
    harness.script(calls(("act", {"number": 1})), says("a secret"))
    turn = harness.ask()
    assert (turn["status"], turn["steps"]) == ("failed", 2)
    assert turn["usage"] == {**UNREPORTED, "input_tokens": 20, "output_tokens": 7}
    assert "a secret" not in str(harness.lines(UUID(turn["session_id"])))


def test_a_turn_without_a_model_call_uses_no_tokens(harness: Harness) -> None:
    """Zero tokens are a fact if no model was called; `null` would say that the usage is unknown."""
    harness.equip(before_turn=[required(_refuses)])
    turn = harness.ask()
    assert (turn["steps"], turn["usage"]) == (0, {**UNREPORTED, "input_tokens": 0, "output_tokens": 0})


def test_a_required_hook_keeps_a_tool_from_running_or_its_result_from_the_model(harness: Harness) -> None:
    """The model reads the hook's message as the call's error, and the turn continues."""
    for name, ran in (("before_tool", []), ("after_tool", [1])):
        _ran.clear()
        harness.equip(act, **{name: [required(_refuses)]})
        harness.script(calls(("act", {"number": 1})), says("well"))
        turn = harness.ask(user_id=name)
        assert turn["status"] == "done"
        assert _ran == ran
        assert ("tool", "Error: Not with me.") in harness.lines(UUID(turn["session_id"]))


def test_an_agents_own_error_messages(harness: Harness) -> None:
    """The error code and the language select the agent's message. If the lookup raises, the default message is used."""
    texts = ErrorTexts({"GUARD_REJECTED": "No."}, {"de": {"GUARD_REJECTED": "Nein."}})
    harness.equip(before_turn=[required(_refuses)], error_messages=texts)
    assert harness.ask()["error"] == {"code": "GUARD_REJECTED", "message": "No."}
    german = harness.ask(metadata={"language": "de"})
    assert (german["error"]["code"], german["reply"]["text"]) == ("GUARD_REJECTED", "Nein.")
    assert harness.ask(metadata={"language": {"not": "text"}})["reply"]["text"] == "No."

    for tag, message in (("de-AT", "Nein."), ("DE_ch", "Nein."), ("fr-BE", "No."), ("deu", "No."), ("-", "No.")):
        assert texts.find("GUARD_REJECTED", tag) == message

    class Broken:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def find(self, code: str, language: str | None) -> str | None:
            raise self.error

    for error in (KeyError("code"), SystemExit(3)):
        harness.equip(before_turn=[required(_refuses)], error_messages=Broken(error))
        assert harness.ask()["reply"]["text"] == "Not with me."


@pytest.mark.parametrize("name", ["before_turn", "after_turn", "before_tool", "after_tool"])
def test_a_late_hook_rejects_only_if_it_is_required(harness: Harness, name: str) -> None:
    """The turn waits for a hook only until the time limit. The hook's thread counts as leaked until the thread ends."""
    release = threading.Event()

    def hangs(seen: Any) -> None:
        release.wait(PATIENCE_S)

    harness.set(hook_timeout_s=0.05)
    harness.equip(act, **{name: [hangs]})
    harness.script(calls(("act", {"number": 1})), says("done"))
    assert harness.ask()["reply"]["text"] == "done"
    assert _ran == [1]

    harness.equip(act, **{name: [required(hangs)]})
    harness.script(calls(("act", {"number": 2})), says("well"))
    runtime = harness.runtime
    sent = harness.send(user_id="bea")
    Runner(runtime, "harness").run(sent.session_id)
    turn, refused = harness.turn(sent.turn_id), "A guard of this installation refused this."
    if name.endswith("turn"):
        assert turn["error"] == {"code": "GUARD_REJECTED", "message": refused}
    else:
        assert ("tool", f"Error: {refused}") in harness.lines(sent.session_id)
    assert _ran == ([1] if name.startswith("before") else [1, 2])
    assert runtime.leaks.count == 1
    release.set()
    until(lambda: runtime.leaks.count == 0, "its thread ends")


def test_a_hook_that_exits_its_thread_has_failed(harness: Harness) -> None:
    """A hook's `SystemExit` is treated like any other exception, and does not stop the worker."""

    def leaves(seen: Any) -> None:
        sys.exit(3)

    harness.equip(before_turn=[leaves])
    assert harness.ask()["status"] == "done"
    harness.equip(before_turn=[required(leaves)])
    assert harness.ask()["error"]["code"] == "GUARD_REJECTED"


def test_before_turn_hooks_are_called_once_however_often_the_turn_is_parked(harness: Harness) -> None:
    """The user's message is committed right after the hooks, so a resumed turn does not call the hooks again."""
    seen: list[Any] = []
    harness.set(on_unavailable="park")
    harness.equip(before_turn=[required(seen.append)])
    sent = harness.send("count me")

    def drains(request: ModelRequest, call: ModelCall) -> ModelReply:
        runner.keeper.begin_shutdown()
        raise CallAborted("the worker drains")

    harness.script(CircuitBreakerOpen(retry_after_s=60), CircuitBreakerOpen(retry_after_s=60), drains, says("counted"))
    for number in range(3):
        runner = Runner(harness.runtime, "harness")
        runner.run(sent.session_id)
        assert harness.turn(sent.turn_id)["status"] == "parked", number
        assert harness.lines(sent.session_id) == [("user", "count me")]
        harness.move(61)
    harness.run(sent.session_id)

    assert harness.turn(sent.turn_id)["reply"]["text"] == "counted"
    assert len(seen) == 1
    assert [request.messages[-1].content for request in harness.model.requests] == ["count me"] * 4


def test_hooks_may_be_called_again_after_a_crash(harness: Harness) -> None:
    """A crash before the user's message is committed repeats the hooks, with the same ids. A later crash does not."""
    seen: list[Any] = []
    harness.equip(before_turn=[seen.append])
    sent = harness.send()
    with harness.crashing("before", "turns.step"):
        harness.run(sent.session_id)
    harness.move(harness.settings.turn.lease_s + 10)
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    assert seen == [seen[0]] * 2
    harness.move(harness.settings.turn.lease_s + 10)
    harness.run(sent.session_id, alone=True)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert len(seen) == 2
