"""Whole turns against misbehaving providers: each ends in time, with the expected reply or error code.

The real SDKs call fake servers in this process. The circuit breaker, the retries and the turn engine are those of
production. `tests/models/provider_suite.py` covers single model calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import pytest

from perdure import Agent, ToolContext, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.clock import SystemClock
from perdure.models.resilient import FallbackModels, ResilientModel
from perdure.models.resolve import Models
from perdure.resilience.registry import Breakers
from perdure.runtime import Runtime
from perdure.settings import BreakerSettings, RetrySettings, Settings
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.reading import read_attempt_error
from perdure.turns.run.loop import Runner
from tests.models.anthropic_server import AnthropicServer
from tests.models.endpoints import model_of
from tests.models.openai_server import OpenAIServer
from tests.models.server import Answer, Broken, Call, Drip, ProviderServer, Raw, Silence, Status, Step, Wire
from tests.turns.harness import PATIENCE_S, Harness
from tests.turns.scripted import Scripted

Make = Callable[[ProviderServer], Step]

DEADLINE_S = 1.0
"""Time limit, in seconds, for a provider that never finishes its response."""

TRIES = 2
HTML = Raw(b"<html><body>It works!</body></html>", "text/html")
ECHO = Call("echo", '{"text": "an argument that comes in far more than fifty pieces"}')
TWICE = [Call("echo", '{"text": "first"}', "same"), Call("echo", '{"text": "second"}', "same")]


@tool(effect="pure")
def echo(text: str, context: ToolContext) -> str:
    """Return the text."""
    assert not context.cancelled.is_set()
    return text


@dataclass(frozen=True)
class Provider:
    """A provider's fake server, and the models that call it."""

    name: str
    server: ProviderServer
    settings: Settings
    breakers: Breakers
    models: Models


@pytest.fixture(scope="module", params=["openai", "anthropic"])
def provider(request: pytest.FixtureRequest) -> Iterator[Provider]:
    """One server and one set of clients for all turns, as in a worker process."""
    server = {"openai": OpenAIServer, "anthropic": AnthropicServer}[request.param]()
    settings = Settings.model_validate(
        {
            "model": f"{request.param}:test-model",
            "retry": RetrySettings(max_attempts=TRIES, base_s=0.01, cap_s=0.02),
            "breaker": BreakerSettings(failure_threshold=1_000),
        }
    )
    with pytest.MonkeyPatch.context() as patch, server:
        patch.setenv(f"{request.param.upper()}_BASE_URL", server.base_url)
        patch.setenv(f"{request.param.upper()}_API_KEY", "sk-of-the-tests")
        clock = SystemClock()
        breakers = Breakers(settings.breaker, clock)
        models = Models(settings, clock, breakers)
        yield Provider(models.get().name, server, settings, breakers, models)


@pytest.fixture
def runtime(harness: Harness, provider: Provider) -> Runtime:
    """A runtime whose agent has the tool `echo` and calls the provider's model."""
    agents = Agents([Agent("assistant", "You help.", [echo], model=provider.name)])
    return replace(harness.runtime, agents=agents, models=provider.models.get)


def ask(harness: Harness, runtime: Runtime) -> dict[str, Any]:
    """Send one message and run its turn; returns the settled turn."""
    accepted = accept(runtime, Incoming(user=UserKey("ana"), text="Say it again."))
    began = time.monotonic()
    Runner(runtime, "harness").run(accepted.session_id)
    assert time.monotonic() - began < PATIENCE_S
    return harness.turn(accepted.turn_id)


def nonsense(payload: bytes) -> Make:
    """A streamed reply with a valid beginning, then `payload` as an event."""
    return lambda server: Broken(Answer("a good beginning"), 3, server.frame(payload))


def always(step: Step) -> Make:
    """Use `step` for every provider."""
    return lambda _: step


