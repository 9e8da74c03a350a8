"""The behavioural suites of `suite.py` and `provider_suite.py` over every model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.clock import SystemClock
from perdure.models.protocol import Model
from perdure.models.resolve import resolve
from perdure.settings import Settings
from tests.models.anthropic_server import AnthropicServer
from tests.models.openai_server import OpenAIServer
from tests.models.provider_suite import ProviderSuite
from tests.models.suite import ModelSuite


class TestOffline(ModelSuite):
    @pytest.fixture
    def model(self) -> Model:
        return resolve("offline", Settings(), SystemClock())


class TestOpenAI(ProviderSuite):
    @pytest.fixture
    def server(self) -> Iterator[OpenAIServer]:
        with OpenAIServer() as server:
            yield server

    @pytest.fixture
    def model(self, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> Model:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-tests")
        return resolve("openai:test-model", Settings(), SystemClock())


class TestAnthropic(ProviderSuite):
    @pytest.fixture
    def server(self) -> Iterator[AnthropicServer]:
        with AnthropicServer() as server:
            yield server

    @pytest.fixture
    def model(self, server: AnthropicServer, monkeypatch: pytest.MonkeyPatch) -> Model:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.base_url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-of-the-tests")
        return resolve("anthropic:test-model", Settings(), SystemClock())
