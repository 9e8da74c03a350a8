"""Errors of the OpenAI-compatible routes, in OpenAI's shape: `{error: {message, type, param, code}}`."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from fastapi import Response

from perdure.channels.http.errors import CODES, NO_RETRY, headers_of
from perdure.errors import InvalidRequest, PerdureError, RateLimited, Unauthorized

PATHS = (
    "/v1/chat", "/v1/models", "/v1/responses", "/v1/embeddings", "/v1/completions", "/v1/audio", "/v1/images",
    "/v1/moderations", "/v1/batches", "/v1/assistants", "/v1/threads", "/v1/vector_stores", "/v1/fine_tuning",
    "/v1/uploads", "/v1/realtime", "/v1/videos", "/v1/containers", "/v1/evals",
)  # fmt: skip
"""The prefixes of the paths whose errors have this shape: those of OpenAI, also where the gateway has no route."""

SDK_HEADER = "x-stainless-lang"
"""OpenAI's SDKs send it. Errors of all routes have this shape for them."""

REWOUND = "stream_rewound"
STOPPING = "gateway_stopping"


class BadParameter(InvalidRequest):
    """A member of the request is invalid; `param` is its path, such as `messages[2].content[0]`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(BadParameter):
    """`model` names no agent."""

    http_status = 404


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: PerdureError) -> dict[str, Any]:
    """The body for a `PerdureError`, with the error's `code` (OpenAI's `model_not_found` for `UnknownModel`)."""
    param = error.param if isinstance(error, BadParameter) else None
    code = "model_not_found" if isinstance(error, UnknownModel) else error.code
    return error_body(error.message, _kind(error.http_status, error), code, param)


def response_of(error: PerdureError) -> Response:
    return respond(body_of(error), error.http_status, headers_of(error))


def settled_failure(turn: dict[str, Any]) -> Response:
    """The response for a failed or cancelled turn. Its header stops SDK retries, which would find the same turn."""
    found, status = failure_body(turn)
    return respond(found, status, NO_RETRY)


def failure_body(turn: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The error body for a failed or cancelled turn, and the HTTP status."""
    code, message = turn["error"]["code"], turn["error"]["message"]
    statuses = [status for status, codes in CODES.items() if code in codes]
    status = min(statuses, default=HTTPStatus.INTERNAL_SERVER_ERROR)  # INVALID_REQUEST has 400 and 408
    return error_body(message, _kind(status), code), status


def respond(body: dict[str, Any], status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body, ensure_ascii=False).encode(), status, headers, "application/json")


def _kind(status: int, error: PerdureError | None = None) -> str:
    """OpenAI's `type` for an error with this status."""
    if isinstance(error, RateLimited):
        return "rate_limit_error"
    if isinstance(error, Unauthorized):
        return "authentication_error"
    if status == HTTPStatus.FORBIDDEN:
        return "permission_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
