"""Each package says what it contains."""

from __future__ import annotations

import ast

from tests.repository.source import modules


def test_each_package_has_a_docstring() -> None:
    """Each package has a docstring, which says what the package contains."""
    packages = {name: path for name, path in modules() if path.name == "__init__.py"}
    assert [name for name, path in packages.items() if not ast.get_docstring(ast.parse(path.read_text()))] == []
    assert len(packages) > 20
