"""The adapted models of each vendor's SDK pass the suite of the own wires.

The classes override what differs for a vendor, each with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.errors import InvalidResponse, ProviderError
from perdure.models.adapted import AdaptedModel, adapted_model
from perdure.models.protocol import Model
from perdure.models.providers.endpoint import Endpoint
from perdure.settings import Settings
from perdure.testing.suites.models import QUESTION, ask
from tests.models.anthropic_server import AnthropicServer
from tests.models.gemini_server import GeminiServer
from tests.models.openai_server import OpenAIServer
from tests.models.provider_suite import CALLS, ProviderSuite
from tests.models.server import Answer, Broken, ProviderServer, Status, Step, Wire


def adapted(kind: str, base_url: str) -> AdaptedModel:
    return adapted_model(
        f"{kind}:test-model", Settings(), SystemClock(), "PERDURE_MODEL", Endpoint(kind, base_url, "key")
    )


class AdaptedSuite(ProviderSuite):
    """The suite with a model of the kind `kind`, which calls `server`."""

    kind = ""

    @pytest.fixture
    def model(self, server: ProviderServer) -> Iterator[AdaptedModel]:
        made = adapted(self.kind, self.url(server))
        yield made
        made.close()

    def url(self, server: ProviderServer) -> str:
        return server.base_url


class TestOpenAIChat(AdaptedSuite):
    kind = "openai-chat"

    @pytest.fixture
    def server(self) -> Iterator[OpenAIServer]:
        with OpenAIServer() as server:
            yield server


class _Rooted(AdaptedSuite):
    """The SDK adds the version to the URL."""

    def url(self, server: ProviderServer) -> str:
        return server.base_url.removesuffix("/v1")


class MistralServer(OpenAIServer):
    """Mistral's SDK sends the content of messages as arrays of parts."""

    def take(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Step:
        for message in body["messages"]:
            if isinstance(message.get("content"), list):
                message["content"] = "".join(part["text"] for part in message["content"])
            if message.get("tool_calls") == []:
                del message["tool_calls"]
        return super().take(path, body, headers)


@pytest.mark.long
class TestMistral(_Rooted):
    kind = "mistral"

    @pytest.fixture
    def server(self) -> Iterator[OpenAIServer]:
        with MistralServer() as server:
            yield server


class BlocksServer(AnthropicServer):
    """pydantic-ai sends a tool's result as an array of blocks."""

    def take(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Step:
        for message in body["messages"]:
            for block in message["content"]:
                if isinstance(block.get("content"), list):
                    block["content"] = "".join(part["text"] for part in block["content"])
        return super().take(path, body, headers)


@pytest.mark.long
class TestAnthropic(_Rooted):
    kind = "anthropic"

    @pytest.fixture
    def server(self) -> Iterator[AnthropicServer]:
        with BlocksServer() as server:
            yield server

    def test_takes_missing_usage_as_unknown(self, model: Model, server: ProviderServer) -> None:
        """pydantic-ai cannot read a message of Anthropic's without usage. The own wire can."""
        server.script(Answer("hello", usage=None))
        with pytest.raises(InvalidResponse):
            ask(model, QUESTION)


class GroqServer(OpenAIServer):
    """Groq's API is under `/openai`, and its usage in an object of its own."""

    def chunks(self, answer: Answer, model: str) -> list[Any]:
        chunks = super().chunks(answer, model)
        if answer.usage is not None:
            chunks[-1]["x_groq"] = {"id": "req_1", "usage": chunks[-1].pop("usage")}
        return chunks

    def judge(self, path: str, body: Wire) -> Status | None:
        return super().judge(path.removeprefix("/openai"), body)


@pytest.mark.long
class TestGroq(_Rooted):
    kind = "groq"

    @pytest.fixture
    def server(self) -> Iterator[OpenAIServer]:
        with GroqServer() as server:
            yield server


class TestGoogle(AdaptedSuite):
    kind = "google"

    @pytest.fixture
    def server(self) -> Iterator[GeminiServer]:
        with GeminiServer() as server:
            yield server

    @pytest.fixture
    def cut_off_model(self, model: Model, server: ProviderServer) -> Model:
        """Gemini sends each call in one piece, so that a text is what it cuts off."""
        server.script(Answer("half of", finish_reason="length"))
        return model

    def test_joins_calls_streamed_in_more_than_fifty_pieces(self, model: Model, server: ProviderServer) -> None:
        """Gemini sends each call in one piece."""
        server.script(Answer(calls=CALLS))
        made = ask(model, QUESTION).tool_calls
        assert [(each.id, each.name, json.loads(each.arguments)) for each in made] == [
            (each.id, each.name, json.loads(each.arguments)) for each in CALLS
        ]

    def test_a_failed_server_is_a_failure_of_the_provider(self, model: Model, server: ProviderServer) -> None:
        """Gemini reports its own failure by an error only, not by a finish reason."""
        server.script(Broken(Answer("half of it"), 1, Status(503)))
        with pytest.raises(ProviderError) as caught:
            ask(model, QUESTION)
        assert caught.value.transient
