"""Named endpoints, and the providers of pydantic-ai: `PERDURE_ENDPOINTS__NAME__*` and `model="vllm:qwen3"`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
from pydantic_ai import providers
from pydantic_ai.models import OpenAIChatCompatibleProvider
from pydantic_ai.providers import infer_provider_class

from perdure import Agent
from perdure.clock import SystemClock
from perdure.errors import ProviderError, SettingsError
from perdure.models import endpoints
from perdure.models import resolve as resolving
from perdure.models.offline import OfflineModel
from perdure.models.protocol import Message, ModelRequest, Role
from perdure.models.providers.endpoint import Endpoint
from perdure.models.resolve import Models, resolve
from perdure.resilience.registry import Breakers
from perdure.settings import Settings
from perdure.testing.suites.models import new_call
from tests.models.anthropic_server import AnthropicServer
from tests.models.openai_server import OpenAIServer, Status

HELLO = ModelRequest((Message(Role.USER, "hello"),))


def settings_of(**given: dict[str, Any]) -> Settings:
    """Settings with these endpoints, without retries."""
    return Settings.model_validate({"endpoints": given, "retry": {"max_attempts": 1}})


def test_several_endpoints_have_their_own_server_key_and_breaker(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two named servers and OpenAI are used at once. A failure of one opens the breaker of its model only."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    with OpenAIServer() as second:
        settings = settings_of(
            vllm={"url": server.base_url, "key": "sk-of-vllm"}, ollama={"url": second.base_url, "thinks": True}
        )
        breakers = Breakers(settings.breaker, SystemClock())
        models = Models(settings, SystemClock(), breakers)
        assert models.get("openai:gpt-5").name == "openai:gpt-5"
        server.script(Status(500))
        with pytest.raises(ProviderError):
            models.get("vllm:qwen3").respond(HELLO, new_call())
        assert models.get("ollama:llama3.2:1b").respond(HELLO, new_call()).content
        assert second.requests[0]["model"] == "llama3.2:1b"
        assert second.headers[0]["authorization"] == "Bearer none"
        assert server.headers[0]["authorization"] == "Bearer sk-of-vllm"
        assert {each.name: each.failure_count for each in breakers.list()} == {
            "llm:vllm:qwen3": 1,
            "llm:ollama:llama3.2:1b": 0,
        }


def test_the_models_of_a_process_share_what_a_server_refused(server: OpenAIServer) -> None:
    """The second model, whose summaries or fallbacks the same server makes, is not refused again."""
    models = Models(settings_of(vllm={"url": server.base_url}), SystemClock())
    server.script(Status(422, message="stream_options: Extra inputs are not permitted"))
    for name in ("vllm:one", "VLLM:two"):
        assert models.get(name).respond(HELLO, new_call()).content
    assert ["stream_options" in each for each in server.requests] == [True, False, False]


def test_an_endpoint_may_speak_messages() -> None:
    """An endpoint of the kind `anthropic` is called with Anthropic's protocol."""
    with AnthropicServer() as server:
        settings = settings_of(proxy={"url": server.base_url, "key": "sk-of-proxy", "kind": "anthropic"})
        model = resolve("proxy:claude-x", settings, SystemClock())
        assert model.respond(HELLO, new_call()).content
        assert model.name == "proxy:claude-x"
        assert server.headers[0]["authorization"] == "Bearer sk-of-proxy"
        assert server.headers[0]["x-api-key"] == "sk-of-proxy"


def test_the_vendor_gets_its_key_in_its_own_header() -> None:
    """Anthropic takes an API key in `x-api-key` only, and refuses it as a bearer token."""
    vendor = Endpoint("anthropic", "https://api.anthropic.com", "sk-of-anthropic", kind="anthropic")
    assert vendor.authorization == {"X-Api-Key": "sk-of-anthropic"}


def test_a_key_is_sent_without_the_white_space_around_it(server: OpenAIServer) -> None:
    """Secrets in files often end with a line feed."""
    model = resolve("vllm:m", settings_of(vllm={"url": server.base_url, "key": "sk-of-vllm\n"}), SystemClock())
    assert model.respond(HELLO, new_call()).content
    assert server.headers[0]["authorization"] == "Bearer sk-of-vllm"


