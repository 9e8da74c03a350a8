"""The request and response bodies of `/v1/links`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from perdure.channels.http.schemas.answer import Answer, Instant, examples
from perdure.turns.inbox.incoming import UserId


class NewLink(BaseModel):
    """The user to link another channel to."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [{"user_id": "ann"}]})

    user_id: UserId


class LinkCode(Answer):
    """A one-time code and its expiry. The user sends `/link CODE` from the channel to link."""

    model_config = examples({"code": "K7QM-42XD-9TRA", "expires_at": "2026-05-02T09:40:00+00:00"})

    code: str
    expires_at: Instant


class LinkedIdentity(Answer):
    """A user's identity on a channel."""

    model_config = examples({"channel": "telegram", "external_id": "4711", "created_at": "2026-05-02T09:31:00+00:00"})

    channel: str
    external_id: str
    created_at: Instant
