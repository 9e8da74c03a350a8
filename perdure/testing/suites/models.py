"""The required behaviour of every model.

The tests ask the model to compute 12*7+5 with the built-in tools `calculator` and `clock`, and run its tool calls as
the step loop does. A provider's model is tested against the provider or a server that answers in its place.
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
    """A model's reply to a conversation."""
    schemas = (calculator.schema(), clock.schema()) if tools else ()
    return model.respond(ModelRequest((SYSTEM, *messages), schemas), call or new_call())


def turn(model: Model, *messages: Message) -> list[Message]:
    """Run one turn; returns the conversation with its calls, results and answer."""
    grown = list(messages)
    for _ in range(5):
        reply = ask(model, *grown)
        grown.append(Message(Role.ASSISTANT, reply.content, reply.tool_calls))
        if not reply.tool_calls:
            return grown
        grown += [_result(each) for each in reply.tool_calls]
    raise AssertionError("the model calls tools for ever")


def _result(call: ToolCall) -> Message:
    result = calculator.call(calculator.parse(call.arguments), CONTEXT)
    return Message(Role.TOOL, result, tool_call_id=call.id)


class ModelSuite:
    """The tests. Subclass it and define a fixture `model`."""

    def test_asks_for_a_tool_and_answers_from_its_result(self, model: Model) -> None:
        """A turn with a tool consists of these two steps."""
        conversation = turn(model, QUESTION)
        assert [each.role for each in conversation] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
        assert conversation[1].tool_calls[0].name == "calculator"
        assert "89" in conversation[-1].content

    def test_accepts_a_history_in_which_call_ids_repeat(self, model: Model) -> None:
        """A provider's call id is unique only within one reply, and the whole history is sent again."""
        first = turn(model, QUESTION)
        assert "89" in turn(model, *first, *first, QUESTION)[-1].content

    def test_accepts_a_history_with_arguments_that_are_no_json(self, model: Model) -> None:
        """A malformed call must not make every later prompt of the session invalid."""
        first = turn(model, QUESTION)
        garbled = replace(first[1].tool_calls[0], name="no such tool!", arguments='{"expression": 12*')
        first[1] = replace(first[1], tool_calls=(garbled,))
        assert "89" in turn(model, *first, QUESTION)[-1].content

    def test_streams_exactly_what_it_replies(self, model: Model) -> None:
        """Channels show deltas first and the committed text after: they must not differ."""
        heard: list[str] = []
        reply = ask(model, STATEMENT, tools=False, call=ModelCall(SystemClock(), 30.0, heard.append))
        assert "".join(heard) == reply.content
        assert len(heard) > 1

    def test_calls_no_tool_that_it_was_not_given(self, model: Model) -> None:
        """Fallback and summary calls are made without tools."""
        reply = ask(model, QUESTION, tools=False)
        assert reply.tool_calls == ()
        assert reply.content

    def test_reports_usage_model_and_stop_reason(self, model: Model) -> None:
        """Usage is summed over a turn and the model's name kept with each message."""
        reply = ask(model, STATEMENT, tools=False)
        assert reply.usage.input_tokens > 0
        assert reply.usage.output_tokens > 0
        assert reply.model
        assert reply.stop_reason == "stop"
        assert ask(model, QUESTION).stop_reason == "tool_calls"

    def test_does_not_begin_a_call_that_is_over(self, model: Model) -> None:
        """A turn cancelled between claim and call must not cost a request."""
        call = new_call()
        call.abort()
        with pytest.raises(CallAborted):
            ask(model, STATEMENT, call=call)

    def test_does_not_begin_a_call_whose_deadline_has_passed(self, model: Model) -> None:
        """A turn that has used up its time must not cost a request."""
        with pytest.raises(DeadlineExceeded):
            ask(model, STATEMENT, call=new_call(timeout_s=0.0))

    def test_stops_when_the_call_is_ended_while_it_streams(self, model: Model) -> None:
        """A cancelled turn streams no further text."""
        heard: list[str] = []

        def abort_at_first(text: str) -> None:
            heard.append(text)
            call.abort()

        call = ModelCall(SystemClock(), 30.0, abort_at_first)
        with pytest.raises(CallAborted):
            ask(model, STATEMENT, tools=False, call=call)
        assert len(heard) == 1

    def test_may_be_shared_by_threads(self, model: Model) -> None:
        """One model serves hundreds of turns in one process, and each gets its own reply."""
        with ThreadPoolExecutor(16) as pool:
            turns = list(pool.map(lambda _: turn(model, QUESTION), range(32)))
        assert all("89" in each[-1].content for each in turns)
