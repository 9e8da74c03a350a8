"""What a run that continues a turn, after a crash or a wait, knows of the turn: its prompt and its usage."""

from __future__ import annotations

import threading
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import BinaryContent, RunContext, ToolReturn, UsageLimits
from pydantic_ai.messages import ModelResponse, UserPromptPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.usage import RequestUsage, RunUsage

from perdure import effect
from perdure.adapters.pydantic_ai import messages
from perdure.adapters.pydantic_ai.messages import Note
from perdure.database.engine import Moment
from perdure.models.protocol import Opaque, Role, Usage
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.transcript import Entry
from tests.adapters.pydantic_ai.test_agents import Scripting, _call, _use
from tests.adapters.pydantic_ai.test_files import IMAGE, PARTS, PDF
from tests.turns.harness import PATIENCE_S, Harness


class _Asked:
    """An agent whose instructions, system prompt and tools record the prompt of the run."""

    def __init__(self, *, requires_approval: bool = False) -> None:
        self.seen: list[Any] = []
        self.bare = bare = PydanticAgent[Any, Any](name="assistant")

        @bare.instructions
        def instructions(ctx: RunContext[Any]) -> str:
            self.seen.append(ctx.prompt)
            return f"They ask: {ctx.prompt}"

        @bare.system_prompt
        def system_prompt(ctx: RunContext[Any]) -> str:
            self.seen.append(ctx.prompt)
            return f"They asked: {ctx.prompt}"

        @bare.tool(metadata=effect("pure"), requires_approval=requires_approval)
        def look(ctx: RunContext[Any]) -> ToolReturn:
            """Look."""
            self.seen.append(ctx.prompt)
            return ToolReturn("seen", content="beside the result")


@pytest.mark.parametrize(("moment", "nth"), [("after", 1), ("before", 2), ("after", 2)])
def test_the_prompt_after_a_crash(harness: Harness, moment: Moment, nth: int) -> None:
    """Before and after the commit of the results, with which a tool may have returned content of its own."""
    asked = _Asked()
    model = Scripting([_call("look")], *["done"] * 2)
    _use(harness, asked.bare, model.model)
    sent = harness.send("What is it?")
    with harness.crashing(moment, "turns.step", nth):
        harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "done"
    assert set(asked.seen) == {"What is it?"}
    told = [part.content for each in model.seen[-1] for part in each.parts if isinstance(part, UserPromptPart)]
    assert [each for each in told if not isinstance(each, Note)] == ["What is it?", "beside the result"]
    assert model.instructions[-1] is not None
    assert "They ask: What is it?" in model.instructions[-1]


