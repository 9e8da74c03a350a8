"""The OpenAI test server refuses the same invalid transcripts as the provider."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.openai_server import validate_transcript

USER: dict[str, Any] = {"role": "user", "content": "hi"}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "a", "content": "1"}


def asking(*ids: str, name: str = "f", arguments: Any = "{}") -> dict[str, Any]:
    """An assistant's message with one call for each of `ids`."""
    calls = [{"id": each, "type": "function", "function": {"name": name, "arguments": arguments}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": ""}, USER, {"role": "assistant", "content": "yes"}],
        [USER, asking("a"), RESULT],
        [USER, asking("a", "b"), {**RESULT, "tool_call_id": "b"}, RESULT, USER],
    ],
)
def test_accepts(messages: list[Any]) -> None:
    """Valid transcripts are accepted."""
    assert validate_transcript(messages) == []


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "not empty"),
        (None, "not empty"),
        (["hi"], "expected an object"),
        ([{"role": "robot", "content": "x"}], "is not a role"),
        ([{"role": "user", "content": None}], "expected a string"),
        ([{"role": "assistant", "content": None}], "expected a string"),
        ([{"role": "assistant", "content": "x", "tool_calls": []}], "not empty"),
        ([USER, RESULT], "answers no call"),
        ([USER, asking("a"), RESULT, RESULT], "answers it twice"),
        ([USER, asking("a")], "without a result at the end"),
        ([USER, asking("a"), USER], "without a result before it"),
        ([USER, asking("a", "b"), RESULT, USER], "without a result before it: b"),
        ([USER, asking("a"), {**RESULT, "content": None}], "expected a string"),
        ([USER, asking("a", "a"), RESULT], "occurs twice"),
        ([USER, asking("a"), RESULT, USER, asking("a"), RESULT], "occurs twice"),
        ([USER, asking("x" * 41), {**RESULT, "tool_call_id": "x" * 41}], "1 to 40 characters"),
        ([USER, asking("a", name="no such tool!"), RESULT], "does not match"),
        ([USER, asking("a", arguments="{"), RESULT], "JSON object"),
        ([USER, asking("a", arguments="[]"), RESULT], "JSON object"),
        ([USER, asking("a", arguments='{"x": NaN}'), RESULT], "JSON object"),
        ([USER, asking("a", arguments={}), RESULT], "JSON object"),
        ([USER, {**asking("a"), "content": 7}, RESULT], "string or null"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": ["a"]}], "of type function"),
    ],
)
def test_refuses(messages: Any, problem: str) -> None:
    """The test server refuses transcripts that the real provider refuses."""
    assert problem in "; ".join(validate_transcript(messages))
