"""After a crash, a call in doubt is repeated, probed, or closed as unknown, depending on its tool's effect class.

A call is in doubt if it may have begun and its outcome is not recorded. No worker decides what happens to the call
before the tool's time limit has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from perdure import tool
from perdure.hooks import ToolCalling
from perdure.tools.registry import DidNotHappen, Effect, Happened, Probe, Tool, ToolContext, Unknown
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.turns.lease.claim import Ran, Unequipped
from perdure.turns.run.loop import Runner
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.scripted import calls, says

DECIDED_S = 31
"""Seconds after which a lease and the time limit of a tool, both 30 s, have passed."""


class Bench:
    """Makes tools that record the effect id of each run."""

    def __init__(self) -> None:
        self.ran: list[UUID] = []

    def tool(self, effect: str, probe: Probe | None = None) -> Tool:
        """A tool with the effect class `effect`."""

        @tool(effect=Effect(effect), name="act", probe=probe)
        def act(context: ToolContext) -> str:
            """Record the effect id."""
            self.ran.append(context.effect_id)
            return f"acted {len(self.ran)}"

        return act


@pytest.fixture
def bench() -> Bench:
    """A bench that has recorded no run."""
    return Bench()


def _crash(harness: Harness, moment: Any, nth: int) -> UUID:
    """Crash a turn before or after its first or second step commit; returns the session's id.

    The first step commits the reply with its call, the second one commits the call's result.
    """
    harness.script(calls(("act", {})), says("done"))
    sent = harness.send()
    with harness.crashing(moment, "turns.step", nth):
        harness.run(sent.session_id)
    return sent.session_id


POINTS = [("before", 1), ("after", 1), ("before", 2), ("after", 2)]
# For each effect class: how often the tool has run when the turn is settled, for each of POINTS.
RUNS = {"pure": [1, 1, 2, 1], "idempotent": [1, 1, 2, 1], "unsafe": [1, 0, 1, 1]}


@pytest.mark.parametrize("effect", RUNS)
@pytest.mark.parametrize("point", range(4))
def test_a_crash_around_each_commit(harness: Harness, bench: Bench, effect: str, point: int) -> None:
    """Wherever the process dies, the effect class decides whether the tool runs again. The turn is answered once."""
    harness.equip(bench.tool(effect))
    session_id = _crash(harness, *POINTS[point])
    harness.move(DECIDED_S)
    if point == 0:  # the first step was not committed: the model is called again
        harness.script(calls(("act", {})), says("done"))
    assert harness.run(session_id) == Ran(1)
    assert len(bench.ran) == RUNS[effect][point]
    assert len(set(bench.ran)) <= 1, "every attempt at one call has one effect id"
    in_doubt = effect == "unsafe" and point in {1, 2}
    assert harness.results() == [UNKNOWN_OUTCOME if in_doubt else f"acted {len(bench.ran)}"]
    assert harness.lines(session_id)[-1] == ("assistant", "done")
    assert harness.sql("SELECT status FROM tool_effects")[0].status == ("unknown" if in_doubt else "done")


def test_a_call_in_doubt_is_not_decided_while_the_tool_may_still_run(harness: Harness, bench: Bench) -> None:
    """The first runner may still be alive. No other runner repeats the call before the tool's time limit has passed."""
    harness.set(lease_s=5, heartbeat_s=1)
    harness.equip(bench.tool("pure"))
    session_id = _crash(harness, "after", 1)
    harness.move(6)
    runner = Runner(harness.runtime, "second")
    second = threading.Thread(target=runner.run, args=(session_id,), daemon=True)
    second.start()
    until(lambda: runner.keeper.running and harness.session(session_id).token == 2, "the second runner has it")
    # The second runner would wait in real time until `decide_at`; the interruption ends the wait at once.
    harness.send("stop", on_busy="interrupt")
    runner.keeper.beat()
    second.join(PATIENCE_S)
    assert not second.is_alive(), "the wait ends when the turn is interrupted"
    assert bench.ran == []
    assert harness.results() == [UNKNOWN_OUTCOME]


def test_a_clock_set_back_does_not_postpone_the_decision(harness: Harness, bench: Bench) -> None:
    """If the clock is set back by a day, a call in doubt is still decided within the tool's time limit."""
    harness.set(tool_timeout_s=0.1)
    harness.equip(bench.tool("pure"))
    session_id = _crash(harness, "after", 1)
    harness.move(-86_400)
    assert harness.run(session_id) == Ran(1)
    assert len(bench.ran) == 1


