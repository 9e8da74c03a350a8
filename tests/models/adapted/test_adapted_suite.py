"""The adapted models of each vendor's SDK pass the suite of the own wires.

The classes override what differs for a vendor, each with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.models.adapted import AdaptedModel, adapted_model
from perdure.models.providers.endpoint import Endpoint
from perdure.settings import Settings
from tests.models.anthropic_server import AnthropicServer
from tests.models.gemini_server import GeminiServer
from tests.models.openai_server import OpenAIServer
from tests.models.provider_suite import ProviderSuite
from tests.models.server import ProviderServer, Status, Step, Wire


def adapted(kind: str, base_url: str) -> AdaptedModel:
    return adapted_model(f"{kind}:test-model", Settings(), SystemClock(), "PERDURE_MODEL", Endpoint(base_url, "key"))


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
        return super().take(path, body, headers)


class TestMistral(_Rooted):
    kind = "mistral"

    @pytest.fixture
    def server(self) -> Iterator[OpenAIServer]:
        with MistralServer() as server:
            yield server


class TestAnthropic(_Rooted):
    kind = "anthropic"

    @pytest.fixture
    def server(self) -> Iterator[AnthropicServer]:
        with AnthropicServer() as server:
            yield server


class GroqServer(OpenAIServer):
    """Groq's API is under `/openai`."""

    def judge(self, path: str, body: Wire) -> Status | None:
        return super().judge(path.removeprefix("/openai"), body)


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
