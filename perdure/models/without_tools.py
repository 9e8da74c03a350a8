"""Converts requests for fallback models, which have no tools: earlier tool calls and their results become text.

Some providers refuse a request that has tool calls in its transcript but defines no tools. Some models call tools even
if a request defines none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from perdure.models.protocol import Message, ModelRequest, Role
from perdure.text.quoting import NOTE, RESULT, Quoter

_NO_TOOLS = "You have no tools at the moment. Answer from the conversation alone, and say so if that does not suffice."


def flatten_tool_calls(request: ModelRequest) -> ModelRequest:
    """Remove the tools from `request`, and convert the tool calls and results in its conversation to text."""
    flattened = tuple(_flattened(request.messages))
    if request.tools or flattened != request.messages:
        quotes = any(message.role is Role.TOOL for message in request.messages)
        flattened = _with_note(flattened, f"{_NO_TOOLS}\n\n{NOTE}" if quotes else _NO_TOOLS)
    return replace(request, messages=flattened, tools=())


def _with_note(messages: Sequence[Message], note: str) -> tuple[Message, ...]:
    if not messages or messages[0].role is not Role.SYSTEM:
        return (Message(Role.SYSTEM, note), *messages)
    first = replace(messages[0], content=f"{messages[0].content}\n\n{note}")
    return (first, *messages[1:])


def _flattened(messages: Sequence[Message]) -> Iterator[Message]:
    """Convert tool calls and results to text. Consecutive results become one user message."""
    names: dict[str, str] = {}
    quoter = Quoter()
    for is_result, group in groupby(messages, key=lambda message: message.role is Role.TOOL):
        if is_result:
            yield Message(Role.USER, "\n".join(_result(each, names, quoter) for each in group))
            continue
        for message in group:
            if message.tool_calls:
                names = {call.id: call.name for call in message.tool_calls}  # an id is unique only within one reply
                calls = [f"[I called {call.name} with {call.arguments or '{}'}]" for call in message.tool_calls]
                yield Message(message.role, "\n".join(part for part in (message.content, *calls) if part))
            else:
                yield message


def _result(message: Message, names: Mapping[str, str], quoter: Quoter) -> str:
    """Quote a tool's result, to separate it from the user's own words in the user message."""
    title = f"[{names.get(message.tool_call_id or '', 'a tool')} returned]"
    return quoter.quote(RESULT, title, [message.content]) or f"{title}: nothing"
