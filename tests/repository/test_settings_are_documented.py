"""The files that set PERDURE_ variables and the settings themselves know the same names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from perdure.settings import Settings
from tests.repository.source import read

VENDOR = {"OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"}  # their SDKs' own
FLOWER = {"FLOWER_BASIC_AUTH", "FLOWER_ADDRESS", "FLOWER_PORT"}
COMPOSE = yaml.safe_load(read("compose.yaml"))


def defaults(model: type[BaseModel], prefix: str = "PERDURE_") -> Iterator[tuple[str, Any]]:
    """Each variable that sets a field of `model`, nested groups included, with the field's default."""
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from defaults(type(default), f"{prefix}{name.upper()}__")
        else:
            yield f"{prefix}{name.upper()}", default


def as_written(value: Any) -> str:
    """A default as .env would hold it."""
    match value:
        case None | ():
            return ""
        case bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
        case tuple():
            return ",".join(str(item) for item in value)
        case float() | int():
            return f"{value:g}" if value < 1e5 else str(value)
        case _:
            return str(value)


KNOWN = {name: as_written(value) for name, value in defaults(Settings)}
EXAMPLE = dict(re.findall(r"^# ([A-Z][A-Z0-9_]*)=(.*)$", read(".env.example"), re.MULTILINE))


def test_the_example_names_every_setting_with_its_default() -> None:
    """.env.example is where an operator looks first; a wrong default there misleads for years."""
    assert {name: value for name, value in EXAMPLE.items() if name not in VENDOR | FLOWER} == KNOWN


def test_the_example_changes_nothing_when_it_is_copied() -> None:
    """Everything in it is commented out."""
    assert [line for line in read(".env.example").splitlines() if line and not line.startswith("#")] == []


def test_each_setting_of_the_example_has_its_meaning_in_the_line_above() -> None:
    """A name alone says what, not what for."""
    lines = read(".env.example").splitlines()
    for above, line in pairwise(lines):
        if (found := re.match(r"# (PERDURE_\w+)=", line)) is not None:
            assert re.match(r"# (?!PERDURE_\w+=)\w", above), f"{found[1]} is not explained"


@pytest.mark.parametrize("service", ["migrate", "gateway", "worker", "beat", "flower"])
def test_compose_passes_each_setting(service: str) -> None:
    """A variable of the shell reaches the containers only if it is listed; those of groups come from `.env`."""
    given = COMPOSE["services"][service]
    listed = {name for name in KNOWN if "__" not in name} | VENDOR

    assert listed <= given["environment"].keys()
    assert given["env_file"] == [{"path": ".env", "required": False}]


def test_compose_overrides_no_setting_with_a_default_of_its_own() -> None:
    """Only addresses within the installation have a value there; everything else is the shell's or `.env`'s."""
    environment = COMPOSE["services"]["worker"]["environment"]
    fixed = {name for name, value in environment.items() if value is not None and "${" + name not in value}

    assert fixed == {"PERDURE_DATABASE_URL", "PERDURE_REDIS_URL", "PERDURE_DATA_DIR", "PYTHONPATH"}


def test_compose_has_a_place_for_a_module_of_agents() -> None:
    """Each process imports `PERDURE_AGENTS`: it must find the module in a directory of the host."""
    for name in ("gateway", "worker", "beat", "flower", "migrate"):
        service = COMPOSE["services"][name]
        mounted = {volume.split(":")[1] for volume in service["volumes"] if volume.startswith("./")}
        assert service["environment"]["PYTHONPATH"] in mounted


@pytest.mark.parametrize("file", ["compose.yaml", "Dockerfile", ".env.example", "Procfile", "Makefile"])
def test_no_file_sets_a_variable_that_is_not_a_setting(file: str) -> None:
    """A misspelt variable is silently ignored by the program that should read it."""
    used = set(re.findall(r"PERDURE_[A-Z][A-Z0-9_]*[A-Z0-9]", read(file)))

    assert used <= KNOWN.keys()