FAILURES = [
    # columns: the server's response to every call, the turn's error code, whether the call is retried
    pytest.param(always(Broken(Answer("half of it"), 3, "close")), "PROVIDER_ERROR", True, id="closes in mid-stream"),
    pytest.param(always(Broken(Answer("half of it"), 3, b"")), "INVALID_RESPONSE", True, id="ends in mid-stream"),
    pytest.param(always(HTML), "INVALID_RESPONSE", True, id="HTML with status 200"),
    pytest.param(nonsense(b"\xff\xfe\x80"), "INVALID_RESPONSE", True, id="no UTF-8"),
    pytest.param(nonsense(b"{no json"), "INVALID_RESPONSE", True, id="no JSON"),
    pytest.param(always(Answer(" \n")), "INVALID_RESPONSE", True, id="says nothing at all"),
    pytest.param(
        always(Status(429, headers={"Retry-After": "3600"})), "RATE_LIMITED", False, id="Retry-After of an hour"
    ),
    pytest.param(always(Status(429, headers={"Retry-After": "soon"})), "RATE_LIMITED", True, id="Retry-After: soon"),
    pytest.param(always(Status(503, headers={"Retry-After": "-9"})), "PROVIDER_ERROR", True, id="Retry-After: -9"),
    pytest.param(always(Status(503, headers={"Retry-After": "nan"})), "PROVIDER_ERROR", True, id="Retry-After: nan"),
    pytest.param(always(Status(401)), "PROVIDER_ERROR", False, id="refuses the key"),
    pytest.param(always(Status(413)), "CONTEXT_TOO_LONG", False, id="refuses the length"),
]


@pytest.mark.parametrize(("make", "code", "again"), FAILURES)
def test_a_server_that_answers_nonsense(
    harness: Harness, runtime: Runtime, provider: Provider, make: Make, code: str, *, again: bool
) -> None:
    """The turn fails with the documented code and a message. Only transient failures are retried."""
    step = make(provider.server)
    provider.server.player = lambda _: step
    provider.server.requests.clear()
    turn = ask(harness, runtime)
    assert (turn["status"], turn["error"]["code"]) == ("failed", code)
    assert turn["reply"]["text"] == turn["error"]["message"]
    assert len(provider.server.requests) == (TRIES if again else 1)


ENDLESS = [
    pytest.param(Silence(), id="says nothing"),
    pytest.param(Drip(DEADLINE_S / 5), id="drips"),
    pytest.param(Broken(Answer("many words that stop"), 5, "hang"), id="falls silent in mid-stream"),
]


@pytest.mark.long
@pytest.mark.parametrize("step", ENDLESS)
def test_a_server_that_never_finishes(harness: Harness, runtime: Runtime, provider: Provider, step: Step) -> None:
    """The turn's deadline ends the call even while bytes still arrive, and the call is not retried."""
    limits = harness.settings.turn.model_copy(update={"timeout_s": DEADLINE_S})
    hurried = replace(runtime, settings=runtime.settings.model_copy(update={"turn": limits}))
    provider.server.player = lambda _: step
    provider.server.requests.clear()
    turn = ask(harness, hurried)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "TIMEOUT")
    assert len(provider.server.requests) == 1


@pytest.mark.long
@pytest.mark.parametrize("step", [Silence(), HTML, Status(401), Status(413)], ids=["silent", "HTML", "401", "413"])
def test_a_fallback_model_answers(harness: Harness, provider: Provider, step: Step) -> None:
    """The fallback model answers after any failure of the first model. Each model has its own time limit."""
    models = Models(
        provider.settings.model_copy(update={"model_timeout_s": DEADLINE_S, "fallback_models": ("offline",)}),
        SystemClock(),
        provider.breakers,
    )
    provider.server.player = lambda _: step
    turn = ask(harness, replace(harness.runtime, models=lambda _: models.get(provider.name)))
    assert turn["status"] == "done"
    [_, reply] = harness.messages(turn["session_id"])
    assert (reply["model"], reply["fallback"]) == ("offline", True)


def _counts(provider: Provider) -> tuple[int, int]:
    """The failures and the successes that the breakers have counted; a breaker exists once its model was called."""
    breakers = provider.breakers.list()
    return sum(each.failure_count for each in breakers), sum(each.success_count for each in breakers)


