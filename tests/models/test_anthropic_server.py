"""The Anthropic test server refuses the same invalid requests as the provider."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.anthropic_server import validate_body

TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def asking(*ids: str, **changes: Any) -> dict[str, Any]:
    """An assistant's message with one call for each of `ids`."""
    calls = [{"type": "tool_use", "id": each, "name": "f", "input": {}, **changes} for each in ids]
    return {"role": "assistant", "content": calls}


def results(*ids: str, content: str = "1") -> dict[str, Any]:
    """A user's message with one result for each of `ids`."""
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": each, "content": content} for each in ids],
    }


def text(words: str) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": words}


def body(*messages: Any, **changes: Any) -> dict[str, Any]:
    """A request body with these messages."""
    return {"model": "m", "max_tokens": 9, "tools": TOOLS, "messages": list(messages), **changes}


@pytest.mark.parametrize(
    "request_body",
    [
        body(USER),
        body(USER, system="Be brief.", tools=[]),
        body(USER, USER, {"role": "assistant", "content": "yes"}, USER),
        body(USER, asking("a"), results("a")),
        body(USER, asking("a", "b"), results("b"), results("a"), USER),
        body(USER, asking("a"), {"role": "user", "content": [*results("a")["content"], text("and?")]}),
    ],
)
def test_accepts(request_body: dict[str, Any]) -> None:
    """Valid requests are accepted."""
    assert validate_body(request_body) == []


@pytest.mark.parametrize(
    ("request_body", "problem"),
    [
        (body(), "at least one message"),
        (body(USER, max_tokens=None), "max_tokens"),
        (body(USER, system=" "), "system"),
        (body({"role": "assistant", "content": "x"}, USER), "first message must use the user role"),
        (body(USER, {"role": "assistant", "content": "x"}), "prefill"),
        (body(USER, {"role": "system", "content": "x"}, USER), "is not a role"),
        (body({"role": "user", "content": " "}), "non-whitespace"),
        (body({"role": "user", "content": []}), "does not belong"),
        (body({"role": "user", "content": asking("a")["content"]}), "does not belong"),
        (body(USER, asking("a")), "at the end"),
        (body(USER, asking("a"), USER), "were found"),
        (body(USER, asking("a", "b"), results("a"), USER), "were found"),
        (body(USER, asking("a"), results("a", "a")), "were found"),
        (body(USER, results("a")), "were found"),
        (body(USER, asking("a"), {"role": "user", "content": [text("x"), *results("a")["content"]]}), "before any"),
        (body(USER, asking("a"), results("a", content=" ")), "must not be blank"),
        (body(USER, asking("a"), results("a"), asking("a"), results("a")), "must be unique"),
        (body(USER, asking("a b"), results("a b")), "does not match"),
        (body(USER, asking("a", name="no such tool!"), results("a")), "does not match"),
        (body(USER, asking("a", input="{}"), results("a")), "expected an object"),
        (body(USER, asking("a"), results("a"), tools=[]), "must define tools"),
        (body(USER, tools=[*TOOLS, *TOOLS]), "unique"),
        (body(USER, tools=[{"name": "a:b", "input_schema": {"type": "object"}}]), "does not match"),
        (body(USER, tools=[{"name": "f", "input_schema": {}}]), "input_schema"),
    ],
)
def test_refuses(request_body: dict[str, Any], problem: str) -> None:
    """The test server refuses requests that the real provider refuses."""
    assert problem in "; ".join(validate_body(request_body))
