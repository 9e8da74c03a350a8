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
UNPINNED: list[str] = PROJECT["tool"]["perdure"]["unpinned"]
PARTS: dict[str, list[str]] = {
    "run": [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]],
    **{name: lines for name, lines in EXTRAS.items() if name not in UNPINNED},
}
PINNED = [line for lines in PARTS.values() for line in lines]
DIRECT = [*PINNED, *(line for name in UNPINNED for line in EXTRAS[name])]


def pins() -> dict[str, str]:
    """The lines of each pinned package in constraints.txt, by the package's name."""
    blocks = re.split(r"\n(?=\S)", read("constraints.txt").strip())
    return {canonicalize_name(block.partition("==")[0]): block for block in blocks if not block.startswith("#")}


@pytest.mark.parametrize("requirement", [line for line in DIRECT if line not in PARTS["run"][:1]])
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

    for line in PINNED:
        wanted = Requirement(line)
        (version,) = pinned[canonicalize_name(wanted.name)].specifier
        assert wanted.specifier.contains(version.version, prereleases=True), f"{line}: run .ci/pin"


def test_each_dependency_is_pinned_in_its_own_part_or_an_earlier_one() -> None:
    """constraints.txt pins each dependency in the part to which it belongs, or in an earlier part.

    `.ci/install PART` omits the parts after `PART`.
    """
    text = read("constraints.txt")

    assert re.findall(r"^# end of (.+)$", text, re.MULTILINE) == list(PARTS)
    for part, lines in PARTS.items():
        upto = text.partition(f"# end of {part}\n")[0]
        for line in lines:
            name = canonicalize_name(Requirement(line).name)
            assert re.search(rf"^{re.escape(name)}==", upto, re.MULTILINE), f"{name} is not in part {part}"


def test_only_the_benchmark_installs_its_competitor() -> None:
    """Only the benchmark installs the engine that it compares perdure with."""
    before = read("constraints.txt").partition("# end of dev\n")[0]

    assert "langgraph==" not in before
    assert "psycopg==" not in before
