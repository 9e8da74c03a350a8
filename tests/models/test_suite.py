"""Each model passes the suite of `perdure.testing` or, if it calls a provider, the suite of `provider_suite.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.clock import SystemClock
from perdure.models.protocol import Model
from perdure.models.resolve import resolve
from perdure.settings import Settings
from perdure.testing.suites.models import QUESTION, ModelSuite, turn
from tests.models.anthropic_server import AnthropicServer
from tests.models.openai_server import OpenAIServer
from tests.models.provider_suite import ProviderSuite


class TestOffline(ModelSuite):
    @pytest.fixture
    def model(self) -> Model:
        return resolve("offline", Settings(), SystemClock())

    def test_a_second_turn_may_reuse_the_call_ids_of_the_first(self, model: Model) -> None:
        """The offline model numbers the calls of each reply, so two turns have the same call ids."""
        first = turn(model, QUESTION)
        assert turn(model, *first, QUESTION)[5].tool_calls[0].id == first[1].tool_calls[0].id


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
