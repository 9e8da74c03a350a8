"""Each `Statement` needs a unique name, because a connection prepares only one statement per name."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.repository.source import modules


@pytest.mark.long
def test_no_two_statements_have_one_name() -> None:
    """For two statements with the same name, a connection would run the same SQL."""
    names = Counter(
        call.args[0].value
        for _, path in modules()
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "Statement"
        and isinstance(call.args[0], ast.Constant)
    )
    assert len(names) > 100, "the statements were found"
    assert [name for name, count in names.items() if count > 1] == []
