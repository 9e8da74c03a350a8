"""Each model passes the suite of `perdure.testing` or, if it calls a provider, the suite of `provider_suite.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.models.protocol import Model
from perdure.models.resolve import resolve
from perdure.settings import Settings
from perdure.testing.suites.models import QUESTION, ModelSuite, turn
from tests.models.anthropic_server import AnthropicServer, events_of
from tests.models.openai_server import OpenAIServer, chunk, chunks_of
from tests.models.provider_suite import ProviderSuite
from tests.models.server import Answer, Status, Wire


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

    @pytest.fixture
    def thinking_model(self, model: Model, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> Model:
        def chunks(answer: Answer, name: str) -> list[Any]:
            thought = {"index": 0, "delta": {"reasoning_content": "Let me think."}}
            return [chunk([thought], name), *chunks_of(answer, name)]

        def judge(path: str, body: Wire) -> Status | None:
            called = [each for each in body["messages"] if each.get("tool_calls")]
            lacking = [each for each in called if each.get("reasoning_content") != "Let me think."]
            return Status(400, message="Missing `reasoning_content`") if lacking else None

        monkeypatch.setattr(server, "chunks", chunks)
        monkeypatch.setattr(server, "judge", judge)
        return model


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

    @pytest.fixture
    def thinking_model(self, model: Model, server: AnthropicServer, monkeypatch: pytest.MonkeyPatch) -> Model:
        block = {"type": "thinking", "thinking": "Let me think.", "signature": "c2ln"}

        def chunks(answer: Answer, name: str) -> list[Any]:
            begin, *events = events_of(answer, name)
            return [begin, {"type": "content_block_start", "index": -1, "content_block": block}, *events]

        def judge(path: str, body: Wire) -> Status | None:
            calling = [each["content"] for each in body["messages"] if '"tool_use"' in json.dumps(each)]
            lacking = any(content[0] != block for content in calling)
            return Status(400, message="Invalid `signature` in `thinking` block") if lacking else None

        monkeypatch.setattr(server, "chunks", chunks)
        monkeypatch.setattr(server, "judge", judge)
        return model
