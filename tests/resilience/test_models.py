"""Retries, breakers and fallbacks of models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import pytest

from perdure.clock import MovedClock, SystemClock
from perdure.errors import (
    CircuitBreakerOpen,
    ContextTooLong,
    DeadlineExceeded,
    InvalidResponse,
    ProviderError,
    RateLimited,
    SettingsError,
)
from perdure.models.offline import OfflineModel
from perdure.models.protocol import (
    CallAborted,
    Message,
    Model,
    ModelCall,
    ModelReply,
    ModelRequest,
    Role,
    ToolCall,
    ToolSchema,
)
from perdure.models.resilient import FallbackModels, FallbackRequest, GuardedModel, ResilientModel, wait_within
from perdure.models.resolve import Models
from perdure.models.without_tools import flatten_tool_calls
from perdure.resilience.registry import Breakers
from perdure.settings import BreakerSettings, RetrySettings, Settings
from perdure.text.patterns import compiled
from perdure.text.quoting import NOTE

_MARK = compiled(r"<(/?)tool_result [0-9a-f]{16}>")
Line = str | ModelReply | BaseException | Callable[[ModelCall], ModelReply]
REQUEST = ModelRequest((Message(Role.SYSTEM, "Be kind."), Message(Role.USER, "Hello")))
DOWN = ProviderError("down", transient=True)


class Scripted:
    """A model that uses one of `lines` for each call, in order, and then repeats the last line.

    A line is a reply to stream as two deltas, an error to raise, or a function to call.
    """

    def __init__(self, name: str, *lines: Line) -> None:
        self.name = name
        self.requests: list[ModelRequest] = []
        self._lines = list(lines)

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        call.remaining()
        self.requests.append(request)
        line = self._lines.pop(0) if len(self._lines) > 1 else self._lines[0]
        if isinstance(line, BaseException):
            raise line
        if isinstance(line, str):
            line = ModelReply(line)
        if isinstance(line, ModelReply):
            half = len(line.content) // 2
            call.delta(line.content[:half])
            call.delta(line.content[half:])
            return line
        return line(call)


@dataclass
class Harness:
    """A clock and breakers. `streamed` has the calls' deltas. `waits` has the seconds waited between attempts."""

    clock: MovedClock = field(default_factory=MovedClock)
    streamed: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.breakers = Breakers(BreakerSettings(failure_threshold=2, cooldown_s=60), self.clock)

    def call(self, timeout_s: float = 300) -> ModelCall:
        """A call that appends its deltas to `streamed`, and "<rewind>" for each rewind."""
        return ModelCall(self.clock, timeout_s, self.streamed.append, lambda: self.streamed.append("<rewind>"))

    def guard(self, model: Model, timeout_s: float = 120) -> GuardedModel:
        """`model` with a breaker and retries. The waits between attempts only advance the clock."""
        breaker = self.breakers.get(f"llm:{model.name}")
        return GuardedModel(model, breaker, RetrySettings(jitter=0), timeout_s, wait=self._wait, draw=lambda: 0.5)

    def resilient(self, model: Model, *others: Model) -> ResilientModel:
        """`model` with `others` as its fallback models."""
        return ResilientModel(self.guard(model), FallbackModels([self.guard(other) for other in others]))

    def failures(self, name: str) -> int:
        """The failure count of a model's breaker."""
        return {each.name: each.failure_count for each in self.breakers.list()}[f"llm:{name}"]

    def _wait(self, call: ModelCall, seconds: float) -> None:
        call.check()
        self.waits.append(seconds)
        self.clock.advance(timedelta(seconds=seconds))


@pytest.fixture
def harness() -> Harness:
    """A new `Harness`."""
    return Harness()


def hangs(harness: Harness) -> Callable[[ModelCall], ModelReply]:
    """A provider that streams half a word and then nothing until the call's deadline."""

    def line(call: ModelCall) -> ModelReply:
        call.delta("hal")
        harness.clock.advance(timedelta(seconds=call.remaining()))
        call.remaining()
        raise AssertionError("the deadline has passed")

    return line


