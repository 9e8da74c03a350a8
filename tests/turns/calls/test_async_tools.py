"""`async def` tools, probes and hooks share one event loop per process. They obey the rules of synchronous ones."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import time
from typing import Any
from uuid import UUID

import pytest

from perdure import Agent, Happened, ToolContext, tool
from perdure.errors import GuardRejected, OutcomeUnknown, ToolError
from perdure.hooks import ToolCalling, TurnStarted, required
from perdure.testing import Scripted, ask, call
from perdure.tools import event_loop
from perdure.tools.registry import ProbeOutcome
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.turns.cancel import cancel
from perdure.turns.run.loop import Runner
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.scripted import calls, says

CALLS = 300


def context(**more: Any) -> ToolContext:
    """The context of a call outside of a turn."""
    return ToolContext("ana", UUID(int=1), UUID(int=2), UUID(int=3), "cli", threading.Event(), **more)


def tool_lines(harness: Harness, turn: dict[str, Any]) -> list[str]:
    """The tool results in the transcript."""
    return [content for role, content in harness.lines(UUID(turn["session_id"])) if role == "tool"]


def test_hundreds_of_calls_wait_concurrently_on_one_thread() -> None:
    """All calls have begun before the first one ends, and one thread runs them all."""
    began, threads = [], set()
    all_began: list[asyncio.Event] = []

    @tool(effect="pure")
    async def wait(number: int) -> int:
        """Wait until all calls have begun."""
        if not all_began:
            all_began.append(asyncio.Event())
        began.append(number)
        threads.add(threading.get_ident())
        if len(began) == CALLS:
            all_began[0].set()
        await all_began[0].wait()
        return number

    results: dict[int, str] = {}

    def call_one(number: int) -> None:
        results[number] = wait.call({"number": number}, context())

    callers = [threading.Thread(target=call_one, args=(number,)) for number in range(CALLS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert results == {number: str(number) for number in range(CALLS)}
    assert len(threads) == 1


def test_the_calls_of_one_reply_run_concurrently(harness: Harness) -> None:
    """Two calls of one reply run concurrently. Their results enter the transcript in the calls' order."""
    met: dict[str, asyncio.Event] = {}

    @tool(effect="idempotent")
    async def meet(own: str, other: str) -> str:
        """Wait until the other call has begun."""
        met.setdefault(own, asyncio.Event()).set()
        await met.setdefault(other, asyncio.Event()).wait()
        return f"{own} met {other}"

    harness.equip(meet)
    harness.script(calls(("meet", {"own": "a", "other": "b"}), ("meet", {"own": "b", "other": "a"})), says("done"))
    turn = harness.ask()
    assert tool_lines(harness, turn) == ["a met b", "b met a"]
    statuses = [row.status for row in harness.sql("SELECT status FROM tool_effects")]
    assert statuses == ["done", "done"]


def test_a_coroutine_is_cancelled_at_its_time_limit(harness: Harness) -> None:
    """At the time limit, the coroutine's `finally` runs, no thread leaks, and the outcome is recorded as unknown."""
    ended = threading.Event()

    @tool(timeout_s=0.2)
    async def pay() -> str:
        """Pay, slowly."""
        try:
            await asyncio.sleep(PATIENCE_S * 10)
        finally:
            ended.set()
        return "paid"

    harness.equip(pay)
    harness.script(calls(("pay", {})), says("I do not know."))
    runtime = harness.runtime
    sent = harness.send()
    Runner(runtime, "harness").run(sent.session_id)
    assert tool_lines(harness, harness.turn(sent.turn_id)) == [UNKNOWN_OUTCOME]
    assert ended.wait(PATIENCE_S)
    until(lambda: runtime.leaks.count == 0, "its thread ends")


