"""The behavioural suite of `suite.py` over every model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.clock import SystemClock
from perdure.models.protocol import Model
from perdure.models.resolve import resolve
from perdure.settings import Settings
from tests.models.openai_server import OpenAIServer
from tests.models.suite import ModelSuite


class TestOffline(ModelSuite):
    @pytest.fixture
    def model(self) -> Model:
        return resolve("offline", Settings(), SystemClock())


class TestOpenAI(ModelSuite):
    @pytest.fixture
    def model(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
        with OpenAIServer() as server:
            monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
            monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-tests")
            yield resolve("openai:test-model", Settings(), SystemClock())
