"""Hooks of the agent's capabilities that change a model's reply: what is stored and shown is what they made of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import ModelRetry, RunContext, exceptions
from pydantic_ai.capabilities import AbstractCapability, Hooks
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models import ModelRequestContext
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel
from pydantic_ai.usage import RequestUsage

from perdure import effect
from perdure.turns.lease.claim import Ran
from tests.adapters.pydantic_ai.test_agents import Scripting, _call, _use, streamed
from tests.turns.harness import Harness
from tests.turns.test_cost import counted


class Guard(AbstractCapability[Any]):
    """Changes each reply."""

    def __init__(self, change: Callable[[ModelResponse], ModelResponse]) -> None:
        self.change = change

    async def after_model_request(
        self, ctx: RunContext[Any], *, request_context: ModelRequestContext, response: ModelResponse
    ) -> ModelResponse:
        """Return the changed reply."""
        return self.change(response)


def _redacted(response: ModelResponse) -> ModelResponse:
    parts = [TextPart("[redacted]") if isinstance(each, TextPart) else each for each in response.parts]
    return replace(response, parts=parts)


def _rejecting(response: ModelResponse) -> ModelResponse:
    if "secret" in (response.text or ""):
        raise ModelRetry("without the secret")
    return response


def _stored(harness: Harness) -> str:
    """All that is stored of the turns."""
    return str(harness.sql("SELECT m::text, t::text, s::text FROM messages AS m, turns AS t, sessions AS s"))


@pytest.mark.parametrize("kind", ["capability", "hooks"])
def test_a_reply_that_a_hook_redacts_is_stored_redacted(harness: Harness, kind: str) -> None:
    """Nothing keeps what the model wrote; the next turn's model does not see it either."""

    async def redact(
        ctx: RunContext[Any], *, request_context: ModelRequestContext, response: ModelResponse
    ) -> ModelResponse:
        del ctx, request_context
        return _redacted(response)

    guard: Any = Guard(_redacted) if kind == "capability" else Hooks(after_model_request=redact)
    model = Scripting("the secret is 42", "the secret is 43")
    _use(harness, PydanticAgent(name="assistant", capabilities=[guard]), model.model)
    turn = harness.ask()
    assert turn["reply"]["text"] == "[redacted]"
    session_id = UUID(turn["session_id"])
    assert harness.lines(session_id) == [("user", "hello"), ("assistant", "[redacted]")]
    assert "secret" not in _stored(harness)
    assert turn["steps"] == 1
    harness.ask()
    assert "secret" not in str(model.seen[-1])


def test_what_was_streamed_is_withdrawn(harness: Harness) -> None:
    """The hook sees the text when the person has seen it; nothing of it stays."""

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        del messages, info
        for word in ("the ", "secret"):
            yield word

    seen = streamed(harness)
    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[Guard(_redacted)])
    _use(harness, bare, FunctionModel(stream_function=stream))
    assert harness.ask()["reply"]["text"] == "[redacted]"
    assert "secret" not in "".join(seen)
    assert "secret" not in _stored(harness)


def test_a_hook_may_turn_a_text_into_a_call(harness: Harness) -> None:
    """The call has its intent before it runs, like a call of the model."""
    statuses: list[str] = []

    def to_call(response: ModelResponse) -> ModelResponse:
        if response.text == "look it up":
            return replace(response, parts=[ToolCallPart("look", {}, tool_call_id="c9")])
        return response

    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[Guard(to_call)])

    @bare.tool_plain
    def look() -> str:
        """Look."""
        statuses.extend(row.status for row in harness.sql("SELECT status FROM tool_effects"))
        return "found"

    _use(harness, bare, Scripting("look it up", "it is 7").model)
    turn = harness.ask()
    assert (turn["reply"]["text"], statuses) == ("it is 7", ["intended"])


def test_a_call_that_a_hook_adds_to_others_runs(harness: Harness) -> None:
    """It has its intent before it runs, like the call of the model."""
    statuses: list[list[str]] = []

    def adding(response: ModelResponse) -> ModelResponse:
        if not response.tool_calls:
            return response
        return replace(response, parts=[*response.parts, ToolCallPart("look", {}, tool_call_id="c9")])

    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[Guard(adding)])

    @bare.tool_plain(sequential=True)
    def look() -> str:
        """Look."""
        statuses.append([row.status for row in harness.sql("SELECT status FROM tool_effects ORDER BY position")])
        return "found"

    _use(harness, bare, Scripting([_call("look")], "done").model)
    assert harness.ask()["reply"]["text"] == "done"
    assert statuses == [["intended", "intended"], ["done", "intended"]]