def test_an_async_probe_decides(harness: Harness) -> None:
    """If a call exceeds its time limit, the outcome from its async probe becomes the call's result."""

    async def probe(of: ToolContext) -> ProbeOutcome:
        await asyncio.sleep(0)
        return Happened(f"paid by {of.user_id}")

    @tool(timeout_s=1, probe=probe)
    async def pay() -> str:
        """Pay, slowly."""
        await asyncio.sleep(PATIENCE_S * 10)
        return "paid"

    harness.equip(pay)
    harness.script(calls(("pay", {})), says("Good."))
    assert tool_lines(harness, harness.ask()) == ["paid by ana"]


@pytest.mark.long
def test_a_cancelled_turn_cancels_the_coroutine(harness: Harness) -> None:
    """Cancelling a turn interrupts the `await` of its running tool."""
    waits, ended = threading.Event(), threading.Event()

    @tool
    async def work() -> str:
        """Work for long."""
        waits.set()
        try:
            await asyncio.sleep(PATIENCE_S * 10)
        finally:
            ended.set()
        return "done"

    harness.equip(work)
    harness.script(calls(("work", {})))
    runtime = harness.runtime
    sent = harness.send()
    runner = Runner(runtime, "harness")
    runner.start()
    running = threading.Thread(target=runner.run, args=(sent.session_id,))
    running.start()
    assert waits.wait(PATIENCE_S)
    cancel(runtime, sent.turn_id)
    assert ended.wait(PATIENCE_S)
    running.join(PATIENCE_S)
    runner.close()
    assert harness.turn(sent.turn_id)["status"] == "cancelled"


def test_a_call_of_a_cancelled_turn_is_not_begun() -> None:
    """A call whose turn is already cancelled does not start its tool."""
    began: list[int] = []

    @tool
    async def act() -> str:
        """Record that the call has begun."""
        began.append(1)
        return "acted"

    cancelled = context()
    cancelled.cancelled.set()
    with pytest.raises(OutcomeUnknown):
        act.call({}, cancelled)
    assert began == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ToolError("There is no such order."), "There is no such order."),
        (ValueError("a bug"), "ValueError: a bug"),
        (asyncio.CancelledError(), "The call was cancelled."),
        (TimeoutError("too slow"), "TimeoutError: too slow"),
    ],
)
def test_an_async_tools_exception_becomes_the_calls_error(error: BaseException, message: str) -> None:
    """Any exception of an async tool, including `TimeoutError` and `CancelledError`, becomes a `ToolError`."""

    @tool(effect="pure")
    async def fail() -> str:
        """Fail."""
        await asyncio.sleep(0)
        raise error

    with pytest.raises(ToolError, match=message):
        fail.call({}, context())


def test_an_abandoned_call_is_not_begun_once_the_loop_is_free() -> None:
    """If a call is abandoned while another tool blocks the loop, the call never begins, even after the loop is free."""
    over, blocked, began = threading.Event(), threading.Event(), []

    async def blocks() -> None:
        blocked.set()
        over.wait(10)
        await asyncio.sleep(0)

    async def pays() -> None:
        began.append(True)
        await asyncio.sleep(0)

    blocker = threading.Thread(target=event_loop.call, args=("blocks", blocks, lambda: False))
    blocker.start()
    assert blocked.wait(10)
    threading.Timer(0.2, over.set).start()
    with pytest.raises(event_loop.CoroutineCancelled):
        event_loop.call("pays", pays, over.is_set)
    blocker.join(10)
    assert began == []


def test_a_tools_task_that_exits_does_not_end_the_loop() -> None:
    """A task's `SystemExit` does not end the loop, although asyncio re-raises it from `run_forever`."""

    async def child() -> None:
        raise SystemExit(3)

    async def parent() -> None:
        await asyncio.gather(child())

    with pytest.raises(RuntimeError, match="SystemExit"):
        event_loop.call("parent", parent, lambda: False)

    async def fine() -> int:
        await asyncio.sleep(0.01)
        return 7

    assert event_loop.call("fine", fine, lambda: False) == 7


def test_a_tool_that_exits_does_not_end_the_loop() -> None:
    """An async tool's `SystemExit` becomes a `ToolError`. It does not end the thread that runs all async calls."""

    @tool(effect="pure")
    async def leave() -> str:
        """Leave."""
        raise SystemExit(3)

    for _ in range(2):
        with pytest.raises(ToolError, match="it raised SystemExit"):
            leave.call({}, context())


