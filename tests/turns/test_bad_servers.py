"""Whole turns against misbehaving providers: each ends in time, with the expected reply or error code.

The real SDKs call fake servers in this process. The circuit breaker, the retries and the turn engine are those of
production. `tests/models/provider_suite.py` covers single model calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from perdure import Agent, ToolContext, tool
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
from perdure.turns.run.runner import Runner
from tests.models.anthropic_server import AnthropicServer
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
    accepted = accept(runtime, Incoming(user_id="ana", text="Say it again."))
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


def test_a_cancelled_turn_asks_no_fallback_model(harness: Harness, provider: Provider) -> None:
    """Cancelling a turn during a model call causes no retry and no fallback. The circuit breaker counts no failure."""
    other = Scripted()
    model = ResilientModel(provider.models.get(provider.name), FallbackModels([other]))
    runtime = replace(harness.runtime, models=lambda _: model)
    runner = Runner(runtime, "harness")
    accepted = accept(runtime, Incoming(user_id="ana", text="Never mind."))

    def cancelling(_: Wire) -> Step:
        cancel(harness.runtime, accepted.turn_id)
        runner.keeper.beat()
        return Silence()

    provider.server.player = cancelling
    provider.server.requests.clear()
    before = provider.breakers.list()
    runner.run(accepted.session_id)
    assert harness.turn(accepted.turn_id)["status"] == "cancelled"
    assert (len(provider.server.requests), other.requests) == (1, [])
    assert provider.breakers.list() == before


ODD = [
    pytest.param(Answer(calls=[ECHO], piece=1), ["an argument that comes in far more than fifty pieces"], id="pieces"),
    pytest.param(Answer(calls=TWICE), ["first", "second"], id="two calls with one id"),
    pytest.param(Answer("hm", usage=None), [], id="usage missing"),
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
