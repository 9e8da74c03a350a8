"""Reads `.env` for `perdure.settings`, finds unknown variables and explains invalid values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, DotEnvSettingsSource

from perdure.errors import SettingsError

PREFIX = "PERDURE_"

_SECRET = ("KEY", "SECRET", "URL", "MODEL_SETTINGS")
"""Messages do not show the value of a variable whose name contains one of these words."""

ANY_NAME = "NAME"
"""Stands for the name that an operator chooses, in the variables of a group such as `PERDURE_ENDPOINTS__NAME__URL`."""


def read(settings: type[BaseSettings], path: Any) -> Mapping[str, str]:
    """The variables in the file at `path`: upper-case names mapped to values. Leaves out empty values.

    Raises:
        SettingsError: the file cannot be read.
    """
    try:
        source = DotEnvSettingsSource(settings, env_file=path, case_sensitive=True, env_ignore_empty=True)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}; accepted: NAME=VALUE lines in UTF-8") from error
    return {name.upper(): value for name, value in source.env_vars.items() if value}


def unknown(settings: type[BaseSettings], names: Iterable[str]) -> list[str]:
    """Those of `names` that begin with `PERDURE_` but are not settings, sorted.

    Those of a group with a name that an operator chooses are not among them: such a group refuses unknown members.
    """
    known = {PREFIX + name.upper() for name in settings.model_fields}
    known |= {variable for group in _groups(settings) for variable in _of_group(settings, group)}
    refused = tuple(f"{PREFIX}{group}__" for group in _groups(settings, named=True))
    return sorted({
        name for name in names
        if (upper := name.upper()).startswith(PREFIX) and upper not in known and not upper.startswith(refused)
    })  # fmt: skip


def explain(settings: type[BaseSettings], error: ValidationError) -> str:
    return "\n".join(_line(settings, item) for item in error.errors())


def given_groups(settings: type[BaseSettings], names: Iterable[str]) -> str:
    """One error line for each of `names` that is a group of settings, such as `PERDURE_STREAM`.

    A group itself cannot be set. Its variables can be set, such as `PERDURE_STREAM__BATCH_MS`.
    """
    given = {name.upper() for name in names}
    return "\n".join(_is_group(settings, group) for group in _groups(settings) if PREFIX + group in given)


def _line(settings: type[BaseSettings], item: ErrorDetails) -> str:
    location = "__".join(str(part) for part in item["loc"] if not isinstance(part, int)).upper()
    message = item["msg"].removeprefix("Value error, ")
    if message.startswith(PREFIX):
        return message
    group = location.partition("__")[0] in _groups(settings)
    if item["type"] in {"model_type", "model_attributes_type"} or (group and item["type"] == "dict_type"):
        return _is_group(settings, location)
    if item["type"] == "extra_forbidden":
        accepted = ", ".join(_of_group(settings, location.partition("__")[0]))
        return f"{PREFIX}{location} is not a setting of this release of perdure: accepted: {accepted}"
    secret = any(word in location for word in _SECRET)
    problem = "(its value is not shown) cannot be used" if secret else f"is {item['input']!r}"
    return f"{PREFIX}{location} {problem}: {message[:1].lower()}{message[1:]}"


def _groups(settings: type[BaseSettings], *, named: bool = False) -> list[str]:
    """The groups of settings; if `named`, only those whose variables contain a name that an operator chooses."""
    return [
        name.upper() for name in settings.model_fields
        if (group := _group(settings, name)) is not None and (group[1] or not named)
    ]  # fmt: skip


def _group(settings: type[BaseSettings], name: str) -> tuple[type[BaseModel], bool] | None:
    """The model of a group's settings, and whether the group is named; `None` if the field `name` is no group."""
    field = settings.model_fields[name]
    if isinstance(field.default, BaseModel):
        return type(field.default), False
    value = next(reversed(get_args(field.annotation)), None)
    return (value, True) if isinstance(value, type) and issubclass(value, BaseModel) else None


def _of_group(settings: type[BaseSettings], group: str) -> list[str]:
    """The names of a group's variables, with perdure's prefix."""
    found = _group(settings, group.lower())
    model, named = found if found is not None else (BaseModel, False)
    prefix = f"{PREFIX}{group.upper()}__{f'{ANY_NAME}__' if named else ''}"
    return [prefix + name.upper() for name in model.model_fields]


def _is_group(settings: type[BaseSettings], group: str) -> str:
    """Say which variables to set; `group` may have a name, such as `ENDPOINTS__VLLM`."""
    return f"{PREFIX}{group} is a group: set {', '.join(_of_group(settings, group.partition('__')[0]))}"
