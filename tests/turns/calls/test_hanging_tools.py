"""Tools that hang or raise `OutcomeUnknown`: perdure counts leaked threads, and repeats a call only if that is safe."""

from __future__ import annotations

import threading
from uuid import UUID

import pytest

from perdure import DidNotHappen, Happened, ToolContext, Unknown, tool
from perdure.access.tenants import UserKey
from perdure.database.fencing import Fence
from perdure.errors import OutcomeUnknown, ToolError
from perdure.tools.leaks import Leaks
from perdure.tools.registry import Effect, ProbeOutcome
from perdure.turns.calls.execute import TRIED_BEFORE
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.turns.lease.tenure import Tenure, TurnRow
from perdure.turns.run.loop import Runner
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.scripted import calls, says


def test_the_thread_of_a_hanging_tool_is_counted(harness: Harness) -> None:
    """The turn is answered. Each leaked thread is counted until it ends."""
    release = threading.Event()

    @tool(effect="idempotent", timeout_s=0.05)
    def hang() -> str:
        """Hang."""
        release.wait(PATIENCE_S)
        return "late"

    harness.equip(hang)
    harness.script(calls(("hang", {})), says("it hangs"))
    runtime = harness.runtime
    sent = harness.send()
    Runner(runtime, "harness").run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "it hangs"
    assert runtime.leaks.count == 2  # one per attempt: an idempotent call is tried twice
    release.set()
    until(lambda: runtime.leaks.count == 0, "both threads end")


def test_too_many_leaked_threads_are_reported_once() -> None:
    """`on_too_many` is called once, when the count exceeds the limit."""
    release, reported = threading.Event(), []
    leaks = Leaks(most=2)
    leaks.on_too_many = lambda: reported.append(leaks.count)
    threads = [threading.Thread(target=release.wait, args=(PATIENCE_S,), daemon=True) for _ in range(4)]
    for number, thread in enumerate(threads):
        thread.start()
        leaks.add(thread)
        assert reported == ([3] if number >= 2 else [])
    release.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert leaks.count == 0


@pytest.mark.parametrize(
    ("effect", "answer", "tries", "expected"),
    [
        ("pure", None, 2, "done"),
        ("idempotent", None, 2, "done"),
        ("unsafe", None, 1, f"The line broke.\n{UNKNOWN_OUTCOME}"),
        ("unsafe", Unknown(), 1, f"The line broke.\n{UNKNOWN_OUTCOME}"),
        ("unsafe", Happened("it did"), 1, "it did"),
        ("unsafe", DidNotHappen(), 2, "done"),
    ],
)
def test_a_call_whose_outcome_is_unknown(
    harness: Harness, effect: str, answer: ProbeOutcome | None, tries: int, expected: str
) -> None:
    """A pure or idempotent call is repeated once, an unsafe call only if its probe returns `DidNotHappen`."""
    ran: list[UUID] = []

    @tool(effect=Effect(effect), probe=None if answer is None else lambda _context: answer)
    def call(context: ToolContext) -> str:
        """Call a remote service."""
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
    assert result == expected


@pytest.mark.parametrize(("effect", "note"), [("pure", ""), ("idempotent", f"\n{TRIED_BEFORE}")])
def test_a_call_that_fails_after_an_unknown_outcome(harness: Harness, effect: str, note: str) -> None:
    """If the second attempt fails, an idempotent call's error says that the first attempt may have taken effect."""
    outcomes = iter([OutcomeUnknown("The line broke."), ToolError("Not called.")])

    @tool(effect=Effect(effect))
    def call() -> str:
        """Call a remote service."""
        raise next(outcomes)

    harness.equip(call)
    harness.script(calls(("call", {})), says("well"))
    turn = harness.ask()
    [result] = [text for role, text in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert result == f"Error: Not called.{note}"


def test_an_overdue_call_that_acts_and_ends_during_its_probe_is_not_repeated(harness: Harness) -> None:
    """If a call ends while its probe runs, the probe's `DidNotHappen` is outdated and does not repeat the call."""
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
        """Act only after the probe has checked."""
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


@pytest.mark.parametrize("probes", [False, True], ids=["the call", "its probe"])
def test_a_call_past_its_time_limit_is_told_to_stop(harness: Harness, probes: bool) -> None:
    """`cancelled` is set, so that a loop can end, and stays set when the session's next turn begins."""
    told: list[threading.Event] = []
    begun, stopped, release = threading.Event(), threading.Event(), threading.Event()

    def waits(context: ToolContext) -> None:
        told.append(context.cancelled)
        begun.set()
        context.cancelled.wait(PATIENCE_S)
        release.wait(PATIENCE_S)
        stopped.set()

    def probe(context: ToolContext) -> ProbeOutcome:
        waits(context)
        return Unknown()

    @tool(timeout_s=0.2, probe=probe if probes else None)
    def beat(context: ToolContext) -> str:
        """Work until it is told to stop."""
        if probes:
            raise OutcomeUnknown("Who knows?")
        waits(context)
        return "stopped"

    @tool(effect="pure")
    def look(context: ToolContext) -> str:
        """Say whether the call is cancelled."""
        return str(context.cancelled.is_set())

    harness.equip(beat, look)
    harness.script(calls(("beat", {})), says("It hangs."), calls(("look", {})), says("Well."))
    runtime = harness.runtime
    sent = harness.send()
    harness.send()
    Runner(runtime, "harness").run(sent.session_id)
    assert [each.is_set() for each in told] == [True]
    assert harness.results()[-1] == "False"
    release.set()
    assert stopped.wait(PATIENCE_S)
    until(lambda: runtime.leaks.count == 0, "the thread ends")


@pytest.mark.parametrize("loses", [False, True], ids=["cancelled", "lost"])
def test_a_thread_that_outlasts_its_turn_is_told_for_good(harness: Harness, loses: bool) -> None:
    """Its event stays set, whatever turn its session runs next. Calls of that turn have events of their own."""
    turn = TurnRow(UUID(int=3), UUID(int=1), 1, UserKey("ana"), "assistant", "test", 1)
    tenure = Tenure(UUID(int=1), Fence(1, UUID(int=2)), harness.clock, 30, turn=turn)
    tenure.begin()
    told = [tenure.unwanted_call(), tenure.unwanted_call()]
    assert not any(each.is_set() for each in told)
    tenure.lose() if loses else tenure.cancel(turn.turn_id)
    assert all(each.is_set() for each in [*told, tenure.unwanted_call()])
    tenure.begin()
    assert all(each.is_set() for each in told)
    assert tenure.unwanted_call().is_set() == loses
