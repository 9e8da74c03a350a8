"""Log calls show a caught error only through `loggable` or an attribute such as `error.message`.

The text of another library's error may quote a user. The user's erasure does not change the logs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.repository.source import modules

OWN_TEXTS = {"NotifyFailed": "its text is the status or the reason of a notice to an operator's URL"}
"""Errors that log calls may show although `perdure.errors` does not define them, with the reason."""


@pytest.mark.long
def test_a_log_call_shows_a_caught_error_through_loggable() -> None:
    """A log call shows a caught error neither directly nor by `str`, `repr` or an f-string."""
    found = [
        f"{name}:{call.lineno}"
        for name, path in modules()
        for handler in _handlers(path.read_text(encoding="utf-8"))
        for call in _log_calls(handler)
        if any(_is_shown(argument, str(handler.name)) for argument in call.args)
    ]
    assert found == []


def test_the_rule_finds_each_form() -> None:
    """The rule rejects each unsafe way to show an error, and accepts the safe ways."""
    forms = ["error", "str(error)", "repr(error)", 'f"{error}"']
    fine = ["loggable(error)", "error.message", "type(error).__name__"]
    assert [_is_shown(ast.parse(form, mode="eval").body, "error") for form in forms] == [True] * 4
    assert [_is_shown(ast.parse(form, mode="eval").body, "error") for form in fine] == [False] * 3


def _handlers(source: str) -> Iterator[ast.ExceptHandler]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and node.name and ast.unparse(node.type or node) not in OWN_TEXTS:
            yield node


def _log_calls(handler: ast.ExceptHandler) -> Iterator[ast.Call]:
    for node in ast.walk(handler):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_log(node.func.value):
            yield node


def _is_log(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id.strip("_") == "log"


def _is_shown(argument: ast.expr, name: str) -> bool:
    match argument:
        case ast.Name(id=shown):
            return shown == name
        case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=shown)]):
            return shown == name
        case ast.JoinedStr(values=values):
            return any(isinstance(each, ast.FormattedValue) and _is_shown(each.value, name) for each in values)
        case _:
            return False
