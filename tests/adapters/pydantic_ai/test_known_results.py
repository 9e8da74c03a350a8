"""Results that are known when a run ends before its next request: the rows have them, and no call is in doubt."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import ModelRetry, UsageLimits

from tests.adapters.pydantic_ai.test_agents import Scripting, _call, _use
from tests.turns.harness import Harness


class Paying:
    """An agent with the unsafe tool `pay`, which says how it ended."""

    def __init__(self, *ends: str | Exception, **given: Any) -> None:
        self.ran = 0
        self.bare = PydanticAgent[Any, Any](name="assistant", **given)
        self._ends = list(ends)

        @self.bare.tool_plain
        def pay() -> str:
            """Pay."""
            self.ran += 1
            end = self._ends.pop(0)
            if isinstance(end, Exception):
                raise end
            return end


def _calls(harness: Harness) -> list[tuple[str, str]]:
    rows = harness.sql("SELECT status, result FROM tool_effects ORDER BY message_seq, position")
    return [(row.status, row.result) for row in rows]


def test_a_limit_that_is_reached_after_a_call(harness: Harness) -> None:
    """The turn fails, and says what the call did: the money is paid."""
    paying = Paying("paid")
    _use(harness, paying.bare, Scripting([_call("pay")]).model, usage_limits=UsageLimits(request_limit=1))
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"]) == ("failed", "BUDGET_EXHAUSTED")
    assert _calls(harness) == [("done", "paid")]


def test_retries_that_are_exhausted(harness: Harness) -> None:
    paying = Paying(ModelRetry("again"), ModelRetry("again"))
    _use(harness, paying.bare, Scripting([_call("pay")], [_call("pay")]).model)
    assert harness.ask()["status"] == "failed"
    assert [status for status, _ in _calls(harness)] == ["failed", "failed"]


@pytest.mark.parametrize("number", [1, 2])
def test_an_error_of_the_agent_after_a_call(harness: Harness, number: int) -> None:
    """The next attempt goes on with the result, although the tool may not run again."""
    paying, errors = Paying(*["paid"] * number), [RuntimeError("the template is missing")]

    @paying.bare.instructions
    def instructions() -> str:
        if paying.ran and errors:
            raise errors.pop()
        return "Pay."

    model = Scripting([_call("pay", f"c{each}") for each in range(number)], "done")
    _use(harness, paying.bare, model.model)
    sent = harness.send()
    harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "done"
    assert paying.ran == number
    assert [status for status, _ in _calls(harness)] == ["done"] * number
    assert "paid" in str(model.seen[-1])
    assert "unknown" not in str(model.seen[-1])