def breaks_off(call: ModelCall) -> ModelReply:
    """A provider that closes the connection in the middle of its reply."""
    call.delta("hal")
    raise ProviderError("The connection was lost.", transient=True) from ConnectionResetError()


# --- guarded


def test_a_transient_failure_is_retried(harness: Harness) -> None:
    """Transient failures are retried inside the breaker. The breaker counts only the final success."""
    model = Scripted("a", RateLimited("slow", retry_after_s=7), DOWN, "fine")
    assert harness.guard(model).respond(REQUEST, harness.call()).content == "fine"
    assert harness.waits == [7, 0.4]
    assert [(each.failure_count, each.success_count) for each in harness.breakers.list()] == [(0, 1)]


def test_all_attempts_of_a_call_count_once(harness: Harness) -> None:
    """The failed attempts of one call count as one failure. Otherwise the breaker would open too early."""
    model = Scripted("a", DOWN)
    with pytest.raises(ProviderError):
        harness.guard(model).respond(REQUEST, harness.call())
    assert len(model.requests) == 3
    assert harness.failures("a") == 1


def test_an_open_breaker_calls_no_model(harness: Harness) -> None:
    """An open breaker does not call the model. Its error says when the cooldown ends."""
    model = Scripted("a", DOWN)
    guarded = harness.guard(model)
    for _ in range(2):
        with pytest.raises(ProviderError):
            guarded.respond(REQUEST, harness.call())
    with pytest.raises(CircuitBreakerOpen) as caught:
        guarded.respond(REQUEST, harness.call())
    assert len(model.requests) == 6
    assert caught.value.retry_after_s == pytest.approx(60, abs=5)


def test_after_the_cooldown_one_call_closes_the_breaker(harness: Harness) -> None:
    """After the cooldown one successful call closes the breaker."""
    model = Scripted("a", *[DOWN] * 6, "back")
    guarded = harness.guard(model)
    for _ in range(2):
        with pytest.raises(ProviderError):
            guarded.respond(REQUEST, harness.call())
    harness.clock.advance(timedelta(seconds=60))
    assert guarded.respond(REQUEST, harness.call()).content == "back"
    assert [each.state for each in harness.breakers.list()] == ["closed"]


def test_text_of_a_failed_attempt_is_withdrawn(harness: Harness) -> None:
    """The text of a failed attempt is withdrawn, so that the user does not see the reply's beginning twice."""
    model = Scripted("a", breaks_off, "whole")
    assert harness.guard(model).respond(REQUEST, harness.call()).content == "whole"
    assert harness.streamed == ["hal", "<rewind>", "wh", "ole"]


def test_an_attempt_without_text_causes_no_rewind(harness: Harness) -> None:
    """A rewind is sent only if the failed attempt has streamed text."""
    harness.guard(Scripted("a", DOWN, "fine")).respond(REQUEST, harness.call())
    assert harness.streamed == ["fi", "ne"]


def test_an_empty_reply_is_retried(harness: Harness) -> None:
    """An empty reply is retried. If all attempts return empty replies, `InvalidResponse` is raised."""
    assert harness.guard(Scripted("a", " ", "fine")).respond(REQUEST, harness.call()).content == "fine"
    with pytest.raises(InvalidResponse):
        harness.guard(Scripted("b", "")).respond(REQUEST, harness.call())


def test_a_call_has_its_own_time_for_all_its_attempts(harness: Harness) -> None:
    """`PERDURE_MODEL_TIMEOUT_S` limits the total time of one model's attempts. The whole call may take longer."""
    call = harness.call(300)
    model = Scripted("a", hangs(harness))
    with pytest.raises(DeadlineExceeded):
        harness.guard(model, timeout_s=100).respond(REQUEST, call)
    assert len(model.requests) == 1
    assert harness.failures("a") == 1
    assert call.remaining() == pytest.approx(200, abs=5)