@pytest.mark.parametrize("key", ["sk-secret\nX: y", "sk-secret\u2019", "sk-\x00secret"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key: str) -> None:
    """The HTTP library would quote the header with the key in its error, which is logged."""
    with pytest.raises(SettingsError, match="PERDURE_ENDPOINTS__VLLM__KEY has characters") as caught:
        resolve("vllm:m", settings_of(vllm={"url": "http://127.0.0.1:1", "key": key}), SystemClock())
    assert "secret" not in str(caught.value)


def test_a_name_is_compared_without_case() -> None:
    """`VLLM:qwen3` and `vllm:qwen3` are one model with one breaker."""
    settings = settings_of(vllm={"url": "http://127.0.0.1:1/v1"})
    models = Models(settings, SystemClock())
    assert models.get("VLLM:Qwen3") is models.get("vllm:Qwen3")
    assert models.get("VLLM:Qwen3").name == "vllm:Qwen3"


@pytest.mark.parametrize("name", ["openai", "anthropic", "offline", "hash", "static", "sentence-transformers"])
def test_an_endpoint_does_not_hide_a_built_in_provider(name: str) -> None:
    """An endpoint with the name of a built-in provider is refused at start; the error says which variable to rename."""
    with pytest.raises(SettingsError, match=f"PERDURE_ENDPOINTS__{name.upper()}__URL: '{name}' is the name of a built"):
        Models(settings_of(**{name: {"url": "http://127.0.0.1:1"}}), SystemClock())


def test_an_unknown_kind_says_what_is_accepted() -> None:
    """An endpoint's kind is checked at start, although no model of the endpoint is used."""
    with pytest.raises(
        SettingsError, match="PERDURE_ENDPOINTS__VLLM__KIND is 'opanai': accepted: openai, anthropic, al"
    ):
        Models(settings_of(vllm={"url": "http://127.0.0.1:1", "kind": "opanai"}), SystemClock())


def test_an_unknown_scheme_names_the_endpoints() -> None:
    """The error about an unknown model lists the names of the endpoints, and how to add one."""
    settings = settings_of(vllm={"url": "http://127.0.0.1:1"})
    with pytest.raises(SettingsError, match=r"vllm:NAME, a server of your own \(PERDURE_ENDPOINTS__NAME__URL\)"):
        resolve("nope:x", settings, SystemClock())
    with pytest.raises(SettingsError, match="PERDURE_MODEL is 'vllm:'"):
        resolve("vllm:", settings, SystemClock())


# --- pydantic-ai


@dataclass
class Foreign:
    """A model object of pydantic-ai; like some of those, it has no hash."""

    system: str
    model_name: str


class Adapted(OfflineModel):
    """What the adapter returns: a model that keeps what it was made of."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A substitute for the module that makes models of pydantic-ai."""
    module = ModuleType("perdure.models.adapted")
    module.adapted_model = lambda name, _, *others, **__: Adapted(name, *others)  # type: ignore[attr-defined]
    module.adapt_model = lambda model, _: Adapted(model)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "perdure.models.adapted", module)


@pytest.mark.parametrize("name", ["google:gemini-2.5-pro", "bedrock:us.claude:0", "openai-responses:gpt-5", "vllm:x"])
def test_other_providers_come_through_pydantic_ai(adapted: None, name: str) -> None:
    """A scheme that pydantic-ai names is passed to the adapter with the whole name."""
    model = resolve(name, Settings(), SystemClock())
    assert isinstance(model, Adapted)
    assert model.made_of == (name, "PERDURE_MODEL", None, name.partition(":")[0])


def test_an_endpoint_may_have_a_kind_of_pydantic_ai(adapted: None) -> None:
    """An endpoint of another kind is passed to the adapter, with its URL and key."""
    settings = settings_of(mine={"url": "http://127.0.0.1:1", "key": "sk-second", "kind": "google"})
    model = resolve("MINE:gemini", settings, SystemClock(), "PERDURE_SUMMARY_MODEL")
    assert isinstance(model, Adapted)
    name, variable, endpoint, kind = model.made_of
    assert (name, variable, kind) == ("mine:gemini", "PERDURE_SUMMARY_MODEL", "google")
    assert (endpoint.name, endpoint.base_url, endpoint.key) == ("mine", "http://127.0.0.1:1", "sk-second")


