"""`ModelSuite`: behavioural tests that every model must pass.

The tests offer the model the built-in tools `calculator` and `clock`, ask it to compute 12*7+5, and run its tool calls.
The model of a provider is tested against the provider's server or a simulation of that server.

Some tests need a server that behaves in a certain way. They are skipped unless a subclass overrides their fixtures:
`thinking_model`, `cut_off_model` and `unended_model`.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID

import pytest

from perdure.clock import SystemClock
from perdure.errors import DeadlineExceeded, InvalidResponse, ProviderError
from perdure.models import endings
from perdure.models.protocol import (
    CallAborted,
    Message,
    Model,
    ModelCall,
    ModelReply,
    ModelRequest,
    Opaque,
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
        grown.append(Message(Role.ASSISTANT, reply.content, reply.tool_calls, opaque=_stored(reply.opaque)))
        if not reply.tool_calls:
            return grown
        grown += [_result(each) for each in reply.tool_calls]
    raise AssertionError("the model still calls tools after five replies")


def _stored(opaque: Opaque | None) -> Opaque | None:
    """Opaque parts as a later prompt has them: they were stored as JSON."""
    return None if opaque is None else Opaque.from_dict(json.loads(json.dumps(opaque.to_dict())))


def _result(call: ToolCall) -> Message:
    result = calculator.call(calculator.parse(call.arguments), CONTEXT)
    return Message(Role.TOOL, result, tool_call_id=call.id)


class ModelSuite:
    """Tests of a model. Subclass it and define a fixture `model`."""

    @pytest.fixture
    def thinking_model(self) -> Model:
        """A model that thinks before each reply. Its server refuses its own calls without what it sent beside them."""
        pytest.skip("no fixture thinking_model")

    @pytest.fixture
    def cut_off_model(self) -> Model:
        """A model whose server cuts a reply off at its limit of tokens, within the arguments of a call."""
        pytest.skip("no fixture cut_off_model")

    @pytest.fixture
    def unended_model(self) -> Model:
        """A model whose server ends a stream after some text, without a reason for the end."""
        pytest.skip("no fixture unended_model")

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

    def test_thoughts_are_no_part_of_the_text(self, thinking_model: Model) -> None:
        """Thoughts are neither streamed as text nor in the reply, whose text users see and later prompts contain."""
        texts = list[str]()
        reply = ask(thinking_model, STATEMENT, tools=False, call=ModelCall(SystemClock(), 30.0, texts.append))
        assert reply.thoughts
        assert reply.thoughts not in reply.content
        assert "".join(texts) == reply.content

    def test_a_provider_gets_back_what_it_sent(self, thinking_model: Model) -> None:
        """What a reply carries beside its text and calls is stored as JSON, and returns with the next prompt."""
        conversation = turn(thinking_model, QUESTION)
        assert conversation[1].opaque is not None
        assert "89" in conversation[-1].content
        assert "89" in turn(thinking_model, *conversation, QUESTION)[-1].content

    def test_a_provider_gets_nothing_that_another_sent(self, model: Model) -> None:
        """A conversation that began with another provider, whose ids may have any form, goes on."""
        first = turn(model, QUESTION)
        foreign = Opaque("another", "another", {"message": {"reasoning": "x"}, "blocks": 1, "calls": [2]})
        call = replace(first[1].tool_calls[0], id="functions.calculator:0")
        first[1] = replace(first[1], tool_calls=(call,), opaque=foreign)
        first[2] = replace(first[2], tool_call_id=call.id)
        assert "89" in turn(model, *first, QUESTION)[-1].content

    def test_a_reply_that_was_cut_off_says_so(self, cut_off_model: Model) -> None:
        """No call of such a reply runs, because its arguments are incomplete."""
        reply = ask(cut_off_model, QUESTION)
        assert endings.normalized(reply.stop_reason) == endings.LENGTH
        assert not endings.ended_properly(reply)

    def test_a_reply_without_an_end_is_no_reply(self, unended_model: Model) -> None:
        """The connection may have been lost anywhere, so the text may be incomplete."""
        with pytest.raises((InvalidResponse, ProviderError)):
            ask(unended_model, STATEMENT)