def test_only_the_overdue_call_is_aborted(harness: Harness) -> None:
    """If a model exceeds its own time limit, its attempts are aborted. The call itself lasts until its own deadline."""
    hung_up: list[str] = []

    def line(call: ModelCall) -> ModelReply:
        with call.aborting(lambda: hung_up.append("part")):
            whole.expire_overdue()
            assert hung_up == []
            harness.clock.advance(timedelta(seconds=100))
            whole.expire_overdue()
            raise OSError("hung up")

    whole = harness.call(300)
    with pytest.raises(DeadlineExceeded):
        harness.guard(Scripted("a", line), timeout_s=100).respond(REQUEST, whole)
    assert hung_up == ["part"]
    whole.check()
    harness.clock.advance(timedelta(seconds=200))
    whole.expire_overdue()
    with pytest.raises(DeadlineExceeded):
        whole.check()


def test_a_cancelled_call_is_neither_counted_nor_repeated(harness: Harness) -> None:
    """A cancelled probe frees its slot, counts as neither success nor failure, and is not repeated."""

    def cancelled(call: ModelCall) -> ModelReply:
        whole.abort()
        call.remaining()
        raise AssertionError("the call is over")

    model = Scripted("a", *[DOWN] * 6, cancelled, "back")
    guarded = harness.guard(model)
    for _ in range(2):
        with pytest.raises(ProviderError):
            guarded.respond(REQUEST, harness.call())
    harness.clock.advance(timedelta(seconds=60))
    whole = harness.call()
    with pytest.raises(CallAborted):
        guarded.respond(REQUEST, whole)
    assert len(model.requests) == 7
    assert [each.state for each in harness.breakers.list()] == ["half_open"]
    assert guarded.respond(REQUEST, harness.call()).content == "back"


def test_a_wait_ends_when_the_call_is_aborted() -> None:
    """Aborting a call from another thread ends its backoff at once."""
    call = ModelCall(SystemClock(), 3_600)
    caught: list[BaseException] = []

    def waiting() -> None:
        try:
            wait_within(call, 3_600)
        except CallAborted as error:
            caught.append(error)

    thread = threading.Thread(target=waiting, daemon=True)
    thread.start()
    call.abort()
    thread.join(60)
    assert len(caught) == 1


# --- fallbacks


def test_the_first_fallback_that_answers_is_marked(harness: Harness) -> None:
    """The first fallback model that replies is named in the reply, and the reply is marked as a fallback.

    The text of the models that failed is withdrawn.
    """
    first, second = Scripted("b", breaks_off), Scripted("c", ModelReply("I stand in.", model="c-2026"))
    reply = harness.resilient(Scripted("a", breaks_off), first, second, Scripted("d", "never")).respond(
        REQUEST, harness.call()
    )
    assert (reply.content, reply.fallback, reply.model) == ("I stand in.", True, "c-2026")
    assert "".join(harness.streamed).rpartition("<rewind>")[2] == "I stand in."
    assert harness.failures("a") == harness.failures("b") == 1
    assert harness.resilient(Scripted("x", DOWN), Scripted("e", "yes")).respond(REQUEST, harness.call()).model == "e"


def test_an_answer_of_the_model_itself_is_not_marked(harness: Harness) -> None:
    """A reply of the requested model itself is not marked as a fallback."""
    other = Scripted("b", "never")
    reply = harness.resilient(Scripted("a", "mine"), other).respond(REQUEST, harness.call())
    assert not reply.fallback
    assert other.requests == []


@pytest.mark.parametrize(
    "error", [ContextTooLong("long"), ProviderError("no", transient=False), RuntimeError("a bug"), DOWN], ids=repr
)
def test_any_failure_leads_to_the_fallback(harness: Harness, error: Exception) -> None:
    """Any failure, even a permanent one, leads to the fallback, because another model may accept the request."""
    assert harness.resilient(Scripted("a", error), Scripted("b", "yes")).respond(REQUEST, harness.call()).fallback


def test_an_open_breaker_leads_to_the_fallback(harness: Harness) -> None:
    """While the breaker is open, the fallback model replies, and the requested model is not called."""
    model, other = Scripted("a", DOWN), Scripted("b", "yes")
    resilient = harness.resilient(model, other)
    for _ in range(5):
        assert resilient.respond(REQUEST, harness.call()).fallback
    assert len(model.requests) == 6


