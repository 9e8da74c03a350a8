"""Settings of model calls: `Agent(settings=…)` and `PERDURE_MODEL_SETTINGS`."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pydantic_ai.settings
import pytest

from perdure import Agent
from perdure.agents import Agents
from perdure.assembly import _check_models
from perdure.clock import SystemClock
from perdure.errors import SettingsError
from perdure.models import resolve as resolving
from perdure.models import settings as model_settings
from perdure.models.offline import OfflineModel
from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Role
from perdure.models.resilient import FallbackModels, FallbackRequest, GuardedModel
from perdure.models.resolve import Models
from perdure.resilience.registry import Breakers
from perdure.settings import RetrySettings, Settings
from perdure.testing.suites.models import new_call

RIGHT: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "top_p": 0.5, "top_k": 5, "max_tokens": 800, "seed": -1},
    {"stop_sequences": ["END"], "presence_penalty": -2, "frequency_penalty": 1.5, "logit_bias": {"50256": -100}},
    {"parallel_tool_calls": False, "tool_choice": "required", "thinking": "high", "reasoning_effort": "none"},
    {"tool_choice": ["weather"], "thinking": False, "timeout": 5, "service_tier": "flex"},
    {"extra_headers": {"x-team": "shop"}, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
]

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "has the setting temperature='hot'; accepted: a number from 0"),
    ({"temperature": True}, "has the setting temperature=True; accepted: a number from 0"),
    ({"temperature": float("nan")}, "has the setting temperature=nan; accepted"),
    ({"seed": 1.5}, "has the setting seed=1.5; accepted: a whole number"),
    ({"max_tokens": 0}, "has the setting max_tokens=0; accepted: a whole number from 1"),
    ({"tool_choice": "any"}, "has the setting tool_choice='any'; accepted: 'auto', 'none', 'required', or a list"),
    ({"tool_choice": []}, "has the setting tool_choice=[]; accepted"),
    ({"seed": 1, "temprature": 1}, "has the setting 'temprature', which does not exist; accepted: temperature, top_p"),
    ({"max_retries": 2}, "has the setting 'max_retries', which does not exist"),
    ({1: 2}, "has the setting 1, which does not exist"),  # type: ignore[dict-item]
    (
        {"extra_body": {"key": object()}},
        "has the setting extra_body=a value that is not shown; accepted: a JSON object",
    ),
    ({"extra_headers": "x-key: secret"}, "has the setting extra_headers=a value that is not shown"),
]


@pytest.mark.parametrize("given", RIGHT)
def test_settings_of_the_accepted_types_are_kept(given: dict[str, Any]) -> None:
    """Each setting is accepted with the types that pydantic-ai accepts."""
    assert Agent("shop", "You sell tea.", settings=given).settings == given


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_setting_is_refused_where_it_is_written(given: dict[str, Any], message: str) -> None:
    """An unknown name or a wrong type is refused, with the agent, the setting and what is accepted."""
    with pytest.raises(SettingsError) as caught:
        Agent("shop", "You sell tea.", settings=given)
    assert str(caught.value).startswith(f"agent 'shop' {message}")
    assert "secret" not in str(caught.value)
    with pytest.raises(SettingsError, match=r"^PERDURE_MODEL_SETTINGS has the setting"):
        model_settings.check(given, "PERDURE_MODEL_SETTINGS")


def test_the_defaults_are_checked_at_start() -> None:
    """A process that makes models checks `PERDURE_MODEL_SETTINGS`."""
    with pytest.raises(SettingsError, match="PERDURE_MODEL_SETTINGS has the setting 'temprature'"):
        Models(Settings(model_settings={"temprature": 1}), SystemClock())


def test_settings_are_a_mapping() -> None:
    """Anything else than settings by name is refused."""
    with pytest.raises(SettingsError, match="agent 'shop' has settings=5; accepted: settings by name"):
        Agent("shop", "You sell tea.", settings=5)  # type: ignore[arg-type]


def test_the_names_are_those_of_pydantic_ai() -> None:
    """Each name but `reasoning_effort` is a member of pydantic-ai's `ModelSettings`."""
    (declared,) = ast.parse(inspect.getsource(pydantic_ai.settings.ModelSettings)).body
    assert isinstance(declared, ast.ClassDef)
    members = {
        each.target.id
        for each in declared.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assert {*model_settings.NAMES} - members == {"reasoning_effort"}


# --- what a protocol has


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of both vendors."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-2")


def start(agent: Agent, **settings: Any) -> None:
    """Check the models as a worker does at its start."""
    made = Settings(**settings)
    _check_models(Models(made, SystemClock()), made, Agents([agent]), called=True)


@pytest.mark.parametrize(
    ("model", "settings", "lacking"),
    [
        ("anthropic:claude-x", {"temperature": 0, "seed": 1}, "seed"),
        ("openai:gpt-5", {"top_k": 5, "seed": 1}, "top_k"),
    ],
)
def test_a_setting_that_the_protocol_lacks_is_refused_at_start(
    keys: None, model: str, settings: dict[str, Any], lacking: str
) -> None:
    """The error names the agent, the setting and the model, and lists what the model takes."""
    wanted = f"has the setting {lacking}, which the protocol of {model} lacks; accepted for this model: temperature, "
    with pytest.raises(SettingsError, match=f"agent 'shop' {wanted}"):
        start(Agent("shop", "You sell tea.", model=model, settings=settings))
    with pytest.raises(SettingsError, match=f"PERDURE_MODEL_SETTINGS {wanted}"):
        start(Agent("shop", "You sell tea."), model=model, model_settings=settings)


