"""A prompt without tools: what was called and what came of it, told as text.

For calls to models that get no tools, whose providers refuse a transcript with tool calls then,
or whose models would go on calling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from perdure.models.protocol import Message, ModelRequest, Role

_NO_TOOLS = "You have no tools at the moment. Answer from the conversation alone, and say so if that does not suffice."


def as_plain(request: ModelRequest) -> ModelRequest:
    """The same conversation, with its calls and results as text, and no tools."""
    plain = tuple(_told(request.messages))
    if request.tools or plain != request.messages:
        plain = _with_note(plain)
    return ModelRequest(plain)


def _with_note(messages: Sequence[Message]) -> tuple[Message, ...]:
    if not messages or messages[0].role is not Role.SYSTEM:
        return (Message(Role.SYSTEM, _NO_TOOLS), *messages)
    first = replace(messages[0], content=f"{messages[0].content}\n\n{_NO_TOOLS}")
    return (first, *messages[1:])


def _told(messages: Sequence[Message]) -> Iterator[Message]:
    """Each message in text; the results of one reply's calls as one message of the user's side."""
    names: dict[str, str] = {}
    for is_result, group in groupby(messages, key=lambda message: message.role is Role.TOOL):
        if is_result:
            results = [f"[{names.get(each.tool_call_id or '', 'a tool')} returned: {each.content}]" for each in group]
            yield Message(Role.USER, "\n".join(results))
            continue
        for message in group:
            if message.tool_calls:
                names = {call.id: call.name for call in message.tool_calls}  # an id is unique in one reply only
                calls = [f"[I called {call.name} with {call.arguments or '{}'}]" for call in message.tool_calls]
                yield Message(message.role, "\n".join(part for part in (message.content, *calls) if part))
            else:
                yield message
