"""Files that set PERDURE_ variables name exactly the settings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from perdure.settings import EndpointSettings, Settings
from tests.repository.source import read

VENDOR = {"OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"}  # the SDKs read them
FLOWER = {"FLOWER_BASIC_AUTH", "FLOWER_ADDRESS", "FLOWER_PORT"}
NAMED: dict[str, type[BaseModel]] = {"PERDURE_ENDPOINTS": EndpointSettings}
"""Groups of settings whose variables contain a name that the operator chooses; documented as `NAME`."""

COMPOSE = yaml.safe_load(read("compose.yaml"))
BROKER = {"PERDURE_REDIS_URL", "PERDURE_BROKER_URL", "PERDURE_REDIS_PREFIX"}
GETS = {
    "POSTGRES_PASSWORD": {"postgres", "migrate", "gateway", "worker", "beat", "channels"},
    "PERDURE_DATABASE_URL": {"migrate", "gateway", "worker", "beat", "channels"},
    "PERDURE_MIGRATE_URL": {"migrate"},
    "PERDURE_REDIS_URL": {"gateway", "worker", "beat", "channels", "flower"},
    "PERDURE_BROKER_URL": {"gateway", "worker", "beat", "channels", "flower"},
    "PERDURE_API_KEYS": {"gateway"},
    "PERDURE_ADMIN_KEYS": {"gateway"},
    "PERDURE_SECRET_KEY": {"gateway", "worker", "channels"},
    "PERDURE_SECRET_KEY_BEFORE": {"gateway", "worker", "channels"},
    "PERDURE_WEBHOOK_SECRET": {"worker"},
    "PERDURE_CASEBANK__NOTIFY_URL": {"worker"},
    "PERDURE_DISCORD__TOKEN": {"gateway", "worker", "channels"},
    "PERDURE_SLACK__TOKEN": {"gateway", "worker", "channels"},
    "PERDURE_SLACK__SIGNING_SECRET": {"gateway"},
    "PERDURE_SLACK__APP_TOKEN": {"channels"},
    "PERDURE_TELEGRAM__TOKEN": {"gateway", "worker", "channels"},
    "PERDURE_TELEGRAM__WEBHOOK_SECRET": {"gateway", "channels"},
    "OPENAI_API_KEY": {"channels", "gateway", "worker"},
    "ANTHROPIC_API_KEY": {"worker"},
    "FLOWER_BASIC_AUTH": {"flower"},
}
"""Each secret, and the services of compose.yaml that need it."""


def defaults(model: type[BaseModel], prefix: str = "PERDURE_") -> Iterator[tuple[str, Any]]:
    """Each variable that sets a field of `model`, nested groups included, with the field's default."""
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from defaults(type(default), f"{prefix}{name.upper()}__")
        elif (group := NAMED.get(f"{prefix}{name.upper()}")) is not None:
            yield from defaults(group, f"{prefix}{name.upper()}__NAME__")
        else:
            yield f"{prefix}{name.upper()}", default


def secrets(model: type[BaseModel], prefix: str = "PERDURE_") -> Iterator[str]:
    """Each variable that sets a secret field of `model`."""
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from secrets(type(default), f"{prefix}{name.upper()}__")
        elif "SecretStr" in str(field.annotation):
            yield f"{prefix}{name.upper()}"


def as_written(value: Any) -> str:
    """A default as it is written in .env."""
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
SECRETS = set(secrets(Settings))
EXAMPLE = dict(re.findall(r"^# ([A-Z][A-Z0-9_]*)=(.*)$", read(".env.example"), re.MULTILINE))


def test_the_example_names_every_setting_with_its_default() -> None:
    """.env.example has every setting with its actual default."""
    assert {name: value for name, value in EXAMPLE.items() if name not in VENDOR | FLOWER} == KNOWN


def test_the_example_changes_nothing_when_it_is_copied() -> None:
    """Everything in .env.example is commented out, so that a copy changes nothing."""
    assert [line for line in read(".env.example").splitlines() if line and not line.startswith("#")] == []


def test_each_setting_of_the_example_has_its_meaning_in_the_line_above() -> None:
    """Each setting is explained in the line above it."""
    lines = read(".env.example").splitlines()
    for above, line in pairwise(lines):
        if (found := re.match(r"# (PERDURE_\w+)=", line)) is not None:
            assert re.match(r"# (?!PERDURE_\w+=)\w", above), f"{found[1]} is not explained"


NO_SECRET = KNOWN.keys() - SECRETS | {"OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"}


