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

`of_api` is for errors of models that have a client of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from perdure.models.providers.endpoint import FORGETFUL, Adaptation, Quirks
from perdure.models.providers.errors import ProviderFailure, connection_error, error_of, failure_in

_REFUSALS = (400, 404, 415, 422)
_DEEPEST = 4
"""The most members `error` within one another whose names are read."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a request's HTTP response said: its status, its headers, and the beginning of its body."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    received: str = ""

    @classmethod
    def by(cls, http: HttpExchange) -> _Seen:
        return cls(http.status, http.headers, http.exchange.received.decode(errors="replace"))


_NOTHING = _Seen()


def adaptation(
    error: Exception, http: HttpExchange, clock: Clock, quirks: Quirks, kinds: Sequence[str]
) -> Adaptation | None:
    """How a prompt with files of these kinds is sent again if the server refused an option, files or its own parts.

    pydantic-ai may refuse files, too. Returns `None` if the error is no such refusal.
    """
    refusal = _refusal(error, http)
    if refusal is not None:
        failure, found = refusal, error_of(refusal, clock)
        if not isinstance(found, ProviderError) or (failure.status is None and (found.transient or http.has_pieces())):
            return None
        if failure.status is None or failure.status in _REFUSALS:
            if not quirks.forgets and endpoint.refuses_own_parts(failure.said):
                return Adaptation(quirks | FORGETFUL, "its own signatures", lasting=False)
            if (files := endpoint.without_files(quirks, failure.said, kinds)) is not None:
                return files
        return http.repairs.of_refusal(http.sent, failure)
    is_unsent = isinstance(error, NotImplementedError | UserError) or "is not supported" in str(error)
    if not kinds or http.status is not None or not is_unsent or not quirks.reads:
        return None
    return Adaptation(replace(quirks, reads=frozenset()), "the files of a message", lasting=False)


def _refusal(error: Exception, http: HttpExchange) -> ProviderFailure | None:
    """What the server said that has refused a request, by a status or in a stream; `None` for another error."""
    if http.reported is not None:
        return http.reported
    if not isinstance(error, ModelHTTPError) and not (isinstance(error, ModelAPIError) and error.in_stream):
        return None
    return _failure_of(error, _Seen.by(http))


def refuses_own_parts(error: Exception) -> bool:
    """Whether the provider refuses signatures, or other opaque parts, of its own earlier replies."""
    if not isinstance(error, ModelAPIError):
        return False
    failure = _failure_of(error, _NOTHING)
    is_refusal = error.in_stream if failure.status is None else failure.status in _REFUSALS
    return is_refusal and endpoint.refuses_own_parts(failure.said)


def mapped(error: Exception, http: HttpExchange, clock: Clock) -> PerdureError:
    """The error of perdure for `error`, which is logged."""
    seen = _Seen.by(http)
    found = http.failure or _of(error, seen, clock)
    if http.reported is not None:
        return http.exchange.log_failure(found, http.reported)
    status = seen.status if seen.status is not None and httpx2.codes.is_error(seen.status) else None
    said = _failure_of(error, seen).message if isinstance(error, ModelHTTPError) else ""
    code = error.provider_error_code if isinstance(error, ModelAPIError) else None
    return http.exchange.log_failure(found, ProviderFailure(status, code, said or seen.received, seen.headers))


def of_api(error: ModelAPIError, clock: Clock) -> PerdureError:
    """The error of perdure for `error`, of whose HTTP response only the error itself is known."""
    return _of(error, _NOTHING, clock)


def _of(error: Exception, seen: _Seen, clock: Clock) -> PerdureError:  # noqa: C901, PLR0911 (a table)
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
            return error_of(_failure_of(error, seen), clock)
        case ModelAPIError() if error.in_stream or error.body is not None:
            return error_of(_failure_of(error, seen), clock)
        case ModelAPIError() if seen.status is None and "decode" not in error.message:
            return connection_error(None)
        case UserError():
            return ProviderError(f"The model cannot be asked this: {error.message}", transient=False)
        case _ if seen.status is not None and httpx2.codes.is_error(seen.status):  # the SDK cannot read its body
            return error_of(ProviderFailure(seen.status, None, "", seen.headers), clock)
        case _:  # the SDK or pydantic-ai stumbled over what the server sent
            return InvalidResponse("The model's server sent something that cannot be read.")


def _failure_of(error: ModelAPIError, seen: _Seen) -> ProviderFailure:
    """What the provider said, in the form of the own wires."""
    status = error.status_code if isinstance(error, ModelHTTPError) and not error.in_stream else None
    headers = dict(seen.headers)
    if error.retry_after is not None and not {"retry-after", "retry-after-ms"} & headers.keys():
        headers["retry-after"] = str(error.retry_after)  # from the body
    told = failure_in(_lowered(_parsed(error.body)), status, headers)
    code, kind = told.code or error.provider_error_code, told.type or error.provider_error_type
    said = told.message or f"{error.message}; {seen.received}"  # the SDK keeps only the member `error`
    return replace(told, code=code, message=said, type=kind)


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