def test_a_cancelled_turn_asks_no_fallback_model(harness: Harness, provider: Provider) -> None:
    """Cancelling a turn during a model call causes no retry and no fallback. The circuit breaker counts no failure."""
    other = Scripted()
    model = ResilientModel(provider.models.get(provider.name), FallbackModels([other]))
    runtime = replace(harness.runtime, models=lambda _: model)
    runner = Runner(runtime, "harness")
    accepted = accept(runtime, Incoming(user=UserKey("ana"), text="Never mind."))

    def cancelling(_: Wire) -> Step:
        cancel(harness.runtime, accepted.turn_id)
        runner.keeper.beat()
        return Silence()

    provider.server.player = cancelling
    provider.server.requests.clear()
    before = _counts(provider)
    runner.run(accepted.session_id)
    assert harness.turn(accepted.turn_id)["status"] == "cancelled"
    assert (len(provider.server.requests), other.requests) == (1, [])
    assert _counts(provider) == before


ODD = [
    pytest.param(Answer(calls=[ECHO], piece=1), ["an argument that comes in far more than fifty pieces"], id="pieces"),
    pytest.param(Answer(calls=TWICE), ["first", "second"], id="two calls with one id"),
    pytest.param(Answer(calls=[Call("echo", '{"text": ')]), ["Error: The arguments of echo"], id="half a call"),
    pytest.param(Broken(Answer("half of it"), 3, "close"), [], id="closes once"),
]


@pytest.mark.parametrize(("step", "results"), ODD)
def test_a_server_that_is_odd(
    harness: Harness, runtime: Runtime, provider: Provider, step: Step, results: list[str]
) -> None:
    """An unusual or incomplete reply does not fail the turn. Each tool call in the reply gets one result."""
    provider.server.script(step)
    provider.server.player = lambda _: Answer("here you are")
    turn = ask(harness, runtime)
    assert turn["status"] == "done", turn["error"]
    results_seen = [each for each in harness.messages(turn["session_id"]) if each["role"] == "tool"]
    assert len(results_seen) == len(results)
    assert all(each["content"].startswith(wanted) for each, wanted in zip(results_seen, results, strict=True))
    assert len({each["tool_call_id"] for each in results_seen}) == len(results)
    assert turn["usage"] is not None


# --- replies that did not end properly

_refunded: list[tuple[str, int]] = []


@tool(effect="unsafe")
def refund(order: str = "the last one", cents: int = 5_000) -> str:
    """Refund an order."""
    _refunded.append((order, cents))
    return "refunded"


@pytest.fixture
def shop(harness: Harness, provider: Provider) -> Runtime:
    """A runtime whose agent has the tool `refund`, all of whose arguments have defaults."""
    _refunded.clear()
    agents = Agents([Agent("assistant", "You help.", [refund], model=provider.name, max_steps=3)])
    return replace(harness.runtime, agents=agents, models=provider.models.get)


@pytest.mark.parametrize(
    ("reason", "arguments", "told"),
    [
        ("length", "", "cut off at its limit of tokens"),
        ("model_context_window_exceeded", '{"order": "7', "cut off at its limit of tokens"),
        ("pause_turn", "{}", "did not end properly (reason: pause_turn)"),
    ],
)
def test_no_call_of_an_incomplete_reply_runs(
    harness: Harness, shop: Runtime, provider: Provider, *, reason: str, arguments: str, told: str
) -> None:
    """The call is closed with the reason, and the model asks again. Only the complete call runs."""
    provider.server.script(
        Answer("I refund", calls=[Call("refund", arguments)], finish_reason=reason),
        Answer(calls=[Call("refund", '{"order": "7", "cents": 1}')]),
    )
    provider.server.player = lambda _: Answer("Done.")
    turn = ask(harness, shop)
    assert (turn["status"], turn["steps"]) == ("done", 3)
    assert _refunded == [("7", 1)]
    _, asked, closed, *_ = harness.messages(turn["session_id"])
    assert (asked["content"], asked["tool_calls"][0]["name"]) == ("I refund", "refund")
    assert closed["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert closed["content"].startswith("Error: Not run: ")
    assert told in closed["content"]
    assert asked["stop_reason"] == ("length" if "window" in reason else reason)
    [effect] = harness.sql("SELECT status FROM tool_effects")
    assert effect.status == "done", "the call of the incomplete reply has no intent"


@pytest.mark.parametrize("reason", ["length", "pause_turn"])
def test_a_model_that_is_always_cut_off_is_asked_three_times(
    harness: Harness, runtime: Runtime, provider: Provider, reason: str
) -> None:
    """More replies would break off in the same way, and each of them costs tokens."""
    cut_off = Answer(calls=[ECHO], finish_reason=reason)
    provider.server.script(cut_off, cut_off, Answer(calls=[ECHO]))
    provider.server.player = lambda _: cut_off
    provider.server.requests.clear()
    turn = ask(harness, runtime)
    assert (turn["error"]["code"], turn["steps"], len(provider.server.requests)) == ("INCOMPLETE_REPLY", 6, 6)


def test_a_filtered_reply_with_calls_is_not_shown(harness: Harness, shop: Runtime, provider: Provider) -> None:
    """The turn fails at once. Neither the text nor the calls of the reply are committed."""
    provider.server.player = lambda _: Answer("Foul", calls=[Call("refund")], finish_reason="content_filter")
    provider.server.requests.clear()
    turn = ask(harness, shop)
    assert (turn["error"]["code"], turn["steps"], len(provider.server.requests)) == ("CONTENT_FILTERED", 0, 1)
    messages = harness.messages(turn["session_id"])
    assert [each["content"] for each in messages] == ["Say it again.", turn["error"]["message"]]
    assert _refunded == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [("", "they are empty"), ("  \n", "they are empty"), ("[7]", "got an array"), ('{"order": ', "not valid JSON")],
)
def test_arguments_that_are_no_object_are_refused(
    harness: Harness, shop: Runtime, provider: Provider, arguments: str, told: str
) -> None:
    """A tool never runs with its defaults because its arguments are missing or broken."""
    provider.server.script(Answer(calls=[Call("refund", arguments)]))
    provider.server.player = lambda _: Answer("Sorry.")
    turn = ask(harness, shop)
    [result] = [each for each in harness.messages(turn["session_id"]) if each["role"] == "tool"]
    assert result["content"].startswith("Error: The arguments of refund were refused: ")
    assert told in result["content"]
    assert _refunded == []


