"""The Helm chart renders to objects that Kubernetes accepts, and runs the processes as compose.yaml does.

`.ci/helm` installs Helm and the JSON schemas of Kubernetes' objects. KEDA's objects have no schema there.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it carries no types
import pytest
import typer
import yaml
from referencing import Registry, Resource

from perdure.cli import COMMANDS, load
from perdure.database.engine import Database
from perdure.network.queues import QUEUES
from perdure.settings import ShutdownSettings
from tests.programs import missing
from tests.repository.source import ROOT
from tests.repository.test_settings_are_documented import GETS
from tests.turns.conftest import harness
from tests.turns.harness import Harness

__all__ = ["harness"]

CHART = ROOT / "deploy" / "helm" / "perdure"
INSTALLED = ROOT / ".venv" / "helm"
SCHEMAS = INSTALLED / "kubernetes_validate" / "kubernetes-json-schema"
ALL = (
    "existingSecret=secrets", "channels.enabled=true", "workers.turns.keda.enabled=true",
    "settings.PERDURE_EMBEDDER=openai:small", "image.digest=sha256:" + "0" * 64,
)  # fmt: skip

pytestmark = pytest.mark.long


def _helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    if not (INSTALLED / "installed").exists():
        missing("Helm is not installed: .ci/helm")
    return subprocess.run(
        [str(INSTALLED / "helm"), *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def _render(*values: str) -> list[dict[str, Any]]:
    ran = _helm("template", "demo", str(CHART), *[f"--set={value}" for value in values])
    assert ran.returncode == 0, ran.stderr
    return [each for each in yaml.safe_load_all(ran.stdout) if each]


def _pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The specs of pods, by component."""
    found = [each for each in objects if each["kind"] in {"Deployment", "Job"}]
    return {each["metadata"]["name"].removeprefix("demo-"): each["spec"]["template"]["spec"] for each in found}


@pytest.mark.parametrize("release", ["v1.27.0", "v1.37.0"])
@pytest.mark.parametrize("values", [("existingSecret=secrets",), ALL], ids=["defaults", "all"])
def test_the_objects_are_valid(release: str, values: tuple[str, ...]) -> None:
    """By default and with everything enabled, for the oldest and the newest Kubernetes, without an unknown key."""
    objects = _render(*values)
    directory = SCHEMAS / f"{release}-local-strict"
    registry = Resource.from_contents(json.loads((directory / "_definitions.json").read_text())) @ Registry()
    for each in objects:
        group, _, version = each["apiVersion"].rpartition("/")
        if group == "keda.sh":
            continue
        name = "-".join(filter(None, (each["kind"].lower(), group.partition(".")[0], version)))
        schema = json.loads((directory / f"{name}.json").read_text())
        jsonschema.Draft202012Validator(schema, registry=registry).validate(each)

    kinds = [each["kind"] for each in objects]
    assert (kinds.count("Deployment"), kinds.count("PodDisruptionBudget")) == (5 if values == ALL else 4, 3)
    assert len({(each["kind"], each["metadata"]["name"]) for each in objects}) == len(objects)


def test_the_chart_is_accepted_by_its_linter_and_needs_a_secret() -> None:
    """Without the name of a Secret, nothing is rendered, and the message says what is missing."""
    assert _helm("lint", "--strict", str(CHART), "--set=existingSecret=secrets").returncode == 0
    refused = _helm("template", "demo", str(CHART))
    assert refused.returncode == 1
    assert "existingSecret: the name of a Secret" in refused.stderr