def test_a_runner_that_waits_for_a_decision_can_be_drained(harness: Harness, bench: Bench) -> None:
    """A runner that waits to decide a call parks the turn at once when its worker shuts down."""
    harness.set(lease_s=5, heartbeat_s=1)
    harness.equip(bench.tool("pure"))
    session_id = _crash(harness, "after", 1)
    harness.move(6)
    runner = Runner(harness.runtime, "second")
    second = threading.Thread(target=runner.run, args=(session_id,), daemon=True)
    second.start()
    until(lambda: runner.keeper.running and harness.session(session_id).token == 2, "the second runner has it")
    runner.keeper.begin_shutdown()
    second.join(PATIENCE_S)
    assert not second.is_alive()
    assert harness.sql("SELECT status FROM turns")[0].status == "parked"
    harness.move(DECIDED_S)
    assert harness.run(session_id) == Ran(1)
    assert len(bench.ran) == 1


def _raises(context: ToolContext) -> Any:
    raise RuntimeError("the bank is closed")


PROBES: dict[str, tuple[Callable[[ToolContext], Any], str, int]] = {
    "happened": (lambda context: Happened(f"receipt of {context.user_id}\x00"), "receipt of ana\ufffd", 1),
    "happened, at length": (lambda _: Happened("x" * 100_000), "x" * 20, 1),
    "did not happen": (lambda _: DidNotHappen(), "acted 2", 2),
    "unknown": (lambda _: Unknown(), UNKNOWN_OUTCOME, 1),
    "raises": (_raises, UNKNOWN_OUTCOME, 1),
    "answers nonsense": (lambda _: "yes", UNKNOWN_OUTCOME, 1),
}


@pytest.mark.parametrize("answer", PROBES)
def test_the_probe_of_an_unsafe_tool_settles_its_call(harness: Harness, bench: Bench, answer: str) -> None:
    """`Happened` becomes the result, and `DidNotHappen` repeats the call. Otherwise the outcome stays unknown."""
    probe, expected, runs = PROBES[answer]
    harness.equip(bench.tool("unsafe", probe))
    session_id = _crash(harness, "before", 2)
    harness.move(DECIDED_S)
    harness.run(session_id)
    (result,) = harness.results()
    assert result.startswith(expected)
    assert len(result) <= 32_000
    assert len(bench.ran) == runs
    assert len(set(bench.ran)) == 1


def test_a_probe_that_hangs_is_abandoned(harness: Harness, bench: Bench) -> None:
    """If a probe exceeds the tool's time limit, the outcome of the call stays unknown."""
    release = threading.Event()

    def hang(context: ToolContext) -> Unknown:
        release.wait(PATIENCE_S)
        return Unknown()

    @tool(name="act", timeout_s=0.2, probe=hang)
    def act() -> str:
        """Return at once."""
        return "acted"

    harness.equip(act)
    session_id = _crash(harness, "before", 2)
    harness.move(DECIDED_S)
    assert harness.run(session_id) == Ran(1)
    release.set()
    assert harness.results() == [UNKNOWN_OUTCOME]


def test_a_late_result_is_stored_only_in_the_effects_row(harness: Harness) -> None:
    """If an unsafe tool returns after its outcome was recorded as unknown, the transcript stays unchanged."""
    release = threading.Event()

    @tool(timeout_s=30)
    def act() -> str:
        """Act, slowly."""
        harness.move(31)
        assert release.wait(PATIENCE_S)
        return "transferred after all"

    harness.equip(act)
    harness.script(calls(("act", {})), says("done"))
    sent = harness.send()
    harness.run(sent.session_id)
    before = harness.messages(sent.session_id)
    release.set()
    row = "SELECT status, result FROM tool_effects WHERE result IS NOT NULL"
    until(lambda: harness.sql(row), "the late result")
    assert tuple(harness.sql(row)[0]) == ("unknown", "transferred after all")
    assert harness.messages(sent.session_id) == before
    assert harness.results() == [UNKNOWN_OUTCOME]


@pytest.mark.parametrize("given", ["first", ""])
def test_a_recorded_call_of_several_is_not_repeated(harness: Harness, given: str) -> None:
    """If one of two unsafe calls has a recorded result, even an empty text, the next runner keeps that result.

    The runner repeats neither call.
    """
    ran: list[str] = []
    blocked, release = threading.Event(), threading.Event()

    @tool
    def act(number: int) -> str:
        """Act; the second call blocks."""
        ran.append(f"act {number}")
        if number == 2:
            blocked.set()
            release.wait(PATIENCE_S)
        return given

    harness.equip(act)
    harness.script(calls(("act", {"number": 1}), ("act", {"number": 2})), says("done"))
    sent = harness.send()
    stopped = threading.Thread(target=harness.run, args=(sent.session_id,), daemon=True)
    stopped.start()
    assert blocked.wait(PATIENCE_S)
    until(lambda: harness.sql("SELECT 1 FROM tool_effects WHERE status = 'done'"), "the first result")
    # The first runner keeps waiting, like a paused process; another one takes over.
    harness.sql("UPDATE tool_effects SET decide_at = perdure_now() WHERE status = 'intended'")
    harness.sql("UPDATE sessions SET lease_until = perdure_now()")
    assert harness.run(sent.session_id) == Ran(1)
    release.set()
    stopped.join(PATIENCE_S)
    assert harness.results() == [given, UNKNOWN_OUTCOME]
    assert sorted(ran) == ["act 1", "act 2"]


