"""The output of an agent as a tool call, for a model that cannot enforce the schema of its text.

Many servers enforce a schema or offer tools, but not both at once, and some refuse every schema. `with_tool` adds a
tool whose arguments are the output, and requires a call. `as_text` makes the call's arguments the text of the reply, so
that the caller, the transcript and the next prompt have the output in one form.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from perdure.models import endings
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, ToolSchema

_NAME = "final_answer"
_DESCRIPTION = "Give your answer to the user. Call this tool once, and last: the conversation ends with it."


def with_tool(request: ModelRequest) -> ModelRequest:
    """`request` with its output as a tool. A model that thinks may answer in text: providers refuse to require a call.

    >>> from perdure.models.protocol import ModelRequest
    >>> asked = with_tool(ModelRequest((), output={"type": "object"}, requires_output=True))
    >>> asked.tools[0].name, asked.settings["tool_choice"], asked.output
    ('final_answer', ['final_answer'], None)
    """
    if request.output is None:
        return request
    name = _name_for({each.name for each in request.tools})
    choice = request.settings.get("tool_choice")
    settings = {each: value for each, value in request.settings.items() if each != "tool_choice"}
    if isinstance(choice, list | tuple):  # tools that the agent wants called before its answer
        settings["tool_choice"] = choice
    elif not thinks(request.settings):
        settings["tool_choice"] = "required" if request.tools and choice != "none" else [name]
    tool = ToolSchema(name, _DESCRIPTION, request.output)
    return replace(request, tools=(*request.tools, tool), settings=settings, output=None, requires_output=False)


def as_text(request: ModelRequest, reply: ModelReply, call: ModelCall) -> ModelReply:
    """The reply to `with_tool(request)`, as a reply to `request`. Other calls of the reply run first.

    Replaces the text that was streamed to `call` by the output.

    Raises:
        CallAborted, DeadlineExceeded: the call is over.
    """
    name = _name_for({each.name for each in request.tools})
    answers = [each for each in reply.tool_calls if each.name == name]
    others = tuple(each for each in reply.tool_calls if each.name != name)
    if not answers:
        return reply
    if others:
        is_last = reply.tool_calls[: len(others)] == others  # opaque parts belong to calls by position
        return replace(reply, tool_calls=others, opaque=reply.opaque if is_last else None)
    text = answers[0].arguments
    call.rewind()
    call.delta(text)
    stop_reason = endings.STOP if reply.stop_reason == endings.TOOL_CALLS else reply.stop_reason
    return replace(reply, content=text, tool_calls=(), stop_reason=stop_reason, opaque=None)


def _name_for(taken: Collection[str]) -> str:
    name = _NAME
    while name in taken:
        name += "_"
    return name


def thinks(settings: Mapping[str, Any]) -> bool:
    """Whether a request with these settings asks the model to think."""
    return settings.get("reasoning_effort", settings.get("thinking", False)) not in (False, "none", None)