def test_a_callable_that_returns_a_coroutine_is_awaited() -> None:
    """The coroutine of a guard with an async `__call__` is awaited. Otherwise the guard would never run."""

    class Guard:
        async def __call__(self) -> str:
            await asyncio.sleep(0)
            return "ran"

    assert event_loop.call("the guard", Guard(), lambda: False) == "ran"


def test_context_variables_reach_the_coroutine() -> None:
    """An async tool sees the caller's context variables, on which logging and tracing rely."""
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")

    @tool(effect="pure")
    async def read() -> str:
        """Read the variable."""
        await asyncio.sleep(0)
        return request.get()

    request.set("r-1")
    assert read.call({}, context()) == "r-1"


def test_a_loop_that_a_tool_blocks_is_logged_and_replaced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names the blocking tool. Later calls get a new loop."""
    monkeypatch.setattr(event_loop, "_BLOCKED_S", 0.2)
    monkeypatch.setattr(event_loop, "_REPLACED_S", 0.4)
    release = threading.Event()

    @tool(effect="pure")
    async def block() -> str:
        """Block the loop."""
        release.wait(PATIENCE_S)
        return "late"

    @tool(effect="pure")
    async def quick() -> str:
        """Return at once."""
        return "quick"

    with caplog.at_level(logging.WARNING):
        blocking = threading.Thread(target=block.call, args=({}, context()))
        blocking.start()
        until(lambda: "the tool block blocks the event loop" in caplog.text, "the log names the tool")
        until(lambda: event_loop._current is not None and event_loop._current.blocked_s > 0.4, "the loop is abandoned")
        assert quick.call({}, context()) == "quick"
    release.set()
    blocking.join(PATIENCE_S)
    assert caplog.text.count("blocks the event loop") == 1


def test_a_forked_child_has_a_loop_of_its_own() -> None:
    """A forked child starts its own loop, because the thread of the parent's loop does not exist in the child."""

    @tool(effect="pure")
    async def quick() -> str:
        """Return at once."""
        await asyncio.sleep(0)
        return "quick"

    quick.call({}, context())
    pid = os.fork()
    if pid == 0:  # a child forked from a process with threads must exit without Python's clean-up
        os._exit(0 if quick.call({}, context()) == "quick" else 1)
    began = time.monotonic()
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0


def test_async_hooks(harness: Harness) -> None:
    """Async hooks receive the usual events, may reject a call, and are cancelled at their time limit."""
    seen: list[str] = []
    ended = threading.Event()

    async def look(turn: TurnStarted) -> None:
        await asyncio.sleep(0)
        seen.append(turn.text)

    async def refuse(call: ToolCalling) -> None:
        await asyncio.sleep(0)
        raise GuardRejected(f"Not {call.tool}.")

    async def hang(turn: TurnStarted) -> None:
        try:
            await asyncio.sleep(PATIENCE_S * 10)
        finally:
            ended.set()

    @tool
    async def act() -> str:
        """Return at once."""
        return "acted"

    harness.set(hook_timeout_s=0.2)
    harness.equip(act, before_turn=[look, hang], before_tool=[required(refuse)])
    harness.script(calls(("act", {})), says("I may not."))
    turn = harness.ask("do it")
    assert seen == ["do it"]
    assert tool_lines(harness, turn) == ["Error: Not act."]
    assert ended.wait(PATIENCE_S)


def test_async_tools_run_in_a_unit_test_without_servers() -> None:
    """`perdure.testing.ask` runs async tools."""

    @tool(effect="pure")
    async def double(number: int) -> int:
        """Double a number."""
        await asyncio.sleep(0)
        return 2 * number

    answer = ask(
        Agent("assistant", "You double.", [double]),
        "double 4",
        model=Scripted(call("double", number=4), "It is 8."),
    )
    assert answer.reply == "It is 8."
