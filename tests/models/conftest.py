"""A model of the test server, for tests of what `openai:` does with that server's ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.clock import SystemClock
from perdure.models.openai import OpenAIModel
from tests.models.openai_server import OpenAIServer


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    """A server that plays turns of two steps unless the test scripts it."""
    with OpenAIServer() as running:
        yield running


@pytest.fixture
def model(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIModel]:
    """A model of that server, set up from the environment as in production."""
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-tests")
    made = OpenAIModel("test-model", SystemClock())
    yield made
    made.close()