def test_a_timeout_leaves_time_for_fallbacks(harness: Harness) -> None:
    """Each model's time limit is shorter than the whole call's, so that a timeout leaves time for fallbacks."""
    reply = harness.resilient(Scripted("a", hangs(harness)), Scripted("b", "in time")).respond(
        REQUEST, harness.call(300)
    )
    assert reply.content == "in time"
    assert harness.streamed == ["hal", "<rewind>", "in ", "time"]


def test_the_original_error_is_raised_if_every_model_fails(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """If every model fails, the requested model's error is raised. The errors of all models are logged."""
    original = RateLimited("slow", retry_after_s=3_600)
    with pytest.raises(RateLimited) as caught:
        harness.resilient(Scripted("a", original), Scripted("b", ContextTooLong("long")), Scripted("c", "")).respond(
            REQUEST, harness.call()
        )
    assert caught.value is original
    said = [record.getMessage() for record in caplog.records]
    assert any("a failed (RATE_LIMITED: slow)" in line for line in said)
    assert any("fallback model b failed (CONTEXT_TOO_LONG: long)" in line for line in said)
    assert any("fallback model c failed (INVALID_RESPONSE" in line for line in said)


def test_a_retry_after_does_not_delay_the_fallback(harness: Harness) -> None:
    """A provider's `Retry-After` does not delay the next model."""
    first = Scripted("a", RateLimited("slow", retry_after_s=3_600))
    assert harness.resilient(first, Scripted("b", DOWN, "yes")).respond(REQUEST, harness.call()).content == "yes"
    assert harness.waits == [0.2]


def test_a_cancelled_call_has_no_fallback(harness: Harness) -> None:
    """If a call is cancelled while the requested model or a fallback model runs, no further model is called."""

    def cancelled(call: ModelCall) -> ModelReply:
        whole.abort()
        call.remaining()
        raise AssertionError("the call is over")

    other = Scripted("c", "never")
    whole = harness.call()
    with pytest.raises(CallAborted):
        harness.resilient(Scripted("a", cancelled), other).respond(REQUEST, whole)
    whole = harness.call()
    with pytest.raises(CallAborted):
        harness.resilient(Scripted("x", DOWN), Scripted("b", cancelled), other).respond(REQUEST, whole)
    assert other.requests == []


class Own:
    """A strategy that streams half a word and then raises or returns `found`."""

    def __init__(self, found: object) -> None:
        self._found = found

    def execute(self, asked: FallbackRequest, error: Exception) -> ModelReply | None:
        assert asked.request is REQUEST
        assert error is DOWN
        asked.call.delta("Fr")
        if isinstance(self._found, Exception):
            raise self._found
        return cast("ModelReply | None", self._found)


@pytest.mark.parametrize(
    "found", [None, RuntimeError("a bug in the strategy"), ModelReply(" "), "no reply at all"], ids=repr
)
def test_a_third_partys_strategy_that_finds_nothing(harness: Harness, found: object) -> None:
    """If a strategy returns `None` or an invalid value, or raises an error, the original error is raised."""
    with pytest.raises(ProviderError) as caught:
        ResilientModel(harness.guard(Scripted("a", DOWN)), Own(found)).respond(REQUEST, harness.call())
    assert caught.value is DOWN
    assert harness.streamed == ["Fr", "<rewind>"]


def test_a_third_partys_strategy_that_finds_an_answer(harness: Harness) -> None:
    """A strategy's reply is marked as a fallback. Its tool calls are dropped, because the strategy got no tools."""
    found = ModelReply("From the cache.", (ToolCall("1", "calculator", "{}"),), model="cache")
    reply = ResilientModel(harness.guard(Scripted("a", DOWN)), Own(found)).respond(REQUEST, harness.call())
    assert reply == ModelReply("From the cache.", model="cache", fallback=True)
    assert harness.streamed == ["Fr"]


def test_fallbacks_get_no_tools_and_the_whole_conversation_as_text(harness: Harness) -> None:
    """A fallback gets no tools. Tool calls and results are sent to it as text, which any provider accepts."""
    other = Scripted("b", ModelReply("It is 89.", (ToolCall("x", "calculator", "{}"),)))
    request = ModelRequest(CONVERSATION, (ToolSchema("calculator", "", {"type": "object"}),))
    reply = harness.resilient(Scripted("a", DOWN), other).respond(request, harness.call())
    assert reply.tool_calls == ()
    (asked,) = other.requests
    assert asked.tools == ()
    system, *rest = asked.messages
    assert system.content.startswith("Be kind.\n\nYou have no tools")
    assert system.content.endswith(NOTE)
    shown = [(each.role, _MARK.sub(lambda mark: f"<{mark[1]}>", each.content)) for each in rest]
    assert shown == [
        (Role.USER, "What is 12*7+5?"),
        (Role.ASSISTANT, 'Let me see.\n[I called calculator with {"expression": "12*7"}]\n[I called clock with {}]'),
        (Role.USER, "[calculator returned]:\n<>\n84\n</>\n[clock returned]:\n<>\nnoon\n</>"),
        (Role.ASSISTANT, '[I called adder with {"a": 84}]'),
        (Role.USER, "[adder returned]:\n<>\n89\n</>"),
    ]
    assert all(not each.tool_calls and each.tool_call_id is None for each in rest)


CONVERSATION = (
    Message(Role.SYSTEM, "Be kind."),
    Message(Role.USER, "What is 12*7+5?"),
    Message(
        Role.ASSISTANT,
        "Let me see.",
        (ToolCall("call_1", "calculator", '{"expression": "12*7"}'), ToolCall("call_2", "clock", "")),
    ),
    Message(Role.TOOL, "84", tool_call_id="call_1"),
    Message(Role.TOOL, "noon", tool_call_id="call_2"),
    Message(Role.ASSISTANT, "", (ToolCall("call_1", "adder", '{"a": 84}'),)),
    Message(Role.TOOL, "89", tool_call_id="call_1"),
)


def test_a_prompt_that_is_plain_stays_as_it_is() -> None:
    """A request without tools or tool calls, such as a request for a summary, is not changed."""
    assert flatten_tool_calls(REQUEST) == REQUEST


def test_a_prompt_without_tools_keeps_its_settings() -> None:
    """The settings of a call, and the form of its output, hold for the fallback, too."""
    asked = ModelRequest(CONVERSATION, (ToolSchema("f", "", {}),), {"temperature": 0.5}, {"type": "object"})
    flattened = flatten_tool_calls(asked)
    assert (flattened.tools, flattened.settings, flattened.output) == ((), asked.settings, asked.output)


def test_a_prompt_without_a_system_message_gets_one() -> None:
    """A request without a system message gets a system message, which says that the model has no tools."""
    roles = [each.role for each in flatten_tool_calls(ModelRequest(CONVERSATION[1:])).messages]
    assert roles == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT, Role.USER]


