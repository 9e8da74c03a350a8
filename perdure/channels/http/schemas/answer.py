"""Parts that all responses share: the base model, the format of a time, and the errors that a route declares."""

from __future__ import annotations

from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from perdure.channels.http.errors import CODES, MEDIA_TYPE

Responses = dict[int | str, dict[str, Any]]
"""The type of FastAPI's argument `responses`: a route's responses besides its response model, keyed by status."""


def _instant(value: str) -> str:
    datetime.fromisoformat(value)
    return value


Instant = Annotated[str, AfterValidator(_instant), Field(json_schema_extra={"format": "date-time"})]
"""A time in ISO 8601 format, as text from `datetime.isoformat`: pydantic would format a `datetime` differently."""

WITH_KEY = (401, 403, 429, 500, 503)
"""The error statuses of a route that needs a key."""

WITH_BODY = (400, 408, 413)
"""The further error statuses of a route that takes a body."""

WITH_EMBEDDING = (502, 504)
"""The further error statuses of a route that embeds the caller's text."""


TURN_ID, SESSION_ID = "01931e6f-5d6a-7c3e-9f64-6f1a3f0f2b11", "01931e6f-5d69-7b80-8f0c-2c9d8c1b7a55"
RUN_ID, FILE_ID = "01931e70-0a52-7d11-b0c6-8a5e3f6b9c20", "01931e71-20c4-7a05-8f3b-5d0f6a1e9b42"
"""The ids in examples: `RUN_ID`, `TURN_ID`, `SESSION_ID` and `FILE_ID`."""


class Answer(BaseModel):
    """The base of response models. A member that the model does not declare is an error in the gateway."""

    model_config = ConfigDict(extra="forbid")


class Problem(Answer):
    """An error (RFC 9457). `code` is stable; `detail` is a message for people."""

    type: Literal["about:blank"]
    title: str
    status: int
    detail: str
    code: Annotated[str, Field(json_schema_extra={"enum": sorted(set().union(*CODES.values()))})]


def problems(*statuses: int) -> Responses:
    """The `responses` of a route with these error statuses. Each response lists its error codes."""
    return {
        status: {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(CODES[status])}.",
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted(statuses)
    }


def examples(*values: dict[str, Any]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": list(values)})
