"""The request and response bodies of `/v1/memory` and `/v1/memories`."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr

from perdure.channels.http.schemas.answer import SESSION_ID, Answer, Instant, examples
from perdure.memory.consolidation.candidates import MAX_CONTENT_CHARS
from perdure.memory.recall.search import MAX_K, Layer
from perdure.text.untrusted import NOT_BLANK_PATTERN, whole
from perdure.turns.inbox.incoming import Text, UserId

MEMORY_ID = "01931e75-1c9f-7a08-9f6e-5b1d2c3e4f50"
"""The memory's id in the examples."""


class Search(BaseModel):
    """A search over a user's memory."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {"user_id": "ann", "query": "What is the dog called?"},
                {"user_id": "ann", "query": "allergies", "k": 3, "layers": ["semantic"]},
            ]
        },
    )

    user_id: UserId | None = Field(None, description="Default: the user token's user.")
    query: Text
    k: Annotated[StrictInt, Field(ge=1, le=MAX_K), BeforeValidator(whole)] = 10
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)] = (Layer.EPISODIC, Layer.SEMANTIC)


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty")
    return value


class SearchResult(Answer):
    """A message or a memory. `message_ids`: the message's own id, or the ids of the memory's source messages.

    `valid_until` is set if a newer memory has superseded this one, or if the user said that it is over.
    """

    layer: Literal["episodic", "semantic"]
    id: str
    content: str
    score: float
    message_ids: list[str]
    occurred_at: Instant
    valid_until: Instant | None


class SearchResults(Answer):
    """The results of a search, best first."""

    model_config = examples(
        {
            "results": [
                {
                    "layer": "semantic",
                    "id": MEMORY_ID,
                    "content": "The user's dog is called Rex.",
                    "score": 0.83,
                    "message_ids": ["web-4711"],
                    "occurred_at": "2026-05-02T09:30:00+00:00",
                    "valid_until": None,
                }
            ]
        }
    )

    results: list[SearchResult]


class CorrectMemory(BaseModel):
    """The right words of a memory, in place of the wrong ones."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"content": "The user lives in Paris."}]})

    content: Annotated[
        Text,
        Field(min_length=1, max_length=MAX_CONTENT_CHARS, json_schema_extra={"pattern": NOT_BLANK_PATTERN}),
        AfterValidator(_not_blank),
    ]


_MEMORY = {
    "id": MEMORY_ID,
    "content": "The user lives in Lyon.",
    "type": "fact",
    "subject": "user",
    "attribute": "home",
    "importance": 0.7,
    "valid_from": "2026-05-02T09:30:00+00:00",
    "valid_until": None,
    "message_ids": ["web-4711"],
}


class Memory(Answer):
    """What is remembered of a user.

    `type` is `fact`, `preference`, `insight`, or `conversation` for a text with instructions, which is quoted and
    claims nothing. `subject` and `attribute` are null if they are unknown. `valid_until` is set if a newer memory has
    superseded this one, or if the user said that it is over. `message_ids`: the messages that it came from.
    """

    model_config = examples(_MEMORY)

    id: UUID
    content: str
    type: Literal["fact", "preference", "insight", "conversation"]
    subject: str | None
    attribute: str | None
    importance: float
    valid_from: Instant
    valid_until: Instant | None
    message_ids: list[str]


class Source(Answer):
    """A message that a memory came from. `text` has at most its first 2,000 characters."""

    message_id: str
    session_id: UUID
    conversation: str | None
    channel: str
    role: str
    text: str
    said_at: Instant


class Use(Answer):
    """A turn whose prompt had the memory. `conversation` is the key of its conversation, if it has one."""

    turn_id: UUID
    session_id: UUID
    conversation: str | None
    at: Instant


class MemoryWithSources(Memory):
    """A memory, with the messages that it came from, the earliest first, and the turns whose prompts had it.

    These are at most 50 of each, of the turns the newest ones.
    """

    model_config = examples(
        {
            **_MEMORY,
            "sources": [
                {
                    "message_id": "web-4711",
                    "session_id": "01931e75-1c9f-7a08-9f6e-5b1d2c3e4f51",
                    "conversation": "web-1",
                    "channel": "web",
                    "role": "user",
                    "text": "I live in Lyon now.",
                    "said_at": "2026-05-02T09:30:00+00:00",
                }
            ],
            "used_in": [
                {
                    "turn_id": "01931e75-1c9f-7a08-9f6e-5b1d2c3e4f54",
                    "session_id": "01931e75-1c9f-7a08-9f6e-5b1d2c3e4f53",
                    "conversation": "web-2",
                    "at": "2026-05-03T10:00:00+00:00",
                }
            ],
        }
    )

    sources: list[Source]
    used_in: list[Use]


class Consolidate(BaseModel):
    """The session to consolidate into memories. Null requests the consolidation of a batch of pending sessions."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{}]})

    # Any text is accepted: a malformed UUID gets 404, like an unknown UUID.
    session_id: Annotated[StrictStr, Field(json_schema_extra={"format": "uuid"})] | None = None


class ConsolidationRequested(Answer):
    """The session whose consolidation was requested. Null stands for a batch of pending sessions."""

    model_config = examples({"session_id": None}, {"session_id": SESSION_ID})

    session_id: UUID | None
