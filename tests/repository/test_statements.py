"""Each statement has its own name, under which a connection prepares it once."""

from __future__ import annotations

import ast
from collections import Counter

from tests.repository.source import modules


def test_no_two_statements_have_one_name() -> None:
    """A second statement of the same name would run the first one's SQL on connections that have prepared it."""
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