def test_the_prompt_after_an_approval(harness: Harness) -> None:
    """Without a crash."""
    asked = _Asked(requires_approval=True)
    _use(harness, asked.bare, Scripting([_call("look")], "done").model)
    turn = harness.ask("What is it?")
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": "c1", "decision": "approve"}))
    harness.run(UUID(turn["session_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "done"
    assert set(asked.seen) == {"What is it?"}


def test_the_prompt_after_a_message_has_joined(harness: Harness) -> None:
    """It is that of the turn's beginning, as in a plain run to which a message is added."""
    asked, entered, gate = _Asked(), threading.Event(), threading.Event()

    @asked.bare.tool_plain
    def wait() -> str:
        """Wait."""
        entered.set()
        gate.wait(PATIENCE_S)
        return "waited"

    _use(harness, asked.bare, Scripting([_call("wait")], [_call("look")], "done").model)
    sent = harness.send("first")
    worker = threading.Thread(target=harness.run, args=(sent.session_id,), daemon=True)
    worker.start()
    assert entered.wait(PATIENCE_S)
    harness.send("second", on_busy="steer")
    gate.set()
    worker.join(PATIENCE_S)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert set(asked.seen) == {"first"}


def _bill(calls: list[Any]) -> ModelResponse:
    usage = RequestUsage(input_tokens=10, output_tokens=1, cost=Decimal(1), details={"reasoning_tokens": 2})
    return ModelResponse(parts=calls, usage=usage)


def _run_to_the_end(harness: Harness, turn_id: UUID, session_id: UUID) -> dict[str, Any]:
    """Approve each call for which the turn waits."""
    for _ in range(9):
        turn = harness.turn(turn_id)
        if turn["status"] != "waiting_approval":
            return turn
        call_id = turn["pending_approvals"][0]["call_id"]
        decide(harness.runtime, turn_id, parse_decision({"call_id": call_id, "decision": "approve"}))
        harness.run(session_id)
    raise AssertionError("the turn does not end")


def test_a_limit_of_cost_counts_the_turn_over_approvals(harness: Harness) -> None:
    """As a plain run, the turn ends with the reply that exceeds it."""
    bare = PydanticAgent[Any, Any](name="assistant")

    @bare.tool_plain(requires_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    model = Scripting(*[_bill([_call("pay", f"c{number}")]) for number in range(9)])
    _use(harness, bare, model.model, usage_limits=UsageLimits(cost_limit=Decimal(3)))
    turn = harness.ask()
    turn = _run_to_the_end(harness, UUID(turn["turn_id"]), UUID(turn["session_id"]))
    assert (turn["status"], turn["error"]["code"], len(model.seen)) == ("failed", "BUDGET_EXHAUSTED", 4)


def test_what_a_tool_adds_counts_after_a_crash(harness: Harness) -> None:
    """An agent that a tool runs with `usage=ctx.usage` adds its requests."""
    bare, seen = PydanticAgent[Any, Any](name="assistant"), list[RunUsage]()

    @bare.tool(metadata=effect("pure"))
    def research(ctx: RunContext[Any]) -> str:
        """Research."""
        seen.append(RunUsage() + ctx.usage)
        ctx.usage.incr(RunUsage(requests=2, input_tokens=100, cost=Decimal(5)))
        return "found"

    model = Scripting(*[_bill([_call("research", f"c{number}")]) for number in range(2)], "done")
    _use(harness, bare, model.model)
    sent = harness.send()
    with harness.crashing("after", "turns.step", 3):
        harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    first, second = seen
    assert (first.requests, first.tool_calls, first.cost, first.input_tokens) == (1, 0, Decimal(1), 10)
    assert (second.requests, second.tool_calls, second.cost, second.input_tokens) == (4, 1, Decimal(7), 120)
    assert second.details == {"reasoning_tokens": 4}


def _priced(*_: Any) -> ModelResponse:
    return ModelResponse(
        parts=[_call("pay")],
        usage=RequestUsage(input_tokens=1000, output_tokens=10),
        model_name="gpt-4o",
        provider_name="openai",
        finish_reason="tool_call",
    )


def test_a_cost_that_pydantic_ai_computes(harness: Harness) -> None:
    """It is not in the reply when the reply is committed."""
    bare, costs = PydanticAgent[Any, Any](name="assistant"), list[Any]()

    @bare.tool(requires_approval=True)
    def pay(ctx: RunContext[Any]) -> str:
        """Pay."""
        costs.append(ctx.usage.cost)
        raise ValueError

    _use(harness, bare, FunctionModel(_priced, model_name="gpt-4o"))
    turn = harness.ask()
    _run_to_the_end(harness, UUID(turn["turn_id"]), UUID(turn["session_id"]))
    assert costs == [_priced().cost().total_price]


def test_the_usage_of_rows_that_other_agents_wrote() -> None:
    """What is reported of a reply without pydantic-ai's message counts, and a record that cannot be read does not."""
    turn = UUID(int=1)
    unreadable = Opaque(messages.ENDPOINT, "9.0", {messages.USAGE: {"requests": "many"}})
    rows = [
        Entry(turn, Role.USER, "go", usage=Usage(3, 4)),
        Entry(turn, Role.ASSISTANT, "said", usage=Usage(10, 1)),
        Entry(turn, Role.TOOL, "seen", opaque=unreadable),
    ]
    assert messages.usage_of_run(rows) == RunUsage(requests=1, input_tokens=13, output_tokens=5)


def test_a_prompt_with_files(harness: Harness) -> None:
    """A run that continues the turn has the prompt as the first run has it."""
    bare, prompts = PydanticAgent[Any, Any](name="assistant"), list[Any]()

    @bare.tool(metadata=effect("pure"))
    def look(ctx: RunContext[Any]) -> str:
        """Look."""
        prompts.append(ctx.prompt)
        return "seen"

    model = Scripting([_call("look")], [_call("look", "c2")], "done")
    _use(harness, bare, model.model)
    sent = harness.send("", parts=PARTS)
    with harness.crashing("after", "turns.step", 3):
        harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    first, second = prompts
    assert [each.data for each in first if isinstance(each, BinaryContent)] == [IMAGE, PDF]
    assert first == second
    assert str(model.seen[-1]).count("Look:") == 1