def test_each_pod_is_as_the_processes_need_it() -> None:
    """A command that exists, no rights, a grace period above the hard exit, limits, and a probe without Celery."""
    pods = _pods(_render(*ALL))
    commands = {name: typer.main.get_command(load(name)).commands[name] for name in COMMANDS}  # type: ignore[attr-defined]

    assert set(pods) == {"migrate", "gateway", "worker-turns", "worker-background", "beat", "channels"}
    for name, pod in pods.items():
        (container,) = pod["containers"]
        command, *options = container["args"]
        with commands[command].make_context(command, options):
            pass  # parsing is enough: an unknown option raises
        assert pod["terminationGracePeriodSeconds"] > ShutdownSettings().hard_exit_s
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        assert container["image"] == "perdure@sha256:" + "0" * 64
        given = container["securityContext"]
        assert (given["readOnlyRootFilesystem"], given["allowPrivilegeEscalation"]) == (True, False)
        assert given["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert "celery" not in json.dumps(container.get("livenessProbe", {}))
        assert ("livenessProbe" in container) == (name != "migrate")


def test_settings_of_a_file_are_as_perdure_reads_them(tmp_path: Path) -> None:
    """Large numbers, lists and maps of a file have the form that perdure reads; a pod's own annotations come first."""
    values = tmp_path / "values.yaml"
    values.write_text(
        """
        existingSecret: secrets
        podAnnotations: {prometheus.io/scrape: "false"}
        settings:
          PERDURE_FILES__MAX_BYTES: 20000000
          PERDURE_RETRY__JITTER: 0.5
          PERDURE_TURN__PIN_AGENTS: true
          PERDURE_FALLBACK_MODELS: ["openai:a", "openai:b"]
          PERDURE_MODEL_SETTINGS: {max_tokens: 1000000}
          PERDURE_MODEL: "offline"
          PERDURE_EMBEDDER:
        """
    )
    ran = _helm("template", "demo", str(CHART), f"--values={values}")
    assert ran.returncode == 0, ran.stderr
    objects = list(yaml.safe_load_all(ran.stdout))
    (pod,) = [
        each["spec"]["template"]
        for each in objects
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "demo-worker-turns"
    ]
    given = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    names = yaml.safe_load(values.read_text())["settings"]

    assert {name: given[name] for name in names} == {
        "PERDURE_FILES__MAX_BYTES": "20000000",
        "PERDURE_RETRY__JITTER": "0.5",
        "PERDURE_TURN__PIN_AGENTS": "true",
        "PERDURE_FALLBACK_MODELS": "openai:a,openai:b",
        "PERDURE_MODEL_SETTINGS": '{"max_tokens":1000000}',
        "PERDURE_MODEL": "offline",
        "PERDURE_EMBEDDER": "",
    }
    assert pod["metadata"]["annotations"] == {
        "prometheus.io/scrape": "false", "prometheus.io/port": "9200",
    }  # fmt: skip


def test_the_workers_consume_all_queues() -> None:
    """A queue without a consumer would be a backlog for ever."""
    pods = _pods(_render(*ALL))
    consumed = [
        args[args.index("--queues") + 1]
        for pod in pods.values()
        if "--queues" in (args := pod["containers"][0]["args"])
    ]

    assert sorted(",".join(consumed).split(",")) == sorted(QUEUES)


def test_each_process_gets_the_secrets_that_it_needs() -> None:
    """The same as in compose.yaml. No secret is a value of the chart."""
    pods = _pods(_render(*ALL))
    by_process = {name: pod["containers"][0]["env"] for name, pod in pods.items()}
    given: dict[str, set[str]] = {}
    for name, variables in by_process.items():
        for each in variables:
            if each.get("valueFrom"):
                given.setdefault(each["name"], set()).add(name.partition("-")[0])
    wanted = {secret: services - {"postgres", "flower"} for secret, services in GETS.items()}
    del wanted["POSTGRES_PASSWORD"]  # it is in the database's URL

    assert given == {secret: services for secret, services in wanted.items() if services}


def test_keda_reads_the_view(harness: Harness) -> None:
    """The query of the ScaledObject runs, and counts turns that may run and that run, but none that waits."""
    (scaled,) = [each for each in _render(*ALL) if each["kind"] == "ScaledObject"]
    (trigger,) = scaled["spec"]["triggers"]
    deployments = [each["metadata"]["name"] for each in _render(*ALL) if each["kind"] == "Deployment"]
    for user in ("ana", "bob", "cleo"):
        harness.send(user_id=user)
    harness.sql(
        "UPDATE sessions SET lease_until = perdure_now() + interval '1 minute' WHERE user_id = 'ana' RETURNING 1"
    )
    harness.sql("UPDATE sessions SET not_before = perdure_now() + interval '1 hour' WHERE user_id = 'bob' RETURNING 1")

    assert scaled["spec"]["scaleTargetRef"]["name"] in deployments
    assert scaled["spec"]["minReplicaCount"] > 0
    assert _value(harness.database, trigger["metadata"]["query"]) == 2
    assert [(row.queue, row.due, row.running) for row in harness.sql("SELECT * FROM due_work ORDER BY queue")] == [
        ("deliveries", 0, 0), ("sessions", 0, 0), ("turns", 1, 1),
    ]  # fmt: skip


def _value(database: Database, query: str) -> float:
    with database.engine.connect() as connection:
        return float(connection.exec_driver_sql(query).scalar_one())


def test_the_chart_is_complete() -> None:
    """The templates use each top-level value, and the files are those that Helm reads."""
    templates = "".join(path.read_text() for path in sorted(Path(CHART, "templates").iterdir()))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    unused = [name for name in values if f".Values.{name}" not in templates and name not in {"beat", "channels"}]
    assert unused == []