def _careful(response: ModelResponse) -> ModelResponse:
    """The reply with less to pay, and without the secret."""
    parts = [replace(each, args='{"amount": 1}') if isinstance(each, ToolCallPart) else each for each in response.parts]
    return _redacted(replace(response, parts=parts)) if response.tool_calls else response


@pytest.mark.parametrize("crashes", [False, True])
def test_a_reply_with_calls_is_stored_as_a_hook_leaves_it(harness: Harness, *, crashes: bool) -> None:
    """Its text and its arguments are those of the hook, also for the worker that continues the turn."""
    paid: list[int] = []
    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[Guard(_careful)])

    @bare.tool_plain(metadata=effect("idempotent"))
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    _use(harness, bare, Scripting([TextPart("the secret is 42"), _call("pay", amount=100)], "done").model)
    sent = harness.send()
    if crashes:
        with harness.crashing("before", "turns.step", 2):
            harness.run(sent.session_id)
        harness.move(31)
    harness.run(sent.session_id)
    assert harness.lines(sent.session_id)[1:] == [("assistant", "[redacted]"), ("tool", "paid"), ("assistant", "done")]
    assert paid == [1] * (2 if crashes else 1)
    assert "secret" not in _stored(harness)


def test_a_reply_with_calls_that_a_hook_fails_on_runs_none(harness: Harness) -> None:
    """Nothing of it is stored: the next attempt asks the model again, and the hook sees what it replies."""
    seen: list[str] = []

    def policy(response: ModelResponse) -> ModelResponse:
        seen.append(response.text or "")
        if len(seen) == 1:
            raise ConnectionError("the policy's service is unavailable")
        return response

    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[Guard(policy)])
    bare.tool_plain(name="look")(_look)
    _use(harness, bare, Scripting([TextPart("first"), _call("look")], "second").model)
    sent = harness.send()
    harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    assert harness.lines(sent.session_id) == [("user", "hello"), ("assistant", "second")]
    assert seen == ["first", "second"]
    assert not harness.sql("SELECT status FROM tool_effects")


def test_a_reply_with_calls_that_a_hook_sends_back(harness: Harness) -> None:
    """It is stored with calls that did not run, and the worker that continues the turn knows why."""

    def rejecting(response: ModelResponse) -> ModelResponse:
        if response.tool_calls:
            raise ModelRetry("do not look")
        return response

    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[Guard(rejecting)])
    bare.tool_plain(name="look")(_look)
    model = Scripting([_call("look")], "lost", "done")
    _use(harness, bare, model.model)
    sent = harness.send()
    with harness.crashing("before", "turns.settle"):
        harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    closed = [("assistant", ""), ("tool", "Error: this call was not run.")]
    assert harness.lines(sent.session_id)[1:] == [*closed, ("assistant", "done")]
    assert "do not look" in str(model.seen[-1])


@pytest.mark.skipif(not hasattr(exceptions, "RetryModelRequest"), reason="pydantic-ai 2.64 has no such exception")
@pytest.mark.parametrize("line", ["bad", [TextPart("bad"), _call("look")]])
def test_a_reply_that_a_hook_drops_is_no_message(harness: Harness, line: Any) -> None:
    """`RetryModelRequest` asks the model again as if it had not replied. What it used counts."""

    def dropping(response: ModelResponse) -> ModelResponse:
        if response.text == "bad":
            raise exceptions.RetryModelRequest
        return response

    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[Guard(dropping)])
    bare.tool_plain(name="look")(_look)
    model = Scripting(line, "good", "fine")
    _use(harness, bare, model.model)
    seen = streamed(harness)
    turn = harness.ask()
    assert harness.lines(UUID(turn["session_id"])) == [("user", "hello"), ("assistant", "good")]
    assert "bad" not in "".join(seen)
    assert turn["usage"]["output_tokens"] >= 2
    second = harness.ask()
    assert "bad" not in str(model.seen[-1])
    assert turn["usage"]["input_tokens"] > second["usage"]["input_tokens"]


