"""Creates pydantic-ai's model of a name, with perdure's HTTP client in the vendor's SDK."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2
from pydantic_ai.exceptions import UserError
from pydantic_ai.models import Model, infer_model
from pydantic_ai.providers import Provider, infer_provider_class

from perdure.errors import MissingKey, SettingsError
from perdure.models.adapted import event_loop
from perdure.models.adapted.http import client, watch
from perdure.models.providers.endpoint import NO_KEY, Endpoint
from perdure.models.providers.transport import CONNECT_TIMEOUT_S
from perdure.text.patterns import compiled

_EXTRA = compiled(r"pydantic-ai-slim\[[a-z0-9-]+\]")
_BEDROCK_READ_S = 300
"""Seconds in which a byte of a reply must arrive. botocore has no limit for a whole call, and none for one request."""
_BEDROCK_CONNECTIONS = 100
_REGION = "us-east-1"
"""A region for the client of an endpoint with its own URL and key, which needs none."""
_OPENAI = frozenset({"openai", "openai-chat", "openai-responses"})


@dataclass(frozen=True, slots=True)
class Vendor:
    """A model of pydantic-ai, and the HTTP client that perdure gave it; `None` if the model has a client of its own."""

    model: Model
    http_client: Any = None

    def close(self) -> None:
        """Close the connections of perdure's client."""
        if self.http_client is not None:
            event_loop.release(self.http_client)


def vendor(kind: str, model: str, name: str, variable: str, endpoint: Endpoint | None) -> Vendor:
    """The model `model` of the provider that pydantic-ai calls `kind`.

    `endpoint` is the provider's server. By default, the server and the key are those of the vendor's environment
    variables.

    Raises:
        MissingKey: the vendor's key is not set.
        SettingsError: there is no such provider, its SDK is missing, or it cannot be set up.
    """
    setting = f"{variable} is {name!r}"
    clients: list[Any] = []
    try:
        made = infer_model(f"{kind}:{model}", lambda each: _provider(each, endpoint, clients))
    except ImportError as error:
        raise SettingsError(f"{setting}: {_extra(error)}") from error
    except UserError as error:
        said = error.message.partition(" To try Pydantic AI")[0]
        if "environment variable" in said:
            raise MissingKey(f"{setting}: {said}") from error
        raise SettingsError(f"{setting}: {said}") from error
    except ValueError as error:
        raise SettingsError(f"{setting}: pydantic-ai knows no provider {kind!r}") from error
    return Vendor(made, *clients)


def _extra(error: ImportError) -> str:
    """What to install, as pydantic-ai says it."""
    extra = _EXTRA.search(str(error))
    wanted = f" '{extra[0]}'" if extra else ""
    return f"the vendor's SDK cannot be imported: pip install 'perdure[pydantic-ai]'{wanted}"


def _provider(kind: str, endpoint: Endpoint | None, clients: list[Any]) -> Provider[Any]:
    """The provider called `kind`. Its HTTP client, if it accepts one, is added to `clients`."""
    made = infer_provider_class(kind)
    accepted = inspect.signature(made.__init__).parameters
    options: dict[str, Any] = {}
    if library := _http_library(accepted):
        clients.append(client(library))
        event_loop.keep(clients[0])
        options["http_client"] = clients[0]
    if kind == "bedrock":
        options["bedrock_client"] = _bedrock_client(endpoint)
    elif endpoint is not None and kind in _OPENAI:
        from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider  # noqa: PLC0415 (imports the SDK)

        return OpenAICompatibleProvider(endpoint.name, base_url=endpoint.base_url, api_key=endpoint.key, **options)
    elif endpoint is not None:
        if not {"base_url", "api_key"} <= accepted.keys():
            raise UserError(f"{made.__name__} accepts no URL, so it cannot be a named endpoint")
        options |= {"base_url": endpoint.base_url, "api_key": endpoint.key}
        made = type(made.__name__, (made,), {"name": endpoint.name, "canonical_system": endpoint.name})
    return made(**options)


def _http_library(accepted: Any) -> Any:
    """The library of the provider's HTTP client; `None` if the provider accepts no client."""
    kind = str(accepted["http_client"].annotation) if "http_client" in accepted else ""
    if kind.startswith("httpx."):
        return importlib.import_module("httpx")
    return httpx2 if "httpx2" in kind or "AsyncHTTPClient" in kind or "OpenAIHTTPClient" in kind else None


def _bedrock_client(endpoint: Endpoint | None) -> Any:
    """A client of Bedrock without retries, which pydantic-ai has no option for.

    The key of an endpoint takes the place of the credentials of AWS.
    """
    boto3, config = importlib.import_module("boto3"), importlib.import_module("botocore.config")
    has_key = endpoint is not None and endpoint.key != NO_KEY
    options = config.Config(
        signature_version=importlib.import_module("botocore").UNSIGNED if has_key else None,
        retries={"total_max_attempts": 1},
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=_BEDROCK_READ_S,
        max_pool_connections=_BEDROCK_CONNECTIONS,
    )
    url = None if endpoint is None else endpoint.base_url
    try:
        made = boto3.client("bedrock-runtime", _REGION if has_key else None, config=options, endpoint_url=url)
    except importlib.import_module("botocore.exceptions").BotoCoreError as error:
        raise UserError(f"the client of Bedrock cannot be set up: {error}") from error
    if endpoint is not None and has_key:
        made.meta.events.register("before-sign", partial(_authorize, endpoint))
    watch(made)
    return made


def _authorize(endpoint: Endpoint, request: Any, **_: Any) -> None:
    for name, value in endpoint.authorization.items():
        request.headers[name] = value
