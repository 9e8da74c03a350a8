"""perdure's dependencies are explained, pinned and verified."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repository.source import read

PROJECT: dict[str, Any] = tomllib.loads(read("pyproject.toml"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
BUILD: list[str] = PROJECT["dependency-groups"]["build"]
RUN: list[str] = PROJECT["project"]["dependencies"]
DIRECT = [*BUILD, *RUN, *(line for lines in EXTRAS.values() for line in lines)]


def included(extra: str) -> set[str]:
    """`extra`, and the extras that it includes."""
    names = [name for line in EXTRAS[extra] if line.startswith("perdure[") for name in Requirement(line).extras]
    return {extra}.union(*(included(name) for name in names))


def own(extra: str) -> list[str]:
    """The requirements of `extra`, without the extras that it includes."""
    return [line for line in EXTRAS[extra] if not line.startswith("perdure[")]


def pins() -> dict[str, str]:
    """The lines of each pinned package in constraints.txt and in .ci/uv.txt, by the package's name."""
    blocks = re.split(r"\n(?=\S)", read("constraints.txt") + read(".ci/uv.txt").strip())
    return {canonicalize_name(block.partition("==")[0]): block for block in blocks if not block.startswith("#")}


@pytest.mark.parametrize("requirement", DIRECT)
def test_each_direct_dependency_says_what_it_is_for(requirement: str) -> None:
    """Each direct dependency has a comment with its purpose, so that an unused one can be found and removed."""
    lines = read("pyproject.toml").splitlines()
    at = next(number for number, line in enumerate(lines) if f'"{requirement}"' in line)

    assert "#" in lines[at].partition(f'"{requirement}"')[2] or lines[at - 1].lstrip().startswith("#")


@pytest.mark.parametrize(("name", "block"), pins().items(), ids=pins().keys())
def test_each_pin_is_one_version_with_hashes_and_nothing_else(name: str, block: str) -> None:
    """Each pin has one version and the hashes that pip requires, and no registry's address."""
    first, *hashes = (line.removesuffix("\\").strip() for line in block.splitlines())
    (version,) = Requirement(first).specifier

    assert version.operator == "=="
    assert hashes, f"{name} has no hash"
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in hashes)


def test_the_pins_satisfy_pyproject() -> None:
    """The pins, which are generated from pyproject.toml, satisfy its current requirements."""
    pinned = {name: Requirement(block.splitlines()[0].removesuffix("\\")) for name, block in pins().items()}

    for line in [*BUILD, *RUN, *(line for extra in included("bench") for line in own(extra))]:
        wanted = Requirement(line)
        (version,) = pinned[canonicalize_name(wanted.name)].specifier
        assert wanted.specifier.contains(version.version, prereleases=True), f"{line}: run .ci/pin"


def test_the_build_system_is_pinned() -> None:
    """`.ci/install` builds the source tree with the build system that pyproject.toml declares and `.ci/pin` pins."""
    assert PROJECT["build-system"]["requires"] == BUILD


def test_the_last_extra_includes_all_others_except_pytorch() -> None:
    """`.ci/pin` pins `bench`, which therefore includes all other extras; PyTorch has a build for each processor."""
    assert EXTRAS.keys() - included("bench") == {"sentence-transformers"}


def test_only_the_benchmark_installs_its_competitor() -> None:
    """Only the benchmark installs the engine that it compares perdure with."""
    installed = [*RUN, *(line for extra in included("dev") for line in own(extra))]

    assert not {"langgraph", "psycopg"} & {Requirement(line).name for line in installed}
