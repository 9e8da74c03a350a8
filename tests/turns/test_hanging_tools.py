"""Tools that hang or break off: the turn continues, leaked threads are counted, unsafe calls are not repeated."""

from __future__ import annotations

import threading
from uuid import UUID

import pytest

from perdure import DidNotHappen, Happened, ToolContext, Unknown, tool
from perdure.errors import OutcomeUnknown, ToolError
from perdure.tools.leaks import Leaks
from perdure.tools.registry import ProbeOutcome
from perdure.turns.calls.execute import TRIED_BEFORE
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.turns.run.runner import Runner
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.scripted import calls, says


def test_a_tool_that_hangs_leaves_a_thread_that_is_counted(harness: Harness) -> None:
    """The turn is answered; each thread left behind is counted until it ends."""
    let_go = threading.Event()

    @tool(effect="idempotent", timeout_s=0.05)
    def hang() -> str:
        """Hang."""
        let_go.wait(PATIENCE_S)
        return "late"

    harness.equip(hang)
    harness.script(calls(("hang", {})), says("it hangs"))
    runtime = harness.runtime
    sent = harness.send()
    Runner(runtime, "harness").run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "it hangs"
    assert runtime.leaks.count == 2  # one per attempt: an idempotent call is tried twice
    let_go.set()
    until(lambda: runtime.leaks.count == 0, "both threads end")


def test_too_many_leaked_threads_are_reported_once() -> None:
    """The process is asked to exit once, when the limit is passed."""
    let_go, told = threading.Event(), []
    leaks = Leaks(most=2)
    leaks.on_too_many = lambda: told.append(leaks.count)
    threads = [threading.Thread(target=let_go.wait, args=(PATIENCE_S,), daemon=True) for _ in range(4)]
    for number, thread in enumerate(threads):
        thread.start()
        leaks.add(thread)
        assert told == ([3] if number >= 2 else [])
    let_go.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert leaks.count == 0


@pytest.mark.parametrize(
    ("effect", "answer", "tries", "said"),
    [
        ("pure", None, 2, "done"),
        ("idempotent", None, 2, "done"),
        ("unsafe", None, 1, f"The line broke.\n{UNKNOWN_OUTCOME}"),
        ("unsafe", Unknown(), 1, f"The line broke.\n{UNKNOWN_OUTCOME}"),
        ("unsafe", Happened("it did"), 1, "it did"),
        ("unsafe", DidNotHappen(), 2, "done"),
    ],
)
def test_a_call_that_broke_off(
    harness: Harness, effect: str, answer: ProbeOutcome | None, tries: int, said: str
) -> None:
    """Repeatable calls are repeated once, a probe settles unsafe ones; otherwise the model reads: outcome unknown."""
    ran: list[UUID] = []

    @tool(effect=effect, probe=None if answer is None else lambda _context: answer)
    def call(context: ToolContext) -> str:
        """Call something far away."""
        ran.append(context.effect_id)
        if len(ran) == 1:
            raise OutcomeUnknown("The line broke.")
        return "done"

    harness.equip(call)
    harness.script(calls(("call", {})), says("well"))
    turn = harness.ask()
    assert turn["status"] == "done"
    assert (len(ran), len(set(ran))) == (tries, 1)
    [result] = [text for role, text in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert result == said


@pytest.mark.parametrize(("effect", "told"), [("pure", ""), ("idempotent", f"\n{TRIED_BEFORE}")])
def test_a_call_that_broke_off_and_fails_the_second_time(harness: Harness, effect: str, told: str) -> None:
    """The model also reads that the idempotent call's first attempt may have taken effect."""
    outcomes = iter([OutcomeUnknown("The line broke."), ToolError("Not called.")])

    @tool(effect=effect)
    def call() -> str:
        """Call something far away."""
        raise next(outcomes)

    harness.equip(call)
    harness.script(calls(("call", {})), says("well"))
    turn = harness.ask()
    [result] = [text for role, text in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert result == f"Error: Not called.{told}"


def test_an_overdue_call_that_acts_and_ends_during_its_probe_is_not_repeated(harness: Harness) -> None:
    """The probe looked before the effect; that the thread has ended since proves nothing, so the outcome is unknown."""
    looked, acted = threading.Event(), threading.Event()
    ran: list[UUID] = []

    def probe(_context: ToolContext) -> ProbeOutcome:
        looked.set()
        acted.wait(PATIENCE_S)
        until(lambda: not any("perdure-tool-act" in each.name for each in others()), "the call has ended")
        return DidNotHappen()

    def others() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in (threading.current_thread(), *before)]

    @tool(effect="unsafe", timeout_s=0.05, probe=probe)
    def act(context: ToolContext) -> str:
        """Act late."""
        looked.wait(PATIENCE_S)
        ran.append(context.effect_id)
        acted.set()
        return "acted"

    before = threading.enumerate()
    harness.equip(act)
    harness.script(calls(("act", {})), says("well"))
    turn = harness.ask()
    [result] = [text for role, text in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert (result, len(ran)) == (UNKNOWN_OUTCOME, 1)