@pytest.mark.parametrize("service", ["gateway", "worker", "beat"])
def test_compose_passes_each_setting(service: str) -> None:
    """Each service lists its settings, because Compose passes only listed variables from the shell or `.env`.

    The operator adds the variables of `NAMED`, because they contain names of the operator's choice.
    """
    wanted = {name for name in NO_SECRET - BROKER if not name.startswith(("PERDURE_FLOWER__", *NAMED))}
    assert COMPOSE["services"][service]["environment"].keys() >= wanted


def test_compose_passes_flowers_settings_to_flower() -> None:
    """Compose passes Flower's settings to Flower. Without the host names, Flower would accept any `Host` header."""
    wanted = {name for name in NO_SECRET if name.startswith("PERDURE_FLOWER__")}
    assert wanted
    assert COMPOSE["services"]["flower"]["environment"].keys() >= wanted


def test_compose_overrides_no_setting_with_a_default_of_its_own() -> None:
    """compose.yaml sets only addresses and paths in containers. All other values come from the shell or `.env`."""
    environment = COMPOSE["services"]["worker"]["environment"]
    fixed = {name for name, value in environment.items() if value is not None and "${" + name not in value}

    assert fixed == {"PERDURE_DATABASE_URL", "PERDURE_REDIS_URL", "PERDURE_DATA_DIR", "PYTHONPATH"}


def test_compose_has_a_place_for_a_module_of_agents() -> None:
    """Every process can import a module of agents, because `PYTHONPATH` is a mounted directory of the host."""
    for name in ("gateway", "worker", "beat"):
        service = COMPOSE["services"][name]
        mounted = {volume.split(":")[1] for volume in service["volumes"] if volume.startswith("./")}
        assert service["environment"]["PYTHONPATH"] in mounted


# --- secrets ---------------------------------------------------------------------------------


def test_a_new_secret_is_given_to_services_by_name() -> None:
    """`GETS` lists each secret setting, with the services that need it."""
    of_settings = {name for name in KNOWN if name not in NO_SECRET}
    assert of_settings | {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "POSTGRES_PASSWORD", "FLOWER_BASIC_AUTH"} == {*GETS}


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_a_service_gets_the_secrets_that_it_needs_and_no_other(service: str) -> None:
    """A service gets exactly the secrets that `GETS` lists for it. Only the worker may read variables from a file."""
    given = COMPOSE["services"][service]
    environment = given.get("environment", {})
    named = {name for name in GETS if name in environment}
    within = {name for name in GETS for value in environment.values() if "${" + name in str(value)}

    assert named | within == {name for name, services in GETS.items() if service in services}
    assert service == "worker" or "env_file" not in given
    assert "secrets" not in given


def test_the_gateway_gets_a_key_only_for_a_remote_embedder() -> None:
    """If `PERDURE_EMBEDDER` is set, searches may call OpenAI. Otherwise, the gateway gets no OpenAI key."""
    environment = COMPOSE["services"]["gateway"]["environment"]
    assert environment["OPENAI_API_KEY"] == "${PERDURE_EMBEDDER:+${OPENAI_API_KEY:-}}"


def test_the_secret_of_callbacks_is_made_where_they_are_sent() -> None:
    """Only the service that signs callbacks mounts the data directory, which holds the generated secret."""
    holding = {
        name for name, each in COMPOSE["services"].items() if "perdure:/var/lib/perdure" in each.get("volumes", ())
    }
    assert holding == GETS["PERDURE_WEBHOOK_SECRET"]


def test_no_password_has_a_default() -> None:
    """compose.yaml reads each password as `${NAME:?message}`, so Compose refuses to start without it."""
    for name in ("POSTGRES_PASSWORD", "PERDURE_API_KEYS", "PERDURE_SECRET_KEY", "FLOWER_BASIC_AUTH"):
        written = re.findall(r"\$\{" + name + r"\b(.{2})", read("compose.yaml"))
        assert written
        assert set(written) == {":?"}


@pytest.mark.parametrize("file", ["compose.yaml", "Dockerfile", ".env.example", "Procfile", "Makefile"])
def test_no_file_sets_a_variable_that_is_not_a_setting(file: str) -> None:
    """Each `PERDURE_` variable in these files is a setting. Programs would ignore a misspelt variable."""
    used = set(re.findall(r"PERDURE_[A-Z][A-Z0-9_]*[A-Z0-9]", read(file)))

    assert used <= KNOWN.keys()
