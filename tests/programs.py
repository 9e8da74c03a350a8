"""Programs that some tests need, and that `.ci/run` installs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from tests.repository.source import ROOT

JAVASCRIPT = ROOT / "tests" / "javascript" / "node_modules"
"""Where `npm ci --prefix tests/javascript` installs its packages."""


def program(name: str, *, path: str | None = None) -> str:
    """Where a program is installed. If it is missing, the test fails in continuous integration, else it is skipped."""
    return (
        shutil.which(name) or (shutil.which(name, path=path) if path else None) or missing(f"{name} is not installed")
    )


def package(name: str) -> Path:
    """Where a package of JavaScript is installed; see `program`."""
    if not (JAVASCRIPT / name).is_dir():
        missing(f"{name} is not installed: npm ci --prefix tests/javascript")
    return JAVASCRIPT / name


def missing(what: str) -> NoReturn:
    """Fail in continuous integration, skip elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)
