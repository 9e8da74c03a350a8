"""Packages and files stay small, and each package has a docstring."""

from __future__ import annotations

import ast
from collections import Counter

from tests.repository.source import modules, modules_of_tests

MOST_LINES = 500
MOST_MODULES = 12
LONG = {
    "perdure.database.tables": "every table, in one place",
    "perdure.settings": "every setting, in one place",
}
"""Modules that may have more than `MOST_LINES` lines, with the reason."""


def test_no_file_is_too_long_to_read() -> None:
    """A file of more than 500 lines needs a reason in `LONG`."""
    files = [*modules(), *modules_of_tests()]
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files}
    assert {name for name, count in lines.items() if count > MOST_LINES} <= set(LONG)


def test_no_package_has_too_many_modules() -> None:
    """A package has at most twelve modules, so that a reader finds a module by its name."""
    counts = Counter(name.rpartition(".")[0] for name, path in modules() if path.name != "__init__.py")
    assert {package: count for package, count in counts.items() if count > MOST_MODULES} == {}


def test_each_package_has_a_docstring() -> None:
    """Each package has a docstring, which says what the package contains."""
    packages = {name: path for name, path in modules() if path.name == "__init__.py"}
    assert [name for name, path in packages.items() if not ast.get_docstring(ast.parse(path.read_text()))] == []
    assert len(packages) > 20
