"""The request and response bodies of `/v1/schedules`."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import Body
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from perdure.channels.http.schemas.answer import TURN_ID, Answer, Instant, examples
from perdure.text.untrusted import NOT_BLANK_PATTERN
from perdure.turns.inbox.incoming import ChannelName, Name, Text, UserId

SCHEDULE_ID = "01980000-0000-7000-8000-0000000000d1"
"""The schedule's id in the examples."""


class NewSchedule(BaseModel):
    """A text to send as a message of the user. The body contains either `at` or `cron`.

    `at` is the time of a single message. `cron` is a cron expression for the times of repeated messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    user_id: UserId | None = Field(None, description="Default: the user token's user.")
    text: Annotated[Text, Field(min_length=1, json_schema_extra={"pattern": NOT_BLANK_PATTERN})]
    at: Annotated[Text, Field(max_length=40)] | None = None
    cron: Annotated[Text, Field(max_length=100)] | None = None
    timezone: Annotated[Text, Field(max_length=64)] | None = None
    conversation: Annotated[Name, Field(json_schema_extra={"pattern": NOT_BLANK_PATTERN})] | None = None
    agent: Name | None = None
    channel: ChannelName = "http"


NewScheduleBody = Annotated[
    NewSchedule,
    Body(
        openapi_examples={
            "regularly": {
                "summary": "Each working day at half past seven",
                "value": {
                    "user_id": "ann",
                    "text": "Summarise my calendar of today.",
                    "cron": "30 7 * * MON-FRI",
                    "timezone": "Europe/Paris",
                    "conversation": "mornings",
                },
            },
            "once": {
                "summary": "Once",
                "value": {
                    "user_id": "ann",
                    "text": "Remind me to call the plumber.",
                    "at": "2099-05-02T09:30",
                    "timezone": "Europe/Paris",
                },
            },
        }
    ),
]


class ChangeSchedule(BaseModel):
    """Whether a schedule is paused."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"paused": True}]})

    paused: StrictBool


_SCHEDULE: dict[str, Any] = {
    "schedule_id": SCHEDULE_ID,
    "tenant": None,
    "user_id": "ann",
    "text": "Summarise my calendar of today.",
    "at": None,
    "cron": "30 7 * * MON-FRI",
    "timezone": "Europe/Paris",
    "conversation": "mornings",
    "agent": None,
    "channel": "http",
    "paused": False,
    "next_due": "2026-05-04T05:30:00+00:00",
    "last_slot": "2026-05-01T05:30:00+00:00",
    "last_turn_id": TURN_ID,
    "error": None,
    "created_at": "2026-04-02T09:30:00+00:00",
}


class Schedule(Answer):
    """A schedule. `next_due` is null while the schedule is paused. `error` tells why its last message was refused."""

    model_config = examples(_SCHEDULE)

    schedule_id: UUID
    tenant: str | None
    user_id: str
    text: str
    at: Instant | None
    cron: str | None
    timezone: str
    conversation: str | None
    agent: str | None
    channel: str
    paused: bool
    next_due: Instant | None
    last_slot: Instant | None
    last_turn_id: UUID | None
    error: str | None
    created_at: Instant
