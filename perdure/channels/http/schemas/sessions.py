"""The request and response bodies of `/v1/sessions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt

from perdure.channels.http.schemas.answer import SESSION_ID, TURN_ID, Answer, Instant, examples
from perdure.channels.http.schemas.turns import Error, Status
from perdure.text.untrusted import whole
from perdure.turns.inbox.incoming import MAX_REASON_CHARS, Text


class EndSession(BaseModel):
    """The reason for a session's end."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"reason": "the case is closed"}, {}]})

    reason: Annotated[Text, Field(max_length=MAX_REASON_CHARS)] | None = None


class ForkSession(BaseModel):
    """The tick (number of committed steps) up to which a session is copied. Null copies all settled turns."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"tick": 1}, {}]})

    tick: Annotated[StrictInt, Field(ge=0), BeforeValidator(whole)] | None = Field(
        None, description="Default: the session's current tick."
    )


class Consolidation(Answer):
    """The consolidation of an ended session's messages into memories. `error`: the error of the last run."""

    status: Literal["waiting", "done", "skipped", "given_up"]
    runs: int
    error: str | None


class Session(Answer):
    """A session, with `turn_count` settled turns and `unsettled` others. `title`: its conversation's title.

    `summary_kind` is `extractive` if no model wrote the summary.
    """

    model_config = examples(
        {
            "session_id": SESSION_ID,
            "tenant": None,
            "user_id": "ann",
            "agent": "assistant",
            "state": "active",
            "turn_count": 1,
            "unsettled": 0,
            "message_count": 2,
            "created_at": "2026-05-02T09:30:00.104512+00:00",
            "last_activity_at": "2026-05-02T09:30:01.870233+00:00",
            "ended_at": None,
            "channels": ["web"],
            "conversation": "trip-to-rome",
            "title": "A trip to Rome in May",
            "summary": None,
            "summary_kind": None,
            "key_topics": [],
            "parent_turn_id": None,
            "consolidation": None,
        }
    )

    session_id: UUID
    tenant: str | None
    user_id: str
    agent: str
    state: str
    turn_count: int
    unsettled: int
    message_count: int
    created_at: Instant
    last_activity_at: Instant
    ended_at: Instant | None
    channels: list[str]
    conversation: str | None
    title: str | None
    summary: str | None
    summary_kind: Literal["model", "extractive"] | None
    key_topics: list[str]
    parent_turn_id: UUID | None
    consolidation: Consolidation | None


class Forked(Answer):
    """The session that a fork created."""

    model_config = examples({"session_id": "01931e72-77a1-7f3d-a5de-40c7b02d9e31"})

    session_id: UUID


class Call(Answer):
    """A tool call that the model requested. `arguments` is text if the model did not pass a JSON object.

    `question` is present if the call asks the user a question: whether the user has answered it.
    """

    id: str
    name: str
    arguments: dict[str, Any] | str
    question: Literal["", "open", "answered", "unanswered"] = ""


class FileOfMessage(Answer):
    """A file of a message. `width` and `height` are those of an image, in pixels, and `pages` those of a PDF."""

    type: Literal["image", "file"]
    file_id: UUID
    media_type: str
    size: int
    sha256: str
    name: str = ""
    width: int = 0
    height: int = 0
    pages: int = 0


class QueuedTurn(Answer):
    """An unsettled turn and what its user has said to it: the message, those merged into it, and answers to questions.

    `attempts` is over 1 if an attempt was interrupted, as by a worker's loss.
    """

    model_config = examples(
        {
            "turn_id": TURN_ID,
            "seq": 2,
            "status": "accepted",
            "attempts": 0,
            "message_id": "web-4711",
            "text": "And what is 12 * 8?",
            "channel": "web",
            "accepted_at": "2026-05-02T09:30:00.104512+00:00",
        }
    )

    turn_id: UUID
    seq: int
    status: Status
    attempts: int
    message_id: str
    text: str
    parts: list[FileOfMessage] = Field(default=[])
    channel: str
    accepted_at: Instant


class Message(Answer):
    """One committed message of a transcript. `message_id` is the sender's own id of a user's message.

    `stop_reason` tells how a model's reply ended, such as `stop`, `tool_calls` or `length`. `error` marks the reply of
    a failed turn, which no model receives.
    """

    model_config = examples(
        {
            "seq": 1,
            "turn_id": TURN_ID,
            "role": "user",
            "content": "What is 12 * 7?",
            "channel": "web",
            "token_count": 8,
            "created_at": "2026-05-02T09:30:00.104512+00:00",
        }
    )

    seq: int
    turn_id: UUID
    role: Literal["user", "assistant", "tool"]
    content: str
    message_id: str = ""
    parts: list[FileOfMessage] = Field(default=[])
    tool_calls: list[Call] = Field(default=[])
    tool_call_id: str = ""
    channel: str
    token_count: int
    model: str = ""
    fallback: bool = False
    stop_reason: str = ""
    error: Error | None = None
    created_at: Instant
