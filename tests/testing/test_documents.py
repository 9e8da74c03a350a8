"""The Python code in the documentation runs as printed, and links to files of the repository resolve."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from shutil import copy
from typing import Any
from unittest.mock import MagicMock

import pytest

import perdure.testing
from perdure import Agent, ToolContext, tool
from perdure.turns.inbox.incoming import MessageFields
from tests.repository.source import ROOT, files, read

_CODE = re.compile(r"`([^`]+)`")
_BEGINNING = re.compile(r"@?([\w.]+)(=)?")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def blocks(name: str) -> list[str]:
    """The blocks of Python code in a document."""
    return _BLOCK.findall(read(name))


def stand_ins() -> dict[str, Any]:
    """Values for the names that the documents' code uses but does not define."""
    names = ("bank", "cache", "read", "was_paid", "count")
    return {"__name__": "document", "LIMIT": 100, **{name: MagicMock() for name in names}}


def run_pytest(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder as their author would."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "."]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)


@pytest.mark.long
def test_the_readmes_test_passes_for_the_readmes_agent(tmp_path: Path) -> None:
    """The README's test passes with the README's agent."""
    for block in blocks("README.md"):
        name = re.match(r"# (\w+\.py)\n", block)
        if name:
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    assert {each.name for each in tmp_path.iterdir()} == {"shop.py", "test_shop.py", "service.py"}
    ran = run_pytest(tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert "1 passed" in ran.stdout


@pytest.mark.exhaustive
def test_the_tests_in_the_document_on_testing_pass(tmp_path: Path) -> None:
    """The tests in docs/testing.md pass together, in one file."""
    (tmp_path / "test_document.py").write_text("\n".join(blocks("docs/testing.md")), encoding="utf-8")
    (tmp_path / "recordings").mkdir()
    copy(Path(__file__).parent / "recorded_turn.json", tmp_path / "recordings" / "pencil.json")
    turn = json.loads((tmp_path / "recordings" / "pencil.json").read_bytes())
    conversation = {"format": "perdure.conversation", "version": 1, "turns": [turn]}
    (tmp_path / "conversation.json").write_text(json.dumps(conversation), encoding="utf-8")
    ran = run_pytest(tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"^[5-9] passed|^\d\d passed", ran.stdout, re.MULTILINE), ran.stdout


@pytest.mark.parametrize("name", ["agents-and-tools", "mcp", "models", "models-and-embedders", "pydantic-ai"])
def test_the_code_in_the_documents_for_authors_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code in the documents for authors of agents runs without an error."""
    monkeypatch.setenv("SHOP_TOKEN", "of the test")
    namespace = stand_ins()
    found = blocks(f"docs/{name}.md")
    assert found
    for block in found:
        exec(compile(block, f"{name}.md", "exec", dont_inherit=True), namespace)  # noqa: S102 (the repository's own documents)


@pytest.mark.parametrize(
    "path", [each for each in files() if each.suffix == ".md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_each_link_to_a_file_of_the_repository_resolves(path: Path) -> None:
    """Links to files and headings in the repository resolve."""
    for link in _LINK.findall(_FENCED.sub("", path.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        if ":" in target:
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        assert file.is_relative_to(ROOT), link
        if anchor and file.suffix == ".md":
            headings = _HEADING.findall(_FENCED.sub("", file.read_text(encoding="utf-8")))
            assert anchor in {_anchor(each) for each in headings}, link


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_comparison_in_the_document_for_authors_names_what_exists() -> None:
    """Each code in the first column begins with a name of the package, of a context, of a test's or of an argument."""
    table = read("docs/agents-and-tools.md").partition("## What you know from elsewhere")[2].split("\n## ")[0]
    codes = [
        code for line in table.splitlines() if line.startswith("| `") for code in _CODE.findall(line.split(" | ")[0])
    ]
    arguments = {*signature(Agent).parameters, *signature(tool).parameters, *MessageFields.model_fields}
    names = {
        *perdure.__all__,
        *perdure.testing.__all__,
        *(f"context.{each}" for each in ToolContext.__dataclass_fields__),
    }
    names |= {f"perdure.{each}" for each in perdure.__all__} | {
        f"perdure.testing.{each}" for each in perdure.testing.__all__
    }
    names |= {"context.progress", "POST"}
    assert len(codes) > 20
    for code in codes:
        name, is_argument = _BEGINNING.match(code).groups()  # type: ignore[union-attr]
        assert name in (arguments if is_argument else names), code
