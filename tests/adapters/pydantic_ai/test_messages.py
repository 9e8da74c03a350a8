"""Stored messages are compatibility data: what an earlier release wrote is read, and no name in it changes."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

import pytest
from pydantic_ai.messages import (
    BinaryContent,
    ModelRequest,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.usage import RunUsage

from perdure.adapters.pydantic_ai import messages
from perdure.models.protocol import Opaque, Role, ToolCall
from perdure.turns.transcript import Entry
from tests.adapters.pydantic_ai.conftest import Bench, Tool
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

TURN = UUID(int=1)

STORED_REPLY: dict[str, Any] = {
    "response": {
        "kind": "response",
        "parts": [
            {"part_kind": "thinking", "content": "hm", "signature": "s1", "provider_name": "p"},
            {"part_kind": "tool-call", "tool_name": "look", "args": {"at": 1}, "tool_call_id": "c"},
        ],
        "model_name": "m",
        "timestamp": "2026-11-26T12:00:00Z",
        "a_member_of_a_newer_version": 1,
    }
}
STORED_ROUND: dict[str, Any] = {
    "requests": [
        {
            "kind": "request",
            "parts": [
                {
                    "part_kind": "tool-return",
                    "tool_name": "look",
                    "content": {"seen": [1]},
                    "tool_call_id": "c",
                    "timestamp": "2026-11-26T12:00:01Z",
                }
            ],
        }
    ]
}
ROWS = [
    Entry(TURN, Role.USER, "hello"),
    Entry(
        TURN, Role.ASSISTANT, "", (ToolCall("c_2", "look", '{"at":1}'),),
        opaque=Opaque("pydantic-ai", "2.64.0", STORED_REPLY),
    ),
    Entry(TURN, Role.TOOL, '{"seen":[1]}', tool_call_id="c_2", opaque=Opaque("pydantic-ai", "2.64.0", STORED_ROUND)),
    Entry(TURN, Role.ASSISTANT, '{"w":1}', opaque=Opaque("pydantic-ai", "2.64.0", {"output": True})),
]  # fmt: skip


def test_rows_of_an_earlier_release() -> None:
    """The parts come back as they were, and a rendered output is no message of the model."""
    prompt, reply, results = messages.history([ROWS], strictly=TURN)
    assert isinstance(prompt, ModelRequest)
    assert isinstance(prompt.parts[0], UserPromptPart)
    assert isinstance(reply, ModelResponse)
    thought, call = reply.parts
    assert isinstance(thought, ThinkingPart)
    assert (thought.signature, reply.model_name) == ("s1", "m")
    assert isinstance(call, ToolCallPart)
    assert (call.tool_call_id, call.args) == ("c", {"at": 1})
    assert isinstance(results, ModelRequest)
    assert isinstance(results.parts[0], ToolReturnPart)
    assert results.parts[0].content == {"seen": [1]}


def test_a_file_of_a_tool() -> None:
    """The reference to a file becomes its bytes, or its description."""
    file = {"kind": "perdure-file", "file_id": "f", "description": "[image: …]", "media_type": "image/png"}
    part = {"part_kind": "tool-return", "tool_name": "look", "content": ["seen", file], "tool_call_id": "c"}
    stored = Opaque("pydantic-ai", "2.68.0", {"requests": [{"kind": "request", "parts": [part]}]})
    rows = [*ROWS[:2], Entry(TURN, Role.TOOL, "seen", tool_call_id="c_2", opaque=stored)]
    for data in (b"\xff\xfe", None):
        *_, results = messages.history([rows], strictly=TURN, data=lambda _, found=data: found)  # type: ignore[misc]
        assert isinstance(results.parts[0], ToolReturnPart)
        text, found = cast("list[object]", results.parts[0].content)
        assert (text, found.data if isinstance(found, BinaryContent) else found) == ("seen", data or "[image: …]")


def test_rows_without_pydantic_ais_parts() -> None:
    """Rows of perdure's own agents are rebuilt from their text and calls; results keep the ids of their calls."""
    bare = [Entry(row.turn_id, row.role, row.content, row.tool_calls, row.tool_call_id) for row in ROWS]
    prompt, reply, results, last = messages.history([bare], strictly=TURN)
    assert [type(part) for part in (*prompt.parts, *reply.parts, *results.parts, *last.parts)] == [
        UserPromptPart, ToolCallPart, ToolReturnPart, TextPart,
    ]  # fmt: skip
    assert isinstance(results.parts[0], ToolReturnPart)
    assert results.parts[0].tool_call_id == "c_2"


def test_an_unknown_kind_of_part() -> None:
    """It stops the turn that has it. Of an earlier turn, the text remains."""
    odd = {"response": {"kind": "response", "parts": [{"part_kind": "hologram"}]}}
    rows = [Entry(TURN, Role.ASSISTANT, "said", opaque=Opaque("pydantic-ai", "3.0.0", odd))]
    with pytest.raises(messages.Unreadable):
        messages.history([rows], strictly=TURN)
    [found] = messages.history([rows], strictly=None)
    assert isinstance(found.parts[0], TextPart)
    assert found.parts[0].content == "said"


@pytest.mark.parametrize("kind", ["adapted"], indirect=True)
def test_the_names_of_stored_members(harness: Harness, bench: Bench) -> None:
    """These names are in the database of each installation."""
    bench.equip(Tool("look", "pure"))
    harness.script(calls(("look", {"amount": 1})), says("done"))
    harness.ask()
    rows = harness.sql("SELECT role, opaque FROM messages ORDER BY seq")
    stored = [(row.role, row.opaque and (row.opaque["endpoint"], sorted(row.opaque["parts"]))) for row in rows]
    assert stored == [
        ("user", None),
        ("assistant", ("pydantic-ai", ["response"])),
        ("tool", ("pydantic-ai", ["requests", "usage"])),
        ("assistant", ("pydantic-ai", ["response"])),
    ]


def test_text_that_postgresql_refuses() -> None:
    """NUL and lone surrogates are replaced in the stored JSON."""
    row = messages.with_requests(
        Entry(TURN, Role.TOOL, "x"),
        [ModelRequest(parts=[UserPromptPart("a\x00b")], instructions="secret")],
        RunUsage(requests=1),
        lambda records: records,
    )
    assert row.opaque is not None
    [stored] = row.opaque.parts["requests"]
    assert (stored["parts"][0]["content"], stored["instructions"]) == ("a\ufffdb", None)
