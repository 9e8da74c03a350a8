"""Fixtures: an OpenAI test server, and a model that calls it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import httpx2
import pytest

from perdure.models.endpoints import OPENAI
from perdure.models.providers.model import EndpointModel
from tests.models.endpoints import configured
from tests.models.openai_server import OpenAIServer

_trust = functools.cache(httpx2.create_ssl_context)


@pytest.fixture(autouse=True)
def one_ssl_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share one SSL context, because loading the certificate authorities takes longer than most of these tests."""
    monkeypatch.setattr(httpx2, "create_ssl_context", _trust)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    """A server that responds as `two_steps` does, unless the test scripts other responses."""
    with OpenAIServer() as running:
        yield running


@pytest.fixture
def model(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndpointModel]:
    """A model that calls `server`, configured by environment variables as in production."""
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-tests")
    made = configured(OPENAI, "test-model")
    yield made
    made.close()
