"""The settings of a model's calls, such as `temperature`: their names, their types, and which models take them.

The names and meanings are those of pydantic-ai's `ModelSettings`, with `reasoning_effort` in addition. An agent's
settings (`Agent(settings=…)`) take precedence over `PERDURE_MODEL_SETTINGS`, member by member. Both are checked when a
program starts: against the types here, and against what the model's protocol has (`supported_settings`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, ValidationError, create_model

from perdure.errors import SettingsError
from perdure.models.protocol import Model
from perdure.text import declarations

_EFFORTS = Literal["minimal", "low", "medium", "high", "xhigh", "max"]
_SHOWN_EFFORTS = "'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'"
_PENALTY = Annotated[float, Field(ge=-2, le=2)]
_TEXT = Annotated[str, Field(min_length=1)]

_HEADER_NAME = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+\z")]
_HEADER_VALUE = Annotated[str, Field(pattern=r"^([!-~]([ -~]*[!-~])?)?\z")]
"""Others are refused here, because the HTTP library's errors would quote them, and so a key."""

_ACCEPTED: Mapping[str, tuple[Any, str]] = {
    "temperature": (Annotated[float, Field(ge=0)], "a number from 0"),
    "top_p": (Annotated[float, Field(ge=0, le=1)], "a number from 0 to 1"),
    "top_k": (Annotated[int, Field(ge=1)], "a whole number from 1"),
    "max_tokens": (Annotated[int, Field(ge=1)], "a whole number from 1"),
    "seed": (int, "a whole number"),
    "stop_sequences": (list[_TEXT], "a list of texts"),
    "presence_penalty": (_PENALTY, "a number from -2 to 2"),
    "frequency_penalty": (_PENALTY, "a number from -2 to 2"),
    "logit_bias": (dict[str, int], "whole numbers by token id, such as {'1234': -100}"),
    "parallel_tool_calls": (bool, "True or False"),
    "tool_choice": (
        Literal["none", "required", "auto"] | Annotated[list[_TEXT], Field(min_length=1)],
        "'auto', 'none', 'required', or a list of tools' names",
    ),
    "thinking": (bool | _EFFORTS, f"True, False, {_SHOWN_EFFORTS}"),
    "reasoning_effort": (Literal["none"] | _EFFORTS, f"'none', {_SHOWN_EFFORTS}"),
    "timeout": (Annotated[float, Field(gt=0)], "a number of seconds above 0"),
    "service_tier": (Literal["auto", "default", "flex", "priority"], "'auto', 'default', 'flex' or 'priority'"),
    "extra_headers": (dict[_HEADER_NAME, _HEADER_VALUE], "texts of printable ASCII characters by header name"),
    "extra_body": (dict[str, JsonValue], "a JSON object"),
}
"""Each setting with its type, and with the words that describe the type."""

NAMES = tuple(_ACCEPTED)

_FIELDS: dict[str, Any] = {name: (accepted, ...) for name, (accepted, _) in _ACCEPTED.items()}
_TYPES = create_model(
    "ModelSettings", __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False), **_FIELDS
)

SECRET = ("extra_headers", "extra_body")
"""Settings whose values messages do not show, because they may contain keys."""

_ABOUT_TOOLS = frozenset({"tool_choice", "parallel_tool_calls"})

_OF_AN_ANSWER = _ABOUT_TOOLS | {"max_tokens", "stop_sequences", "logit_bias"}
"""Settings for the answers of an agent. Summaries, titles and the extraction of memories do not have them."""


def supported_by(model: Model) -> frozenset[str]:
    """The settings that `model` takes: the names in its attribute `supported_settings`, and none without it.

    `timeout` is not one of them: perdure itself ends a call.
    """
    supported: frozenset[str] = getattr(model, "supported_settings", frozenset())
    return supported - {"timeout"}


def check(given: object, owner: str) -> None:
    """Check the names and the types of settings. `owner` names them in messages, such as `agent 'shop'`.

    Raises:
        SettingsError: a name is unknown, or a value has the wrong type. The message has what is accepted.
    """
    if not isinstance(given, Mapping):
        raise SettingsError(
            f"{owner} has settings={declarations.shown(given)}; accepted: settings by name, such as "
            "{'temperature': 0.2}"
        )
    unknown = next((name for name in given if name not in NAMES), None)
    if unknown is not None:
        raise SettingsError(
            f"{owner} has the setting {declarations.shown(unknown)}, which does not exist; accepted: {', '.join(NAMES)}"
        )
    try:
        _TYPES.model_validate(dict(given))
    except ValidationError as error:
        wrong = next((str(item["loc"][0]) for item in error.errors() if item["loc"][0] in given), None)
        if wrong is not None:  # all other errors are about settings that are not given
            shown = "a value that is not shown" if wrong in SECRET else declarations.shown(given[wrong])
            raise SettingsError(f"{owner} has the setting {wrong}={shown}; accepted: {_ACCEPTED[wrong][1]}") from None


def check_support(given: Mapping[str, Any], model: Model, owner: str) -> None:
    """Check that `model` takes all settings in `given`.

    Raises:
        SettingsError: the model's protocol lacks one of the settings.
    """
    supported = supported_by(model) | {"timeout"}
    lacking = next((name for name in given if name not in supported), None)
    if lacking is not None:
        accepted = ", ".join(name for name in NAMES if name in supported)
        raise SettingsError(
            f"{owner} has the setting {lacking}, which the protocol of {model.name} lacks; accepted for this model: "
            f"{accepted}"
        )


def of_call(
    defaults: Mapping[str, Any], own: Mapping[str, Any], *, tools: Collection[str], has_results: bool
) -> dict[str, Any]:
    """The settings of one call in a turn: the agent's `own`, and the defaults that they do not replace.

    A `tool_choice` that requires a call applies until the turn has the results of calls (`has_results`): the model
    would call tools endlessly. A prompt without tools has no settings about tools, which providers refuse. Of the tools
    that `tool_choice` names, those that are not among the prompt's `tools` are left out.
    """
    chosen = {**defaults, **own}
    choice = chosen.pop("tool_choice", None)
    if isinstance(choice, list | tuple):
        choice = [name for name in choice if name in tools]
    if choice and (choice in ("none", "auto") or not has_results):
        chosen["tool_choice"] = choice
    return chosen if tools else without_tools(chosen)


def without_tools(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _ABOUT_TOOLS}


def of_background(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that also apply to calls outside of turns, such as summaries and the extraction of memories."""
    return {name: value for name, value in defaults.items() if name not in _OF_AN_ANSWER}
