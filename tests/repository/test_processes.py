"""The processes of compose.yaml, the Procfile, the Dockerfile and systemd use commands and options that exist."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from typing import Any

import pytest
import typer
import yaml

from perdure.cli import COMMANDS, load
from perdure.settings import ShutdownSettings
from tests.repository.source import read

COMPOSE: dict[str, Any] = yaml.safe_load(read("compose.yaml"))
OURS = {name: service for name, service in COMPOSE["services"].items() if service["image"] == "perdure"}
PROCFILE = dict(line.split(": ", 1) for line in read("Procfile").splitlines())


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """The commands of `perdure` by name, as typer registers them."""
    return {name: typer.main.get_command(load(name)).commands[name] for name in COMMANDS}  # type: ignore[attr-defined]


@pytest.mark.parametrize("service", OURS)
def test_each_command_of_compose_is_understood(service: str, commands: dict[str, Any]) -> None:
    """Each service's command is a command of `perdure` with options that exist."""
    name, *options = OURS[service]["command"]

    with commands[name].make_context(name, options):
        pass  # parsing is enough: an unknown option raises


@pytest.mark.parametrize("process", PROCFILE)
def test_each_line_of_the_procfile_is_understood(process: str, commands: dict[str, Any]) -> None:
    """Each line of the Procfile is a command of `perdure` with options that exist."""
    program, name, *options = shlex.split(PROCFILE[process])

    assert program == "perdure"
    with commands[name].make_context(name, options):
        pass  # parsing is enough: an unknown option raises


def test_compose_and_the_procfile_run_the_same_processes() -> None:
    """compose.yaml and the Procfile run the same processes, except `channels`, which only compose.yaml has."""
    in_compose = {service["command"][0] for service in OURS.values()}
    in_procfile = {shlex.split(line)[1] for line in PROCFILE.values()}

    assert in_compose - {"channels"} == in_procfile == {"migrate", "gateway", "worker", "beat", "flower"}


def test_every_process_waits_for_the_migration() -> None:
    """No process starts before the migration, because errors caused by older tables would be misleading."""
    for name in OURS.keys() - {"migrate"}:
        assert OURS[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}


def test_a_container_outlives_the_hard_exit() -> None:
    """A container's stop grace period is longer than the program's own hard limit."""
    for service in OURS.values():
        assert int(service["stop_grace_period"].removesuffix("s")) > ShutdownSettings().hard_exit_s


def test_containers_have_no_more_rights_than_they_need() -> None:
    """Nobody writes outside of the volumes and /tmp, and no capability of the kernel is left."""
    for name, service in COMPOSE["services"].items():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert "no-new-privileges:true" in service["security_opt"]
        assert service["mem_limit"]
        assert name not in OURS or (service["tmpfs"] == ["/tmp"] and "cap_add" not in service)  # noqa: S108


def test_each_service_has_a_health_check() -> None:
    """But for the migration, which ends."""
    assert [name for name, service in COMPOSE["services"].items() if "healthcheck" not in service] == ["migrate"]


def test_a_probe_of_a_worker_starts_no_celery() -> None:
    """It reads the port of the worker's metrics, which the worker has in compose.yaml."""
    worker = OURS["worker"]
    assert worker["environment"]["PERDURE_METRICS__WORKER_PORT"] == "${PERDURE_METRICS__WORKER_PORT:-9200}"
    assert "celery" not in worker["healthcheck"]["test"][1]


@pytest.mark.parametrize("process", ["gateway", "worker", "beat", "channels", "flower", "migrate"])
def test_each_unit_of_systemd_is_understood(process: str, commands: dict[str, Any]) -> None:
    """A unit runs a command that exists, and outlives the hard exit."""
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    name = "perdure-migrate" if process == "migrate" else "perdure@"
    unit.read_string(read(f"deploy/systemd/{name}.service"))
    program, command, *options = unit["Service"]["ExecStart"].replace("%i", process).split()
    assert (program, command) == ("/opt/perdure/bin/perdure", process)
    with commands[command].make_context(command, options):
        pass
    if process != "migrate":
        assert int(unit["Service"]["TimeoutStopSec"]) > ShutdownSettings().hard_exit_s
    assert unit["Service"]["NoNewPrivileges"] == "yes"


def test_published_services_require_a_key() -> None:
    """Compose refuses to start without the keys of the services whose ports it publishes."""
    published = {name for name, service in COMPOSE["services"].items() if "ports" in service}

    assert published == {"gateway", "flower"}
    assert OURS["gateway"]["environment"]["PERDURE_API_KEYS"].startswith("${PERDURE_API_KEYS:?")
    assert OURS["flower"]["environment"]["FLOWER_BASIC_AUTH"].startswith("${FLOWER_BASIC_AUTH:?")
    assert all(port.startswith("127.0.0.1:") for port in OURS["flower"]["ports"])


def test_the_image_runs_the_console_script_as_an_unprivileged_user() -> None:
    """The image runs as an unprivileged user, stops with SIGTERM, and verifies every download."""
    dockerfile = read("Dockerfile")
    last_stage = dockerfile.rpartition("\nFROM ")[2]

    assert re.search(r"^USER (?!root|0$)\w+$", last_stage, re.MULTILINE)
    assert "STOPSIGNAL SIGTERM" in last_stage
    assert 'ENTRYPOINT ["perdure"]' in last_stage
    assert "perdure" in tomllib.loads(read("pyproject.toml"))["project"]["scripts"]
    for install in re.findall(r"pip install ([^\n]*)", dockerfile):
        assert "--require-hashes" in install or "--no-deps" in install


def test_the_recipe_for_more_packages_installs_into_the_images_environment() -> None:
    """The environment is made without pip, so the pip of the base image has to be given its directory."""
    dockerfile = read("Dockerfile")
    [made] = re.findall(r"VIRTUAL_ENV=(\S+)", dockerfile)
    [recipe] = re.findall(r"^#   RUN (.+)$", read("compose.yaml"), re.MULTILINE)

    assert f"COPY --from=build {made} {made}" in dockerfile
    assert '&& uv venv "$VIRTUAL_ENV"' in dockerfile
    assert recipe.startswith(f"pip --python {made} install --no-cache-dir ")


def test_images_of_others_are_pinned() -> None:
    """Each has a tag, for the reader, and a digest, and all stages of the Dockerfile begin with the same one."""
    servers = [service["image"] for name, service in COMPOSE["services"].items() if name not in OURS]
    bases = re.findall(r"^FROM (\S+)", read("Dockerfile"), re.MULTILINE)

    assert len(servers) == 2
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert all(re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image) for image in (*servers, *bases))