@pytest.mark.parametrize("calls", [[], [_call("look")]])
def test_a_reply_that_the_model_goes_on_with_is_one_message(harness: Harness, calls: list[Any]) -> None:
    """Anthropic pauses a long turn of its server's tools (`pause_turn`). What both requests used counts."""
    used, paused = RequestUsage(input_tokens=100, output_tokens=10), {"finish_reason": "pause_turn"}
    first = ModelResponse(
        parts=[TextPart("one ")], provider_response_id="r1", state="suspended", provider_details=paused, usage=used
    )
    second = ModelResponse(parts=[TextPart("two"), *calls], provider_response_id="r2", usage=used)
    bare = PydanticAgent[Any, Any](name="assistant")
    bare.tool_plain(name="look")(_look)
    model = Scripting(first, second, *["done"] * len(calls), "fine")
    _use(harness, bare, model.model, memory=False)
    turn = harness.ask()
    rest = [("tool", "found"), ("assistant", "done")] if calls else []
    assert harness.lines(UUID(turn["session_id"])) == [("user", "hello"), ("assistant", "one two"), *rest]
    assert (turn["usage"]["input_tokens"] >= 200, turn["steps"]) == (True, 1 + len(calls))
    harness.ask()
    assert str(model.seen[-1]).count("UserPromptPart") == 2


def test_what_was_streamed_beside_calls_stays(harness: Harness) -> None:
    """A hook that changes nothing withdraws nothing."""

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        del info
        yield "Looking."
        if len(messages) < 3:
            yield {0: DeltaToolCall("look", "{}", tool_call_id="c1")}

    seen = streamed(harness)
    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[Guard(lambda response: response)])
    bare.tool_plain(name="look")(_look)
    _use(harness, bare, FunctionModel(stream_function=stream), memory=False)
    assert harness.ask()["status"] == "done"
    assert seen == ["Looking.", "Looking."]


def test_a_reply_that_a_hook_sends_back(harness: Harness) -> None:
    """The model sees what it wrote, as in a plain run, and its second reply is that of the turn."""
    model = Scripting("the secret is 42", "I may not say")
    _use(harness, PydanticAgent(name="assistant", capabilities=[Guard(_rejecting)]), model.model)
    turn = harness.ask()
    assert turn["reply"]["text"] == "I may not say"
    assert "without the secret" in str(model.seen[-1])


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_call_that_a_hook_dropped_does_not_run_after_a_crash(harness: Harness, moment: Any) -> None:
    """No row has the call: the transcript has the reply as the hook left it."""
    ran: list[str] = []

    def without_payment(response: ModelResponse) -> ModelResponse:
        parts = [each for each in response.parts if not (isinstance(each, ToolCallPart) and each.tool_name == "pay")]
        return replace(response, parts=parts)

    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[Guard(without_payment)])

    @bare.tool_plain(metadata=effect("idempotent"))
    def look() -> str:
        """Look."""
        ran.append("look")
        return "found"

    @bare.tool_plain(metadata=effect("idempotent"))
    def pay() -> str:
        """Pay."""
        ran.append("pay")
        return "paid"

    _use(harness, bare, Scripting([_call("look", "c1"), _call("pay", "c2")], *["done"] * 2).model)
    sent = harness.send()
    with harness.crashing(moment, "turns.step", 2):
        harness.run(sent.session_id)
    harness.move(31)
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "done"
    assert "pay" not in ran
    rows = harness.sql("SELECT tool, status FROM tool_effects ORDER BY position")
    assert [(row.tool, row.status) for row in rows] == [("look", "done")]
    assert "pay" not in _stored(harness)


def test_hooks_that_change_nothing_cost_nothing(harness: Harness) -> None:
    """A turn of an agent with a guard has the commits of one without, each in a session that has begun."""
    counts: list[list[str]] = []
    guards: list[list[Any]] = [[], [], [Guard(lambda response: response)]]
    for capabilities in guards:
        bare = PydanticAgent[Any, Any](name="assistant", capabilities=capabilities)
        bare.tool_plain(name="look", metadata=effect("pure"))(_look)
        _use(harness, bare, Scripting([_call("look")], "done").model)
        with counted(harness.database) as (_, commits):
            assert harness.ask()["status"] == "done"
        counts.append(commits)
    assert counts[1] == counts[2]


def _look() -> str:
    """Look."""
    return "found"
