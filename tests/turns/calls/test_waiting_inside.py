"""A tool or a hook cannot wait for another turn: it would keep the place that the other turn needs."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from perdure import Sent, ToolContext, required, result, send, tool
from perdure.errors import DeadlineExceeded, InvalidRequest
from tests.turns.harness import Harness
from tests.turns.inbox.test_sending import application, routed, woken
from tests.turns.scripted import calls, says

__all__ = ["application", "woken"]

REFUSED = "perdure.result cannot wait inside {}: the other turn may need the place that this turn occupies."


def _plainly(turn: UUID) -> Mapping[str, Any]:
    return result(turn, timeout=60).body


def _in_a_thread(turn: UUID) -> Mapping[str, Any]:
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, _plainly, turn).result(60)


WAITS = {"plainly": _plainly, "in a thread with the context": _in_a_thread}


@pytest.fixture
def other(harness: Harness, application: Engine, woken: list[str]) -> UUID:
    """An accepted turn of the user whose turns the tests run."""
    with application.begin() as connection:
        return send(connection, user_id="ana", text="the other", conversation="other").turn_id


def _tool_result(harness: Harness) -> str:
    [row] = harness.sql("SELECT content FROM messages WHERE role = 'tool'")
    return str(row.content)


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_tool_cannot_wait(harness: Harness, other: UUID, wait: Callable[[UUID], dict[str, Any]]) -> None:
    """The model reads at once that the tool cannot wait, and what its author can do. The turn continues."""

    @tool
    def ask() -> str:
        """Ask."""
        return str(wait(other)["reply"])

    harness.equip(ask)
    harness.script(calls(("ask", {})), says("I could not ask."))
    assert harness.ask("go")["reply"]["text"] == "I could not ask."
    assert REFUSED.format("the tool ask") in _tool_result(harness)
    assert "celery_tool" in _tool_result(harness)


def test_an_async_tool_cannot_wait(harness: Harness, other: UUID) -> None:
    """An async tool cannot wait either, not even in a thread of `asyncio.to_thread`."""

    @tool
    async def ask() -> str:
        """Ask."""
        return str(await asyncio.to_thread(_plainly, other))

    harness.equip(ask)
    harness.script(calls(("ask", {})), says("ok"))
    harness.ask("go")
    assert REFUSED.format("the tool ask") in _tool_result(harness)


def test_a_hook_cannot_wait(harness: Harness, other: UUID) -> None:
    """A hook before a turn or a call cannot wait."""
    harness.equip(before_turn=[required(lambda _: _plainly(other))])
    failed = harness.ask("go")
    assert failed["error"]["code"] == "INVALID_REQUEST"
    assert REFUSED.format("the hook")[:40] in failed["error"]["message"]


def test_the_decision_about_approval_cannot_wait(harness: Harness, other: UUID) -> None:
    """A function that decides about approval runs in the turn. It fails at once, so the call needs approval."""

    @tool(requires_approval=lambda _: bool(_plainly(other)))
    def pay() -> str:
        """Pay."""
        return "paid"

    harness.equip(pay)
    harness.script(calls(("pay", {})))
    assert harness.ask("go")["status"] == "waiting_approval"


def test_a_tool_may_send_and_may_look(harness: Harness, application: Engine, other: UUID) -> None:
    """A tool may send a message without waiting. It may read a settled turn, and look at one with `timeout=0`."""
    sent: list[Sent] = []

    @tool
    def delegate(context: ToolContext) -> str:
        """Delegate."""
        with application.begin() as connection:
            sent.append(send(connection, user_id=context.user_id, text="do it", conversation="aside"))
        with pytest.raises(DeadlineExceeded):
            result(sent[0], timeout=0)
        return str(result(other).reply)

    harness.script(says("the other's answer"))
    routed(harness, Sent(other))
    harness.equip(delegate)
    harness.script(calls(("delegate", {})), says("Delegated."))
    assert harness.ask("go")["reply"]["text"] == "Delegated."
    assert _tool_result(harness) == "the other's answer"
    harness.script(says("Done."))
    assert routed(harness, sent[0])["reply"]["text"] == "Done."


def test_outside_of_a_turn_waiting_is_allowed(harness: Harness, other: UUID) -> None:
    """A thread of the application waits as before, also in a process that runs tools."""
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(result(other, timeout=0.01))
        except (DeadlineExceeded, InvalidRequest) as error:
            found.append(error)

    @tool
    def ask() -> str:
        """Ask."""
        return "asked"

    harness.equip(ask)
    harness.script(calls(("ask", {})), says("ok"))
    harness.ask("go")
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(20)
    assert [type(each) for each in found] == [DeadlineExceeded]
