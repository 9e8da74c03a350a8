"""What a provider refuses to an agent with a model of its own counts as it does for the models of perdure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import ModelMessage, ModelRequest, UserPromptPart
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from perdure import adapt, effect
from perdure.adapters.pydantic_ai import errors
from perdure.agents import Agents
from perdure.clock import SystemClock
from perdure.errors import (
    ContentFiltered,
    ContextTooLong,
    InvalidResponse,
    PerdureError,
    ProviderError,
    RateLimited,
)
from perdure.models.adapted import event_loop
from perdure.turns.lease.claim import Ran
from tests.models.adapted.test_adapted_suite import BlocksServer
from tests.models.anthropic_server import AnthropicServer
from tests.models.openai_server import Answer, OpenAIServer
from tests.models.server import Broken, Call, Chunks, ProviderServer, Status, Step
from tests.turns.harness import Harness

KEY = "sk-of-the-tests"


@pytest.fixture(params=[OpenAIServer, AnthropicServer])
def server(request: pytest.FixtureRequest) -> Iterator[ProviderServer]:
    with request.param() as running:
        yield running


@contextmanager
def model_of(server: ProviderServer) -> Iterator[Model[Any]]:
    """A model of pydantic-ai, with a client of its own."""
    connections = httpx2.AsyncClient()
    given: dict[str, Any] = {"base_url": server.base_url, "api_key": KEY, "http_client": connections}
    if isinstance(server, OpenAIServer):
        yield OpenAIChatModel("test-model", provider=OpenAIProvider(**given))
    else:
        yield AnthropicModel("test-model", provider=AnthropicProvider(**given))
    on_the_loop(connections.aclose())


@pytest.fixture
def model(server: ProviderServer) -> Iterator[Model[Any]]:
    with model_of(server) as made:
        yield made


def on_the_loop(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run_coroutine_threadsafe(work, event_loop.running()).result(10)


def error_of(model: Model[Any]) -> PerdureError | None:
    """The error of perdure for that of a request."""

    async def request() -> None:
        asked: list[ModelMessage] = [ModelRequest(parts=[UserPromptPart("hello")])]
        settings = ModelSettings(max_retries=0)
        async with model.request_stream(asked, settings, ModelRequestParameters()) as stream:
            async for _ in stream:
                pass

    with pytest.raises(Exception) as caught:  # noqa: PT011 (pydantic-ai's own errors)
        on_the_loop(request())
    return errors.of_model(caught.value, SystemClock())


TOO_LARGE = "Request too large on tokens per minute (TPM): Limit 6000, Requested 9000"


@pytest.mark.parametrize(
    ("step", "kind", "is_transient"),
    [
        pytest.param(Status(400, message="It triggered the content management policy."), ContentFiltered, False),
        pytest.param(Status(400, message="Output blocked by content filtering policy"), ContentFiltered, False),
        pytest.param(Broken(Answer("half of it"), 3, Status(0, "content_filter")), ContentFiltered, False),
        pytest.param(Status(400, "exceed_context_size_error"), ContextTooLong, False),
        pytest.param(Status(400, message="This model's maximum context length is 8 tokens."), ContextTooLong, False),
        pytest.param(Status(400, message="longer than the model's context length (8 tokens)"), ContextTooLong, False),
        pytest.param(Status(500, message="the request exceeds the available context size"), ContextTooLong, False),
        pytest.param(Status(413), ContextTooLong, False),
        pytest.param(Status(429, "rate_limit_exceeded", TOO_LARGE), ContextTooLong, False),
        pytest.param(Status(413, "rate_limit_exceeded", "Limit 6000 tokens per minute"), RateLimited, True),
        pytest.param(Broken(Answer("half of it"), 3, Status(0, "rate_limit_exceeded")), RateLimited, True),
        pytest.param(Status(400, "tool_use_failed", "Failed to call a function."), InvalidResponse, True),
        pytest.param(Status(503), ProviderError, True),
        pytest.param(Status(401, "invalid_api_key"), ProviderError, False),
        pytest.param(Broken(Answer("half of it"), 3, "close"), ProviderError, True),
    ],
)
def test_a_refusal_is_what_the_provider_says(
    model: Model[Any], server: ProviderServer, step: Any, kind: type[PerdureError], *, is_transient: bool
) -> None:
    """pydantic-ai knows most refusals only by their status."""
    server.script(step)
    found = error_of(model)
    assert type(found) is kind
    assert found.transient is is_transient


@pytest.mark.parametrize("status", [429, 503, 529])
def test_the_pause_that_a_provider_asks_for_is_kept(model: Model[Any], server: ProviderServer, status: int) -> None:
    """An overloaded server asks for one, too."""
    server.script(Status(status, headers={"Retry-After": "9"}))
    found = error_of(model)
    assert found is not None
    assert found.retry_after_s == 9


def test_a_prompt_that_a_server_of_ones_own_refuses_is_sent_again_with_less(
    harness: Harness, model: Model[Any], server: ProviderServer
) -> None:
    """The history is halved, whatever the server calls its window."""
    harness.agents = Agents([adapt(PydanticAgent(model, name="assistant"))])
    for number in range(4):
        harness.ask(f"{number} " + "long " * 1_900)
    server.script(Status(400, message="longer than the model's context length (8 tokens)"))
    assert harness.ask("and now?")["status"] == "done"
    first, second = (len(str(each["messages"])) for each in server.requests[-2:])
    assert second < first


def test_a_filtered_prompt_is_no_failure_of_the_provider(
    harness: Harness, model: Model[Any], server: ProviderServer
) -> None:
    """The turn says so, and the provider is not asked again."""
    harness.agents = Agents([adapt(PydanticAgent(model, name="assistant"))])
    server.script(Status(400, message="It triggered the content management policy."))
    turn = harness.ask("what may not be asked")
    assert (turn["status"], turn["error"]["code"]) == ("failed", "CONTENT_FILTERED")
    assert len(server.requests) == 1


REFUSED = "messages.1.content.0: Invalid `signature` in `thinking` block"


@pytest.mark.parametrize(
    "refusal",
    [
        Status(400, message=REFUSED),
        Chunks([{"type": "error", "error": {"type": "invalid_request_error", "message": REFUSED}}]),
    ],
    ids=["status", "stream"],
)
@pytest.mark.parametrize("crashes", [False, True])
def test_signatures_that_their_sender_refuses_are_left_out(harness: Harness, refusal: Step, *, crashes: bool) -> None:
    """They end with an account or a key: the conversation goes on without them, also within a turn."""
    with BlocksServer() as server, model_of(server) as made:
        bare = PydanticAgent(made, name="assistant")

        @bare.tool_plain(metadata=effect("pure"))
        def look() -> str:
            """Look."""
            return "seen"

        harness.agents = Agents([adapt(bare)])
        server.thinks = True
        server.script(Answer(calls=[Call("look", "{}", "c1")]))
        sent = harness.send()
        if crashes:
            with harness.crashing("before", "turns.step", 2):
                harness.run(sent.session_id)
            harness.move(31)
        else:
            assert harness.run(sent.session_id) == Ran(1)
            sent = harness.send("and now?")
        server.thinks = False
        server.script(refusal, Answer("Fine."))
        assert harness.run(sent.session_id) == Ran(1)
        assert harness.turn(sent.turn_id)["reply"]["text"] == "Fine."
        refused, last = (json.dumps(each["messages"]) for each in server.requests[-2:])
        assert "signature" in refused
        assert "signature" not in last
        assert "seen" in last