def test_an_endpoint_comes_before_a_provider_of_pydantic_ai(adapted: None) -> None:
    """`vllm` is a provider of pydantic-ai, too: an endpoint of this name is called by perdure itself."""
    settings = settings_of(vllm={"url": "http://127.0.0.1:1/v1"})
    assert not isinstance(resolve("vllm:x", settings, SystemClock()), Adapted)


def test_an_agent_may_have_a_model_object(adapted: None) -> None:
    """A model object is passed through. Two objects with one name are two models that share a breaker."""
    one, two = Foreign("google", "gemini"), Foreign("google", "gemini")
    agent = Agent("assistant", "You help.", model=one)
    breakers = Breakers(Settings().breaker, SystemClock())
    models = Models(Settings(), SystemClock(), breakers)
    assert agent.model is not None
    assert models.get(agent.model) is models.get(one)
    assert models.get(one) is not models.get(two)
    for model in (one, two):
        models.get(model).respond(HELLO, new_call())
    assert [each.name for each in breakers.list()] == ["llm:google:gemini"]
    with pytest.raises(SettingsError, match="a model of pydantic-ai"):
        Agent("assistant", "You help.", model=object())  # type: ignore[arg-type]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pydantic-ai, the error names perdure's extra."""
    monkeypatch.setattr(resolving, "find_spec", lambda _: None)
    for name in ("google:gemini", "groq:llama"):
        with pytest.raises(SettingsError, match=rf"PERDURE_MODEL is '{name}': .* pip install 'perdure\[pydantic-ai\]'"):
            resolve(name, Settings(), SystemClock())


@pytest.mark.parametrize("provider", sorted(endpoints.PROVIDERS))
def test_pydantic_ai_knows_each_provider(provider: str) -> None:
    """pydantic-ai has each provider of the list. The SDK of a provider may be missing."""
    with contextlib.suppress(ImportError):
        infer_provider_class(provider)  # raises ValueError for an unknown provider


def test_each_providers_variables_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that pydantic-ai reads are copied from `.env` into the environment, as those of OpenAI are."""
    sources = [path.read_text() for path in Path(providers.__file__).parent.glob("*.py")]
    read = {
        name for text in sources for name in re.findall(r"(?:getenv|environ\.get)\('([A-Z_]+_(?:KEY|TOKEN))'", text)
    }
    others = (
        "PAIG_",
        "PYDANTIC_AI_",
        "COPILOT_",
        "TYPESAFE_",
        "ELEVENLABS_",
        "VOYAGE_",
        "SYSTEM_ONE_",
        "AZURE_VOICELIVE_",
    )
    wanted = {name for name in read if not name.startswith(others)}
    assert len(wanted) > 20
    for name in wanted:
        monkeypatch.setenv(name, "")
    (tmp_path / ".env").write_text("".join(f"{name}=of-the-file\n" for name in wanted))
    Settings.load(_env_file=tmp_path / ".env")
    assert {name for name in wanted if os.environ.get(name) != "of-the-file"} == set()


def test_no_provider_of_chat_completions_is_missing() -> None:
    """The list has each provider that pydantic-ai calls with Chat Completions."""
    assert {*get_args(OpenAIChatCompatibleProvider.__value__)} <= endpoints.PROVIDERS


@pytest.mark.long
def test_own_models_do_not_import_pydantic_ai() -> None:
    """`openai:` and `anthropic:` work without the extra. A worker that only uses them does not import pydantic-ai."""
    assert importlib.util.find_spec("pydantic_ai") is not None, "without the extra, the test could not fail"
    program = """
import sys
import perdure.cli, perdure.workers.celery_application, perdure.workers.lifecycle, perdure.turns.run.loop
from perdure.assembly import check
from perdure.settings import Settings
check(Settings(model="openai:gpt-5", fallback_models=("anthropic:claude-x", "vllm:qwen3"), embedder="openai:small",
               endpoints={"vllm": {"url": "http://127.0.0.1:1/v1"}}))
print([each for each in sys.modules if each.partition(".")[0] in ("pydantic_ai", "genai_prices")])
"""
    environment = {"OPENAI_API_KEY": "sk-1", "ANTHROPIC_API_KEY": "sk-2"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("[]\n", "")
