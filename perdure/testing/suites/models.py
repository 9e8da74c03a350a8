"""`ModelSuite`: behavioural tests that every model must pass.

The tests offer the model the built-in tools `calculator` and `clock`, ask it to compute 12*7+5, and run its tool calls.
The model of a provider is tested against the provider's server or a simulation of that server.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID

import pytest

from perdure.clock import SystemClock
from perdure.errors import DeadlineExceeded
from perdure.models.protocol import (
    CallAborted,
    Message,
    Model,
    ModelCall,
    ModelReply,
    ModelRequest,
    Role,
    ToolCall,
)
from perdure.tools.builtin import calculator, clock
from perdure.tools.registry import ToolContext

SYSTEM = Message(Role.SYSTEM, "You are a helpful assistant. Use the calculator for arithmetic.")
QUESTION = Message(Role.USER, "what is 12*7+5?")
STATEMENT = Message(Role.USER, "My name is Ana and I live in Lyon.")
CONTEXT = ToolContext("ana", UUID(int=1), UUID(int=2), UUID(int=3), "cli", threading.Event())


def new_call(timeout_s: float = 30.0) -> ModelCall:
    """A call whose streamed text is discarded."""
    return ModelCall(SystemClock(), timeout_s)


def ask(model: Model, *messages: Message, tools: bool = True, call: ModelCall | None = None) -> ModelReply:
    """The model's reply to a conversation, with the two built-in tools unless `tools` is False."""
    schemas = (calculator.schema(), clock.schema()) if tools else ()
    return model.respond(ModelRequest((SYSTEM, *messages), schemas), call or new_call())


def turn(model: Model, *messages: Message) -> list[Message]:
    """Run one turn; returns `messages` extended by the turn's tool calls, results and answer."""
    grown = list(messages)
    for _ in range(5):
        reply = ask(model, *grown)
        grown.append(Message(Role.ASSISTANT, reply.content, reply.tool_calls, opaque=reply.opaque))
        if not reply.tool_calls:
            return grown
        grown += [_result(each) for each in reply.tool_calls]
    raise AssertionError("the model still calls tools after five replies")


def _result(call: ToolCall) -> Message:
    result = calculator.call(calculator.parse(call.arguments), CONTEXT)
    return Message(Role.TOOL, result, tool_call_id=call.id)


class ModelSuite:
    """Tests of a model. Subclass it and define a fixture `model`."""

    def test_calls_a_tool_and_answers_from_its_result(self, model: Model) -> None:
        """A turn with one tool call has two steps: the call, and the answer from its result."""
        conversation = turn(model, QUESTION)
        assert [each.role for each in conversation] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
        assert conversation[1].tool_calls[0].name == "calculator"
        assert "89" in conversation[-1].content

    def test_accepts_a_history_in_which_call_ids_repeat(self, model: Model) -> None:
        """A call id is unique only within one reply, so the history in a prompt may contain an id twice."""
        first = turn(model, QUESTION)
        assert "89" in turn(model, *first, *first, QUESTION)[-1].content

    def test_accepts_a_history_with_malformed_arguments(self, model: Model) -> None:
        """A malformed tool call stays in the transcript, and must not make every later prompt invalid."""
        first = turn(model, QUESTION)
        garbled = replace(first[1].tool_calls[0], name="no such tool!", arguments='{"expression": 12*')
        first[1] = replace(first[1], tool_calls=(garbled,))
        assert "89" in turn(model, *first, QUESTION)[-1].content

    def test_streams_exactly_the_text_of_its_reply(self, model: Model) -> None:
        """Channels show the deltas first and later the committed text, so the two must be equal."""
        deltas: list[str] = []
        reply = ask(model, STATEMENT, tools=False, call=ModelCall(SystemClock(), 30.0, deltas.append))
        assert "".join(deltas) == reply.content
        assert len(deltas) > 1

    def test_calls_no_tool_that_it_was_not_given(self, model: Model) -> None:
        """A request without tools, such as the request for a summary, gets a reply without tool calls."""
        reply = ask(model, QUESTION, tools=False)
        assert reply.tool_calls == ()
        assert reply.content

    def test_reports_usage_model_and_stop_reason(self, model: Model) -> None:
        """The engine sums the usage over a turn, and stores the model's name with each message."""
        reply = ask(model, STATEMENT, tools=False)
        assert reply.usage is not None
        assert reply.usage.input_tokens > 0
        assert reply.usage.output_tokens > 0
        assert reply.model
        assert reply.stop_reason == "stop"
        assert ask(model, QUESTION).stop_reason == "tool_calls"

    def test_does_not_begin_an_aborted_call(self, model: Model) -> None:
        """A turn that is cancelled before its model call must not send a request to the provider."""
        call = new_call()
        call.abort()
        with pytest.raises(CallAborted):
            ask(model, STATEMENT, call=call)

    def test_does_not_begin_a_call_whose_deadline_has_passed(self, model: Model) -> None:
        """A turn that has used up its time must not send a request to the provider."""
        with pytest.raises(DeadlineExceeded):
            ask(model, STATEMENT, call=new_call(timeout_s=0.0))

    def test_an_abort_ends_the_stream(self, model: Model) -> None:
        """A cancelled turn streams no further text."""
        deltas: list[str] = []

        def abort_at_first(text: str) -> None:
            deltas.append(text)
            call.abort()

        call = ModelCall(SystemClock(), 30.0, abort_at_first)
        with pytest.raises(CallAborted):
            ask(model, STATEMENT, tools=False, call=call)
        assert len(deltas) == 1

    def test_may_be_shared_by_threads(self, model: Model) -> None:
        """One model object serves hundreds of concurrent turns, and each receives its own reply."""
        with ThreadPoolExecutor(16) as pool:
            turns = list(pool.map(lambda _: turn(model, QUESTION), range(32)))
        assert all("89" in each[-1].content for each in turns)
