"""Hypothesis strategies for transcripts and streams, for tests of the wire formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from perdure.models.protocol import Message, Role, ToolCall

NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=40)
IDS = st.sampled_from(["call_1", "call_2", "call_1_2", "", "x" * 60])


@st.composite
def calls(draw: st.DrawFn, arguments: st.SearchStrategy[str]) -> tuple[ToolCall, ...]:
    """The calls of one reply, with ids that are unique within the reply only."""
    made = draw(st.lists(st.builds(ToolCall, IDS, st.one_of(NAMES, TEXT), arguments), max_size=3, unique_by=id_of))
    return tuple(made)


def id_of(call: ToolCall) -> str:
    """The id of `call`, as a function for `unique_by` and `sorted`."""
    return call.id


@st.composite
def transcripts(draw: st.DrawFn) -> tuple[Message, ...]:
    """A transcript as the engine commits it. The results of tool calls follow the message with the calls."""
    messages = [Message(Role.SYSTEM, "You help.")]
    for _ in range(draw(st.integers(1, 4))):
        messages.append(Message(Role.USER, draw(TEXT)))
        requested = draw(calls(st.one_of(TEXT, st.just('{"a": 1}'), st.just("[1]"), st.just('{"a": NaN}'))))
        messages.append(Message(Role.ASSISTANT, draw(TEXT), requested))
        messages += [Message(Role.TOOL, draw(TEXT), tool_call_id=call.id) for call in requested]
    return tuple(messages)


@st.composite
def splits(draw: st.DrawFn, text: str) -> list[str]:
    """`text` in one to five pieces. A piece may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def interleavings(draw: st.DrawFn, streams: Sequence[Sequence[Any]]) -> list[Any]:
    """An interleaving of all `streams` that keeps the order within each stream."""
    order = draw(st.permutations([at for at, stream in enumerate(streams) for _ in stream]))
    iterators = [iter(stream) for stream in streams]
    return [next(iterators[at]) for at in order]
