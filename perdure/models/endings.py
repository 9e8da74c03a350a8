"""How a model's reply ended, and what may be done with it. Used by the model wires, the resilience and the step loop.

Only a reply that ended properly acts: the step loop runs no tool call of any other reply (`why_calls_do_not_run`). A
text that a token limit cut off is still a reply. Each reply's message keeps its reason (`recorded`). A filtered reply
is none, with or without calls (`checked`).

Servers and third parties spell the reasons differently. `normalized` maps all known spellings to the names below.
"""

from __future__ import annotations

from perdure.errors import ContentFiltered, IncompleteReply, InvalidResponse, PerdureError, ProviderError
from perdure.models.protocol import ModelReply

STOP = "stop"
TOOL_CALLS = "tool_calls"
LENGTH = "length"
CONTENT_FILTER = "content_filter"
REFUSAL = "refusal"
"""The model refused to answer; the reply's text, if any, is its refusal."""
MALFORMED = "malformed_call"
"""The server could not read the model's call of a tool."""
FAILED = "error"

_PROPER = frozenset({STOP, TOOL_CALLS})
_SPELLINGS = {
    STOP: ("end_turn", "stop_sequence", "eos", "eos_token", "complete", "completed", "end", "done"),
    TOOL_CALLS: ("tool_use", "function_call", "tool_call"),
    LENGTH: ("max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"),
    CONTENT_FILTER: (
        "content_filtered",
        "safety",
        "recitation",
        "sensitive",
        "blocklist",
        "prohibited_content",
        "spii",
    ),
    MALFORMED: (
        "malformed_function_call",
        "function_call_filter: malformed_function_call",
        "unexpected_tool_call",
        "malformed_tool_use",
        "malformed_model_output",
    ),
    FAILED: ("abort", "aborted", "cancelled", "network_error", "insufficient_system_resource"),
}
_NAMES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings}
_LONGEST_REASON = 40

_CUT_OFF = "Ask again for it, with fewer or shorter arguments"
_WHY = {
    LENGTH: f"the reply was cut off at its limit of tokens before it was complete. {_CUT_OFF}",
    "": f"the reply broke off without an end. {_CUT_OFF}",
}


def normalized(reason: str | None) -> str:
    """The name of `reason` in this module; an unknown reason stays as it is. `None` counts as the default, `stop`."""
    if reason is None:  # from a third party's model
        return STOP
    spelled = reason.strip().casefold().replace("-", "_")
    return _NAMES.get(spelled, spelled)


def is_proper(reason: str) -> bool:
    return normalized(reason) in _PROPER


def ended_properly(reply: ModelReply) -> bool:
    return is_proper(reply.stop_reason)


def recorded(reply: ModelReply) -> str:
    """The reason to store with the reply's message."""
    return _short(normalized(reply.stop_reason)) or "unknown"


def why_calls_do_not_run(reply: ModelReply) -> str | None:
    """The reason, for the model, why no tool call of the reply runs; `None` if the reply ended properly."""
    if ended_properly(reply):
        return None
    reason = normalized(reply.stop_reason)
    return f"Not run: {_WHY.get(reason) or f'the reply did not end properly (reason: {_short(reason)})'}."


def checked(reply: ModelReply) -> ModelReply:
    """`reply`, if it has tool calls or a text that may be shown.

    Raises:
        ContentFiltered: a content filter ended the reply, or the model refused without a text or with tool calls.
        IncompleteReply: the reply is empty, and its stop reason says why.
        InvalidResponse: the reply is empty for no reason, or because of a malformed call.
        ProviderError: the reply is empty, because the server failed.
    """
    reason = normalized(reply.stop_reason)
    is_empty = not reply.tool_calls and not reply.content.strip()
    if is_empty or reason == CONTENT_FILTER or (reason == REFUSAL and reply.tool_calls):
        raise _unusable(reason)
    return reply


def _unusable(reason: str) -> PerdureError:
    match reason:
        case "stop" | "tool_calls" | "" | "malformed_call":
            fault = "call of a tool was malformed" if reason == MALFORMED else "answer was empty"
            return InvalidResponse(f"The model's {fault}.")
        case "error":
            return ProviderError("The model's server failed before it sent an answer.", transient=True)
        case "content_filter":
            return ContentFiltered(
                "The model's provider does not allow an answer to this: its content filter stopped it."
            )
        case "refusal":
            return ContentFiltered("The model refused to answer this.")
        case "length":
            return IncompleteReply("The model reached its limit of tokens before it had said anything.")
        case _:
            return IncompleteReply(f"The model ended its reply without an answer (reason: {_short(reason)}).")


def _short(reason: str) -> str:
    """The letters, digits and underscores at the beginning of `reason`, because users may see the reason."""
    return "".join(each for each in reason[:_LONGEST_REASON] if each.isalnum() or each == "_")
