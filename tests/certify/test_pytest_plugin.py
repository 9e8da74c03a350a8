"""The pytest plugin adds a test for each tool of a module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.source import ROOT

MODULE = """
from perdure import Agent, celery_tool, tool
from perdure.certify import run

@tool(effect="pure")
def price(article: str) -> str:
    '''Look up a price.'''
    return "3 euros"

@tool(effect="pure")
def count(article: str) -> str:
    '''Count an article: it writes.'''
    open("counted", "a").write(article)
    return "9"

shop = Agent("shop", "You sell.", [price, count, celery_tool("shop.order", effect="idempotent", timeout_s=9)])
"""

WITHOUT_KILLS = """
import functools
from perdure.certify import run

run.certify = functools.partial(run.certify, choose=lambda _: False)
"""
"""A conftest that leaves out the disturbed schedules, which take minutes."""


def _pytest(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "perdure.certify.pytest_plugin"]
    command += ["-p", "no:cacheprovider", "-p", "no:schemathesis", "."]
    environment = {**os.environ, "PYTHONPATH": f"{directory}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *options], cwd=directory, env=environment, check=False, capture_output=True, text=True
    )


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A directory with the module `shop`."""
    (tmp_path / "shop.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(WITHOUT_KILLS, encoding="utf-8")
    return tmp_path


@pytest.mark.exhaustive
def test_each_tool_has_a_test(shop: Path) -> None:
    """The honest tool passes, the lying one fails with what it did, and the Celery tool is skipped with the reason."""
    done = _pytest(shop, "--perdure-certify", "shop")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, 1 skipped" in done.stdout
    assert "count of shop: it is declared pure, but it changes something." in done.stdout
    assert "waits for a Celery task" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.exhaustive
def test_nothing_is_added_without_the_option(shop: Path) -> None:
    """Another project's tests run as without perdure; a wrong module is a wrong use of pytest."""
    (shop / "test_own.py").write_text("def test_own():\n    pass\n", encoding="utf-8")
    assert "1 passed" in _pytest(shop).stdout
    wrong = _pytest(shop, "--perdure-certify", "no_such_module")
    assert (wrong.returncode, "--perdure-certify: the module is 'no_such_module'" in wrong.stderr) == (4, True)
