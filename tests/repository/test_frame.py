"""The documented commands work, and no file names a package registry or a path of one machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.repository.source import ROOT, files, read

REGISTRIES = ("py" + "pi.org", "python" + "hosted.org", "npm" + "js.org", "deb." + "debian.org")
MACHINE = re.compile(r"(?<![\w.])/(?:home|Users|root|work|opt/wheels|opt/pypi)/")


def texts() -> list[tuple[Path, str]]:
    """The path of each text file, relative to the root, and the file's text."""
    return [
        (path.relative_to(ROOT), path.read_text(encoding="utf-8"))
        for path in files()
        if path.suffix not in {".png", ".bin"}
    ]


def test_no_file_names_a_package_registry() -> None:
    """No file names a package registry, because each machine configures its own."""
    assert [path for path, text in texts() if any(host in text for host in REGISTRIES)] == []


@pytest.mark.long
def test_no_file_contains_a_path_of_one_machine() -> None:
    """No file contains a path of one machine, such as a home directory."""
    assert [path for path, text in texts() if MACHINE.search(text)] == []


@pytest.mark.parametrize("command", ["make up", "make test"])
def test_the_readme_names_the_two_commands(command: str) -> None:
    """The README names the two commands that a fresh machine needs."""
    assert command in read("README.md")


@pytest.mark.parametrize("target", ["up", "test", "check", "exhaustive", "coverage", "bench", "chaos", "clean", "help"])
def test_make_has_the_documented_targets(target: str) -> None:
    """The documented make targets exist, each with a one-line help text."""
    assert re.search(rf"^{target}:.*## \w", read("Makefile"), re.MULTILINE)


def test_continuous_integration_runs_make_check() -> None:
    """CI runs `make check`, because a second list of checks would drift from it."""
    run = read(".ci/run")

    assert run.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in run
    assert re.search(r'^exec make "\$\{1:-check\}" ', run, re.MULTILINE)


def test_the_workflow_runs_the_same_script() -> None:
    """The GitHub workflow runs `.ci/run`, the same script as a local check."""
    workflow = yaml.safe_load(read(".github/workflows/check.yml"))

    assert "bash .ci/run" in [step.get("run") for step in workflow["jobs"]["check"]["steps"]]


def test_every_test_runs_each_night() -> None:
    """`make check` leaves out most variants of the longest tests."""
    workflow = yaml.safe_load(read(".github/workflows/exhaustive.yml"))

    assert "schedule" in workflow[True]  # YAML 1.1 reads the key `on` as a truth value
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert {"bash .ci/run exhaustive", "make coverage"} <= {*steps}
    assert any(step.startswith("make chaos ") for step in steps)


def test_the_workflow_lints_before_its_long_jobs() -> None:
    """A style fault is reported after minutes, not after the tests; the lint job runs what `make check` runs first."""
    jobs = yaml.safe_load(read(".github/workflows/check.yml"))["jobs"]
    (checks,) = re.findall(r"^check: \S+ (.+?) ##", read("Makefile"), re.MULTILINE)

    assert f"make {checks}" in [step.get("run") for step in jobs["lint"]["steps"]]
    assert {job.get("needs") for name, job in jobs.items() if name != "lint"} == {"lint"}


def test_the_commit_hooks_run_the_pinned_programs() -> None:
    """The hooks of pre-commit and `make lint` must not disagree, so they run the same programs of `.venv`."""
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]

    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["entry"].startswith((".venv/bin/ruff ", "make ")), hook["id"]


def test_contributing_names_targets_that_exist() -> None:
    """The make targets named in CONTRIBUTING.md exist."""
    named = set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", read("CONTRIBUTING.md"), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))

    assert named
    assert {first or second for first, second in named} <= targets


@pytest.mark.parametrize("script", ["run", "install", "pin", "first-minute"])
def test_the_scripts_can_be_run(script: str) -> None:
    """The scripts of `.ci` are executable."""
    assert (ROOT / ".ci" / script).stat().st_mode & 0o111


@pytest.mark.long
def test_the_migrations_do_not_hide_the_library_of_their_name() -> None:
    """In the repository's root, `import alembic` finds the library, because the directory `alembic` is no package."""
    found = subprocess.run(
        [sys.executable, "-c", "import alembic.command; print(alembic.__file__)"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert not (ROOT / "alembic" / "__init__.py").exists()
    assert (ROOT / "alembic" / "env.py").exists()
    assert Path(found.strip()).parent != ROOT / "alembic"


def test_the_licence_is_apache_2_in_full() -> None:
    """The licence file has the full text of Apache 2.0."""
    licence = read("LICENSE")

    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_the_changelog_begins_with_the_next_or_the_present_version() -> None:
    """The newest entry of the changelog has the unreleased changes, or is that of the version in `pyproject.toml`."""
    headings = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.MULTILINE)
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]

    assert headings[0] in ("Unreleased", version)
