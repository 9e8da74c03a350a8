"""The adapted models of each vendor's SDK pass the suite of the own wires.

The classes override what differs for a vendor, each with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.clock import SystemClock
from perdure.models.adapted import AdaptedModel, adapted_model
from perdure.models.providers.endpoint import Endpoint
from perdure.settings import Settings
from tests.models.anthropic_server import AnthropicServer
from tests.models.gemini_server import GeminiServer
from tests.models.openai_server import OpenAIServer
from tests.models.provider_suite import ProviderSuite
from tests.models.server import ProviderServer


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


class TestMistral(_Rooted):
    kind = "mistral"

    @pytest.fixture
    def server(self) -> Iterator[OpenAIServer]:
        with OpenAIServer() as server:
            yield server


class TestAnthropic(_Rooted):
    kind = "anthropic"

    @pytest.fixture
    def server(self) -> Iterator[AnthropicServer]:
        with AnthropicServer() as server:
            yield server


class TestGroq(_Rooted):
    kind = "groq"

    @pytest.fixture
    def server(self) -> Iterator[OpenAIServer]:
        with OpenAIServer() as server:
            yield server


class TestGoogle(AdaptedSuite):
    kind = "google"

    @pytest.fixture
    def server(self) -> Iterator[GeminiServer]:
        with GeminiServer() as server:
            yield server
