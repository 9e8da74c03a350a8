"""The request and response bodies of `/v1/conversations`."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool

from perdure.channels.http.schemas.answer import SESSION_ID, Answer, Instant, examples
from perdure.text.untrusted import NOT_BLANK_PATTERN
from perdure.turns.inbox.incoming import Text

_EXAMPLE: dict[str, Any] = {
    "tenant": None,
    "user_id": "ann",
    "conversation": "trip-to-rome",
    "title": "A trip to Rome in May",
    "archived": False,
    "remember": True,
    "session_id": SESSION_ID,
    "unsettled_turns": [],
    "created_at": "2026-05-02T09:30:00+00:00",
    "last_activity_at": "2026-05-02T09:31:12+00:00",
}


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty")
    return value


class ChangeConversation(BaseModel):
    """Changes to a conversation. A member that is `null` or absent changes nothing."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"title": "Rome in May"}, {"archived": True}, {"remember": False}]},
    )

    title: (
        Annotated[
            Text,
            Field(min_length=1, max_length=200, json_schema_extra={"pattern": NOT_BLANK_PATTERN}),
            AfterValidator(_not_blank),
        ]
        | None
    ) = None
    archived: StrictBool | None = None
    remember: StrictBool | None = None


class Conversation(Answer):
    """A conversation. `session_id` is the id of its live session.

    `unsettled_turns` contains the ids of at most twenty unsettled turns of that session, oldest first.
    """

    model_config = examples(_EXAMPLE)

    tenant: str | None
    user_id: str
    conversation: str
    title: str
    archived: bool
    remember: bool
    session_id: UUID | None
    unsettled_turns: list[UUID]
    created_at: Instant
    last_activity_at: Instant