def test_a_call_of_a_removed_tool_has_an_unknown_outcome(harness: Harness, bench: Bench) -> None:
    """If a deploy removes a tool, the turn waits for a runner that can repeat or probe its call, then goes on."""
    harness.equip(bench.tool("pure"))
    session_id = _crash(harness, "before", 2)
    harness.equip()
    harness.move(DECIDED_S)
    assert isinstance(harness.run(session_id), Unequipped)
    harness.move(harness.settings.turn.unknown_agent_s + 1)
    assert harness.run(session_id) == Ran(1)
    assert harness.results() == [UNKNOWN_OUTCOME]
    assert len(bench.ran) == 1


def test_a_refused_call_stays_refused_after_a_crash(harness: Harness, bench: Bench) -> None:
    """After a crash, the next runner refuses the invalid calls again and repeats only the pure call."""
    harness.equip(bench.tool("pure"))
    harness.script(calls(("fly", {}), ("act", {}), ("act", "{broken")), says("done"))
    sent = harness.send()
    with harness.crashing("before", "turns.step", 2):
        harness.run(sent.session_id)
    harness.move(DECIDED_S)
    harness.run(sent.session_id)
    results = harness.results()
    assert results[0].startswith("Error: There is no tool 'fly'")
    assert results[1] == "acted 2"
    assert "not valid JSON" in results[2]


def test_a_turn_abandoned_in_the_middle_of_its_calls_closes_them(harness: Harness, bench: Bench) -> None:
    """The commit that settles the turn as failed also closes the turn's open call, with an unknown outcome."""
    harness.equip(bench.tool("unsafe"))
    session_id = _crash(harness, "after", 1)
    harness.sql("UPDATE sessions SET strikes = 5")
    harness.move(DECIDED_S)
    assert harness.run(session_id) == Ran(1)
    assert harness.results() == [UNKNOWN_OUTCOME]
    assert bench.ran == []
    turn = harness.sql("SELECT status, error_code FROM turns")[0]
    assert tuple(turn) == ("failed", "BUDGET_EXHAUSTED")


def test_a_tool_starts_only_under_a_valid_lease(harness: Harness, bench: Bench) -> None:
    """If another runner claims the session before a committed call starts, the first runner does not start the tool."""
    harness.equip(bench.tool("unsafe"))
    harness.script(calls(("act", {})), says("done"), says("of the second runner"))
    sent = harness.send()
    paused: list[str] = []

    def pause(moment: str, name: str) -> None:
        if (moment, name) == ("after", "turns.step") and not paused:
            paused.append(name)
            harness.move(DECIDED_S)
            harness.run(sent.session_id)

    with harness.hooked(pause):
        assert harness.run(sent.session_id) == Ran(0)
    assert bench.ran == []
    assert harness.results() == [UNKNOWN_OUTCOME]


def test_a_tool_starts_after_a_pause_without_another_claim(harness: Harness, bench: Bench) -> None:
    """If no other runner has claimed the session, the runner renews its expired lease and starts the tool."""
    harness.equip(bench.tool("unsafe"))
    harness.script(calls(("act", {})), says("done"))
    sent = harness.send()

    def pause(moment: str, name: str) -> None:
        if (moment, name) == ("after", "turns.step") and not bench.ran:
            harness.move(DECIDED_S)

    with harness.hooked(pause):
        assert harness.run(sent.session_id) == Ran(1)
    assert harness.results() == ["acted 1"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_pause_after_the_start_of_a_call_is_noticed_before_its_function_is_called(
    harness: Harness, bench: Bench, lost: bool
) -> None:
    """Before it calls the tool's function, the call's thread renews an expired lease. It stops if the lease is lost."""
    paused: list[str] = []

    def pause(seen: ToolCalling) -> None:
        if not paused:
            paused.append(seen.tool)
            harness.move(DECIDED_S)
            if lost:
                harness.sql("UPDATE sessions SET token = token + 1, nonce = gen_random_uuid() RETURNING token")

    harness.set(tool_timeout_s=3 * DECIDED_S)
    harness.equip(bench.tool("unsafe"), before_tool=[pause])
    harness.script(calls(("act", {})), says("done"))
    sent = harness.send()
    extended: list[str] = []
    with harness.hooked(lambda moment, name: extended.append(moment) if name == "turns.extend_effect" else None):
        assert harness.run(sent.session_id) == Ran(0 if lost else 1)
    assert paused
    assert extended
    assert len(bench.ran) == (0 if lost else 1)
