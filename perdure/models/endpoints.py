"""Named servers (`PERDURE_ENDPOINTS__NAME__*`), whose models are `NAME:MODEL`, and the providers of pydantic-ai.

A name is compared without regard to case, and is lower-case in the names of models and breakers: `llm:vllm:qwen3`.
Reads no environment variable and opens no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

from perdure import environment
from perdure.errors import SettingsError
from perdure.settings import EndpointSettings, Settings

OPENAI, ANTHROPIC = "openai", "anthropic"
OWN_KINDS = (OPENAI, ANTHROPIC)
"""The protocols that perdure speaks itself."""

BUILT_IN = frozenset(
    {"offline", OPENAI, ANTHROPIC, "hash", "fastembed", "sentence-transformers", "static", "wordllama"}
)
"""The schemes of built-in models and embedders. No endpoint has one of these names."""

PROVIDERS = frozenset({
    "alibaba", "azure", "azure-responses", "bedrock", "bedrock-mantle", "cerebras", "cohere", "crusoe", "deepseek",
    "fireworks", "github", "github-copilot", "google", "google-cloud", "groq", "heroku", "huggingface", "litellm",
    "meta", "mistral", "moonshotai", "nebius", "ollama", "openai-chat", "openai-responses", "openrouter", "ovhcloud",
    "sambanova", "snowflake", "together", "vercel", "vllm", "xai", "zai",
})  # fmt: skip
"""The providers of chat models that pydantic-ai names."""

Refused: TypeAlias = dict[str, frozenset[str]]
"""By server, the options that it has refused for whatever model. The models of one process share it."""


def find(name: str, settings: Settings) -> tuple[str, EndpointSettings] | None:
    """The endpoint of the model or embedder `name` and the endpoint's name; `None` if `name` has no endpoint."""
    scheme = name.partition(":")[0].lower()
    endpoint = settings.endpoints.get(scheme)
    return None if endpoint is None else (scheme, endpoint)


def canonical(name: str, settings: Settings) -> str:
    """`name` with its endpoint's name in lower case."""
    scheme, colon, rest = name.partition(":")
    return name if find(name, settings) is None else f"{scheme.lower()}{colon}{rest}"


def variable(name: str, setting: str) -> str:
    """The variable that configures a member of an endpoint, such as `PERDURE_ENDPOINTS__VLLM__URL`."""
    return f"{environment.PREFIX}ENDPOINTS__{name.upper()}__{setting}"


def check(settings: Settings, schemes: Callable[[], Collection[str]]) -> None:
    """Check the names and kinds of all endpoints. `schemes` reads the installed schemes of other packages.

    Raises:
        SettingsError: a name hides a built-in or installed scheme, or a kind does not exist.
    """
    installed = schemes() if settings.endpoints else ()
    for name, endpoint in settings.endpoints.items():
        if name in BUILT_IN or name in installed:
            raise SettingsError(
                f"{variable(name, 'URL')}: {name!r} is the name of a built-in or installed provider; choose another "
                f"name for the endpoint, such as {variable(f'my_{name}', 'URL')}"
            )
        if endpoint.kind not in OWN_KINDS and endpoint.kind not in PROVIDERS:
            accepted = ", ".join([*OWN_KINDS, *sorted(PROVIDERS)])
            raise SettingsError(f"{variable(name, 'KIND')} is {endpoint.kind!r}: accepted: {accepted}")
