"""The request and response bodies of `/v1/tokens`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt

from perdure.channels.http.schemas.answer import Answer, Instant, examples
from perdure.text.untrusted import whole
from perdure.turns.inbox.incoming import UserId

LONGEST_TTL_S = 30 * 24 * 3600
"""The longest lifetime of a token, in seconds. Lifetimes are limited because a single token cannot be revoked."""


class NewToken(BaseModel):
    """The user of a new token, and its lifetime in seconds."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"user_id": "ann", "ttl_s": 3600}]}
    )

    user_id: UserId
    ttl_s: Annotated[StrictInt, Field(ge=1, le=LONGEST_TTL_S), BeforeValidator(whole)]


class Token(Answer):
    """A token and its expiry. Requests send the token as `Authorization: Bearer TOKEN`."""

    model_config = examples({"token": "TOKEN", "expires_at": "2026-05-02T10:30:00+00:00"})

    token: str
    expires_at: Instant
