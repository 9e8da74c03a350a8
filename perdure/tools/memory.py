"""The built-in tools `remember`, `recall` and `forget`, for the memories of the turn's user.

Results of `recall` are quoted, so that the model treats them as data. The consolidation of memories
(`perdure.memory.consolidation`) does not extract quoted text as new memories.
"""

from __future__ import annotations

from datetime import UTC, tzinfo
from typing import Annotated
from uuid import UUID

from pydantic import Field

from perdure.errors import ToolError
from perdure.memory.consolidation.candidates import MAX_CONTENT_CHARS, MemoryKind
from perdure.memory.recall.agent_memory import OwnMemory
from perdure.memory.recall.search import Layer, Recalled
from perdure.models.embedders.protocol import MAX_QUERY_CHARS
from perdure.text.quoting import MEMORY, quoted
from perdure.text.untrusted import cut
from perdure.tools.registry import Effect, ToolContext, tool

MOST = 20
"""The most results of one call of `recall`."""

_PIECE_CHARS = 1_000


@tool(effect=Effect.IDEMPOTENT)
def remember(  # noqa: D417 (the model does not pass the context)
    content: Annotated[str, Field(min_length=1, max_length=MAX_CONTENT_CHARS, pattern=r"\S")],
    context: ToolContext,
    kind: MemoryKind = MemoryKind.FACT,
    importance: Annotated[float, Field(ge=0, le=1)] = 0.7,
) -> str:
    """Remember something about the user for good, in this and every later conversation.

    Use it when the user asks you to, or tells you what will still matter in months. Conversations
    are remembered anyway; this is for what must not be missed.

    Args:
        content: One sentence that can be understood alone, with names and dates instead of "he" and "tomorrow".
        kind: A fact, a preference, or an insight (something decided or learnt).
        importance: How much it matters, from 0 to 1.
    """
    memory_id = _memory_of(context).remember(content.strip(), kind, importance)
    return f"Remembered as {memory_id}."


@tool(effect=Effect.PURE)
def recall(  # noqa: D417 (the model does not pass the context)
    query: Annotated[str, Field(min_length=1, max_length=MAX_QUERY_CHARS)],
    context: ToolContext,
    k: Annotated[int, Field(ge=1, le=MOST)] = 5,
) -> str:
    """Search what is known of the user and what was said in all conversations with them.

    Args:
        query: What you look for, in words that may have been used; a time such as "last week" counts.
        k: How many results.
    """
    memory = _memory_of(context)
    lines = [_line(each, memory.zone or UTC) for each in memory.recall(query, k)]
    return quoted(MEMORY, "Recalled, the likeliest first", lines) or "Nothing was found."


@tool(effect=Effect.IDEMPOTENT)
def forget(memory_id: UUID, context: ToolContext) -> str:  # noqa: D417 (the model does not pass the context)
    """Forget one memory of the user, when they ask for it. What was said in conversations stays.

    Args:
        memory_id: The memory's id, as `recall` gives it.
    """
    deleted = _memory_of(context).forget(memory_id)
    return "It is forgotten." if deleted else "There is no such memory; it may have been forgotten."


def _memory_of(context: ToolContext) -> OwnMemory:
    if context.memory is None:
        raise ToolError("This process has no memory to look into.")
    return context.memory


def _line(each: Recalled, zone: tzinfo) -> str:
    """A result, with its dates in the user's time zone, as in a prompt. `memories.uses` finds a memory by its start."""
    known = f"memory {each.id}" if each.layer is Layer.SEMANTIC else "message"
    until = f", until {each.valid_to.astimezone(zone):%Y-%m-%d} only" if each.valid_to else ""
    return f"- [{known}, {each.occurred_at.astimezone(zone):%Y-%m-%d}{until}] {cut(each.content, _PIECE_CHARS)}"
