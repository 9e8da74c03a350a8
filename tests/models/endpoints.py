"""Models of the endpoints that the environment's variables configure, and of a test server."""

from __future__ import annotations

from typing import Any

from perdure.clock import SystemClock
from perdure.models.providers.endpoint import Endpoint, endpoint_of
from perdure.models.providers.model import EndpointModel
from tests.models.server import ProviderServer


def configured(kind: str, model: str) -> EndpointModel:
    """The model that the environment's variables configure, as `PERDURE_MODEL` would select it."""
    return EndpointModel(endpoint_of(kind, "PERDURE_MODEL", f"{kind}:{model}"), model, SystemClock())


def model_of(server: ProviderServer, model: str = "test-model", name: str = "there", **members: Any) -> EndpointModel:
    """A model of `server` as an endpoint called `name`."""
    return EndpointModel(Endpoint(name, server.base_url, "sk-of-the-tests", **members), model, SystemClock())