def test_a_text_that_is_cut_off_is_a_marked_reply(harness: Harness, runtime: Runtime, provider: Provider) -> None:
    """The user reads what there is. The turn and the message say that it is incomplete."""
    provider.server.script(Answer("The first half", finish_reason="length"))
    turn = ask(harness, runtime)
    assert (turn["status"], turn["reply"]["text"]) == ("done", "The first half")
    assert turn["reply"]["stop_reason"] == "length"
    assert harness.messages(turn["session_id"])[-1]["stop_reason"] == "length"


@pytest.mark.parametrize(
    ("steps", "usage"),
    [
        ([Answer("hm", usage=None)], None),
        ([Answer(calls=[ECHO], usage=None), Answer("hm")], {"input_tokens": 11, "output_tokens": 7}),
    ],
    ids=["never", "once"],
)
def test_usage_that_the_server_does_not_report(
    harness: Harness, runtime: Runtime, provider: Provider, steps: list[Step], usage: dict[str, int] | None
) -> None:
    """A turn's usage is the sum of what was reported, and `null` if nothing was."""
    provider.server.script(*steps)
    turn = ask(harness, runtime)
    used = turn["usage"]
    assert usage == (used and {name: used[name] for name in ("input_tokens", "output_tokens")})


# --- errors that the input causes

OF_INPUT = [
    pytest.param(Answer(finish_reason="content_filter"), "CONTENT_FILTERED", id="filtered"),
    pytest.param(Answer("half of it", finish_reason="content_filter"), "CONTENT_FILTERED", id="filtered in mid-stream"),
    pytest.param(Status(400, "content_filter"), "CONTENT_FILTERED", id="refused by a filter"),
    pytest.param(Answer(finish_reason="length"), "INCOMPLETE_REPLY", id="nothing but thoughts"),
    pytest.param(Status(400, message="prompt is too long: 9 tokens > 8 maximum"), "CONTEXT_TOO_LONG", id="too long"),
    pytest.param(Status(400), "PROVIDER_ERROR", id="a bad request"),
]