def test_a_setting_that_the_protocol_has_is_accepted_at_start(keys: None) -> None:
    """Each agent's settings are checked against its own model. The built-in model ignores all settings."""
    start(Agent("shop", "You sell tea.", model="openai:gpt-5", settings={"seed": 1, "timeout": 5}))
    start(Agent("shop", "You sell tea.", settings={"seed": 1, "top_k": 5}))


# --- in calls


class Taking(OfflineModel):
    """A model with some settings, which records its requests."""

    def __init__(self, *names: str) -> None:
        self.supported_settings = frozenset(names)
        self.requests: list[ModelRequest] = []
        self.seconds: list[float] = []

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        self.requests.append(request)
        self.seconds.append(call.remaining())
        return ModelReply("fine")


def guarded(model: Taking, **defaults: Any) -> GuardedModel:
    """`model` with a breaker."""
    breaker = Breakers(Settings().breaker, SystemClock()).get("llm:x")
    return GuardedModel(model, breaker, RetrySettings(), 120, defaults=defaults)


def test_a_model_gets_only_the_settings_that_it_has() -> None:
    """Defaults complete a request, and what the protocol lacks is left out."""
    model = Taking("temperature", "top_p")
    request = ModelRequest((Message(Role.USER, "hi"),), settings={"temperature": 1, "seed": 7})
    guarded(model, temperature=0, top_p=0.5, top_k=3).respond(request, new_call())
    assert model.requests[0].settings == {"temperature": 1, "top_p": 0.5}


def test_timeout_replaces_the_time_limit_of_a_call() -> None:
    """Perdure itself ends a call after the setting `timeout`; the model does not get the setting."""
    model = Taking("temperature")
    guarded(model).respond(ModelRequest((), settings={"timeout": 5}), new_call())
    assert 4 < model.seconds[0] <= 5
    assert model.requests[0].settings == {}


def test_a_fallback_gets_the_settings_that_it_has() -> None:
    """A fallback has no tools, so it gets no settings about tools. It keeps the schema of the output."""
    model = Taking("temperature", "tool_choice")
    settings = {"temperature": 1, "tool_choice": "required", "parallel_tool_calls": True, "seed": 7}
    request = ModelRequest((Message(Role.USER, "hi"),), settings=settings, output={"type": "object"})
    FallbackModels([guarded(model)]).execute(FallbackRequest(request, new_call()), ValueError())
    assert model.requests[0].settings == {"temperature": 1}
    assert model.requests[0].output == {"type": "object"}


def test_defaults_reach_calls_outside_of_turns() -> None:
    """Summaries and the extraction of memories get the defaults, but not those for an agent's answers."""
    defaults = {
        "temperature": 0.2,
        "max_tokens": 5,
        "tool_choice": "required",
        "stop_sequences": ["."],
        "thinking": False,
    }
    assert model_settings.of_background(defaults) == {"temperature": 0.2, "thinking": False}


def test_each_model_of_a_process_has_these_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without settings, as a summary's, gets the defaults that apply to it."""
    model = Taking("temperature", "max_tokens")
    monkeypatch.setattr(resolving, "resolve", lambda *_: model)
    models = Models(Settings(model_settings={"temperature": 0.2, "max_tokens": 5}), SystemClock())
    models.get("acme:large").respond(ModelRequest((Message(Role.USER, "Summarise."),)), new_call())
    assert model.requests[0].settings == {"temperature": 0.2}


@pytest.mark.parametrize(
    ("choice", "has_results", "sent"),
    [
        ("required", False, "required"),
        ("required", True, None),
        (["weather"], False, ["weather"]),
        (["weather"], True, None),
        ("none", True, "none"),
        ("auto", True, "auto"),
    ],
)
def test_a_required_call_is_required_once(choice: Any, has_results: bool, sent: Any) -> None:
    """After the first results, a call is not required any more: the model would call tools endlessly."""
    made = model_settings.of_call(
        {"tool_choice": "none", "seed": 1}, {"tool_choice": choice}, tools={"weather"}, has_results=has_results
    )
    assert (made.get("tool_choice"), made["seed"]) == (sent, 1)


def test_a_prompt_without_tools_has_no_settings_about_tools() -> None:
    """Providers refuse `tool_choice` without tools."""
    given = {"tool_choice": "auto", "parallel_tool_calls": False, "seed": 1}
    assert model_settings.of_call({}, given, tools=(), has_results=False) == {"seed": 1}


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer secret\n"}, {"X": "s\u00e9cret"}, {"X Y": "secret"}])
def test_a_header_that_cannot_be_sent_is_refused_and_not_shown(headers: dict[str, str]) -> None:
    """The HTTP library would quote the header in its error, which is logged."""
    with pytest.raises(SettingsError, match="extra_headers=a value that is not shown") as caught:
        model_settings.check({"extra_headers": headers}, "agent 'shop'")
    assert "cret" not in str(caught.value)


def test_headers_that_can_be_sent_are_accepted() -> None:
    model_settings.check({"extra_headers": {"X-Title": "my app", "X-Empty": "", "X-One": "1"}}, "agent 'shop'")
