"""Maps the errors of pydantic-ai and of the vendors' SDKs to the errors of perdure.

What the vendor said decides, by the table of `perdure.models.providers.errors`, like for the own wires:

    pydantic-ai's error                              error
    what a hook of the HTTP client raised            the same
    content filter                                   ContentFiltered
    context window                                   ContextTooLong
    a request's or an attempt's timeout              DeadlineExceeded
    a connection's error                             ProviderError, transient
    any other with a status                          by the status, the code and the message
    an error in a stream, without a status           by the code and the message
    an unreadable response                           InvalidResponse
    a request that the adapter itself refuses        ProviderError, not transient
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import httpx2
from pydantic_ai.exceptions import (
    ContentFilterError,
    ModelAPIError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelRequestTimeout,
    ModelTimeoutError,
    UserError,
)

from perdure.clock import Clock
from perdure.errors import (
    ContentFiltered,
    ContextTooLong,
    DeadlineExceeded,
    InvalidResponse,
    PerdureError,
    ProviderError,
)
from perdure.models.adapted.http import HttpExchange
from perdure.models.providers import endpoint
from perdure.models.providers.endpoint import Adaptation, Quirks
from perdure.models.providers.errors import ProviderFailure, connection_error, error_of, failure_in

_REFUSALS = (400, 404, 415, 422)
_DEEPEST = 4
"""The most members `error` within one another whose names are read."""


def adaptation(
    error: Exception, http: HttpExchange, clock: Clock, quirks: Quirks, kinds: Sequence[str]
) -> Adaptation | None:
    """How a prompt with files of these kinds is sent again if an option was refused, or the files, also by pydantic-ai.

    Returns `None` if the error is no such refusal.
    """
    if isinstance(error, ModelHTTPError):
        failure = failure_of(error, http)
        if not isinstance(error_of(failure, clock), ProviderError):
            return None
        files = endpoint.without_files(quirks, failure.said, kinds) if failure.status in _REFUSALS else None
        return files or http.repairs.of_refusal(http.sent, failure)
    is_unsent = isinstance(error, NotImplementedError | UserError) or "is not supported" in str(error)
    if not kinds or http.status is not None or not is_unsent or not quirks.reads:
        return None
    return Adaptation(replace(quirks, reads=frozenset()), "the files of a message", lasting=False)


def mapped(error: Exception, http: HttpExchange, clock: Clock) -> PerdureError:
    """The error of perdure for `error`, which is logged."""
    found = http.failure or _of(error, http, clock)
    if http.reported is not None:
        return http.exchange.log_failure(found, http.reported)
    status = http.status if http.status is not None and httpx2.codes.is_error(http.status) else None
    said = failure_of(error, http).message if isinstance(error, ModelHTTPError) else ""
    code = error.provider_error_code if isinstance(error, ModelAPIError) else None
    received = http.exchange.received.decode(errors="replace")
    return http.exchange.log_failure(found, ProviderFailure(status, code, said or received, http.headers))


def _of(error: Exception, http: HttpExchange, clock: Clock) -> PerdureError:  # noqa: C901, PLR0911 (a table)
    match error:
        case PerdureError():
            return error
        case ContentFilterError():
            return ContentFiltered("The model's provider does not allow an answer to this.")
        case ModelContextWindowExceededError() if error.provider_error_code != "string_above_max_length":
            return ContextTooLong("The conversation does not fit the model's context window.")
        case ModelRequestTimeout() | ModelTimeoutError(phase="read" | "write" | "pool"):
            return DeadlineExceeded("The model did not answer in time.")
        case ModelConnectionError():
            return connection_error(None)
        case ModelHTTPError():
            return error_of(failure_of(error, http), clock)
        case ModelAPIError() if error.in_stream or error.body is not None:
            return error_of(failure_of(error, http), clock)
        case ModelAPIError() if http.status is None and "decode" not in error.message:
            return connection_error(None)
        case UserError():
            return ProviderError(f"The model cannot be asked this: {error.message}", transient=False)
        case _ if http.status is not None and httpx2.codes.is_error(http.status):  # the SDK cannot read its body
            return error_of(ProviderFailure(http.status, None, "", http.headers), clock)
        case _:  # the SDK or pydantic-ai stumbled over what the server sent
            return InvalidResponse("The model's server sent something that cannot be read.")


def failure_of(error: ModelAPIError, http: HttpExchange) -> ProviderFailure:
    """What the provider said, in the form of the own wires."""
    status = error.status_code if isinstance(error, ModelHTTPError) and not error.in_stream else None
    headers = dict(http.headers)
    if error.retry_after is not None and not {"retry-after", "retry-after-ms"} & headers.keys():
        headers["retry-after"] = str(error.retry_after)  # from the body
    told = failure_in(_lowered(_parsed(error.body)), status, headers)
    code, kind = told.code or error.provider_error_code, told.type or error.provider_error_type
    received = http.exchange.received.decode(errors="replace")  # the SDK keeps only the member `error`
    return replace(told, code=code, message=told.message or f"{error.message}; {received}", type=kind)


def _parsed(body: object) -> object:
    if not isinstance(body, str | bytes):
        return body
    try:
        return json.loads(body)
    except ValueError:
        return {}


def _lowered(body: object, depth: int = _DEEPEST) -> object:
    """The JSON of an error, with the names of its members in lower case: Bedrock's are `Error` and `Message`."""
    if isinstance(body, list):
        return [_lowered(each, depth - 1) for each in body[:1]]
    if not isinstance(body, Mapping) or depth <= 0:
        return body
    members = {str(name).lower(): each for name, each in body.items()}
    return {name: _lowered(each, depth - 1) if name == "error" else each for name, each in members.items()}