# --- from the settings


def names(models: Sequence[Model]) -> list[str]:
    """The models' names, in order."""
    return [each.name for each in models]


@pytest.mark.long
def test_models_are_resolved_with_their_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's fallbacks are the models of `PERDURE_FALLBACK_MODELS` in order, except the model itself.

    The built-in model has no fallbacks.
    """
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("PERDURE_FALLBACK_MODELS", "openai:small, offline")
    models = Models(Settings.load(_env_file=None, model="openai:large"), SystemClock())
    large, small = models.get(), models.get("openai:small")
    assert isinstance(large, ResilientModel)
    assert isinstance(small, ResilientModel)
    others = [each._strategy._strategy for each in (large, small)]
    assert [names(each._models) for each in others if isinstance(each, FallbackModels)] == [
        ["openai:small", "offline"],
        ["offline"],
    ]
    assert isinstance(models.get("offline"), OfflineModel)
    reply = large.respond(REQUEST, ModelCall(SystemClock(), 60))
    assert (reply.fallback, reply.content[:6]) == (True, "Hello.")


def test_an_unknown_fallback_stops_the_start_by_its_own_name() -> None:
    """An unknown fallback model is an error at startup, not only at the first outage."""
    models = Models(Settings(_env_file=None, model="acme:x", fallback_models=("nope",)), SystemClock())
    models._guarded["acme:x"] = Scripted("acme:x", "fine")
    with pytest.raises(SettingsError, match="PERDURE_FALLBACK_MODELS is 'nope': accepted: offline"):
        models.get()