@pytest.mark.parametrize(("step", "code"), OF_INPUT)
def test_one_users_refused_prompts_do_not_stop_another(
    harness: Harness, provider: Provider, step: Step, code: str
) -> None:
    """The error reaches the user as what it is, is not retried, and does not open the breaker for all users."""
    settings = provider.settings.model_copy(update={"breaker": BreakerSettings(failure_threshold=2)})
    breakers = Breakers(settings.breaker, SystemClock())
    models = Models(settings, SystemClock(), breakers)
    runtime = replace(harness.runtime, models=lambda _: models.get(provider.name))
    provider.server.player = lambda _: step
    provider.server.requests.clear()
    for _ in range(5):
        turn = ask(harness, runtime)
        assert (turn["status"], turn["error"]["code"]) == ("failed", code)
        assert turn["reply"]["text"] == turn["error"]["message"]
    assert len(provider.server.requests) == 5
    provider.server.player = lambda _: Answer("hello bea")
    accepted = accept(runtime, Incoming(user=UserKey("bea"), text="hi"))
    Runner(runtime, "harness").run(accepted.session_id)
    assert harness.turn(accepted.turn_id)["reply"]["text"] == "hello bea"


def test_no_fallback_evades_a_content_filter(harness: Harness, provider: Provider) -> None:
    """A filter's refusal is no outage: the fallback model is not asked."""
    other = Scripted()
    model = ResilientModel(provider.models.get(provider.name), FallbackModels([other]))
    provider.server.player = lambda _: Answer(finish_reason="content_filter")
    turn = ask(harness, replace(harness.runtime, models=lambda _: model))
    assert (turn["error"]["code"], other.requests) == ("CONTENT_FILTERED", [])


def _window(characters: int) -> Callable[[Wire], Step]:
    """The responses of a server whose model has a window of `characters` characters of messages."""

    def play(body: Wire) -> Step:
        return Answer("fine") if len(str(body["messages"])) <= characters else Status(413)

    return play


def test_a_conversation_that_grew_too_long_goes_on(harness: Harness, runtime: Runtime, provider: Provider) -> None:
    """The prompt is built again with smaller budgets, so that old turns are left out and the turn is done."""
    provider.server.player = _window(3_000)
    for number in range(12):
        harness.run_with(runtime, f"message {number}: {'x' * 500}")
    assert {row.status for row in harness.sql("SELECT status FROM turns")} == {"done"}


def test_a_prompt_is_shortened_before_a_fallback_replies(
    harness: Harness, runtime: Runtime, provider: Provider
) -> None:
    """A fallback cannot call tools, so it replies only to a prompt that cannot be shorter."""
    other = Scripted()
    model = ResilientModel(provider.models.get(provider.name), FallbackModels([other]))
    runtime = replace(runtime, models=lambda _: model)
    provider.server.player = _window(3_000)
    for number in range(12):
        assert harness.run_with(runtime, f"message {number}: {'x' * 500}")["status"] == "done"
    assert other.requests == []
    provider.server.player = lambda _: Status(413)
    assert harness.run_with(runtime, "and now?")["reply"]["text"] == "ok"
    assert len(other.requests) == 1


def test_a_message_that_is_too_long_does_not_end_its_conversation(
    harness: Harness, runtime: Runtime, provider: Provider
) -> None:
    """The failed turn stays in the transcript for people, and is left out of later prompts."""
    provider.server.player = _window(3_000)
    assert harness.run_with(runtime, "My name is Ana.")["status"] == "done"
    failed = harness.run_with(runtime, "y" * 9_000)
    assert failed["error"]["code"] == "CONTEXT_TOO_LONG"
    assert harness.run_with(runtime, "hi")["status"] == "done"
    sent = str(provider.server.requests[-1]["messages"])
    assert "My name is Ana." in sent
    assert "yyy" not in sent
    assert failed["error"]["message"] not in sent
    assert "y" * 9_000 in [each["content"] for each in harness.messages(failed["session_id"])]


@pytest.mark.parametrize("is_local", [True, False])
def test_what_a_local_server_says_is_kept_for_the_operator(harness: Harness, is_local: bool) -> None:
    """The user reads a message without the server's text. The turn's row has the text, unless the server is remote."""
    with OpenAIServer() as server:
        harness.any_model = model = model_of(server, show_received=None if is_local else False)
        server.script(Status(404, message="model 'llama9' not found,\x1b[2J try pulling it first"))
        turn = harness.ask("Hello.")
        model.close()
    assert (turn["status"], turn["error"]["code"]) == ("failed", "PROVIDER_ERROR")
    assert "llama9" not in str(turn)
    kept = read_attempt_error(harness.database, UUID(turn["turn_id"]))
    said = "The model's server sent: model 'llama9' not found,[2J try pulling it first"
    assert kept == (said if is_local else None)
