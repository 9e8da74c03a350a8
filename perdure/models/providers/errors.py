"""Maps a provider's failures to the errors of perdure.

    failure                                        error              transient
    a request larger than a whole rate limit       ContextTooLong     no
    429, or a rate limit under another status      RateLimited        yes
    a content filter's refusal                     ContentFiltered    no
    a prompt that is too long; any other 413       ContextTooLong     no
    408, any 5xx                                   ProviderError      yes
    an error without a status                      ProviderError      yes, unless its code or type names a 4xx
    a call of a tool that the server cannot read   InvalidResponse    yes
    no connection, or a broken one                 ProviderError      yes
    no answer in time                              DeadlineExceeded   yes
    any other 4xx, a redirect to another origin    ProviderError      no
    a compressed reply                             InvalidResponse    no

Servers name these cases by an error code, by an error type, or only in the message. `_RATE`, `_FILTER`, `_TOO_LONG` and
`_MALFORMED` have the names and phrases of all providers and servers that are known. A server in front of others may
answer with an error of its own that contains the real one (`failure_in`).

An error in the middle of a stream or in a body with status 200 has no status of its own. `_named_status` reads one.

Users may see the messages of these errors, so the messages contain no text from the provider. `Exchange` logs the
status, the code and the request id, because the provider's support asks for them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import httpcore2

from perdure.clock import Clock
from perdure.errors import (
    ContentFiltered,
    ContextTooLong,
    DeadlineExceeded,
    InvalidResponse,
    PerdureError,
    ProviderError,
    RateLimited,
)
from perdure.models.providers.json_values import as_array, as_object, as_string
from perdure.text.patterns import compiled
from perdure.text.untrusted import first_line

_log = logging.getLogger(__name__)

_LONGEST_RETRY_AFTER_S = 86_400.0
_LONGEST_PAGE = 10_000
_QUOTED = 200
_DEEPEST_ERROR = 5
_TELLING = ("message", "detail", "msg", "innererror", "status_msg")
"""The members of an error that say what is wrong."""
_INPUT_STATUSES = frozenset({None, 400, 413, 422})
"""The statuses with which servers refuse an input. `None`: an error without a status."""
_REFUSALS = frozenset(map(str, range(400, 500)))
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The HTTP status for each type of error. An error within a stream has a type, but no status."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The codes and types that name one kind of failure, and phrases of messages under the statuses `statuses`."""

    codes: frozenset[str]
    phrases: tuple[str, ...]
    statuses: frozenset[int | None] = _INPUT_STATUSES

    def names(self, failure: ProviderFailure) -> bool:
        if {str(failure.code).casefold(), str(failure.type).casefold()} & self.codes:
            return True
        said = failure.message.lower()
        return failure.status in self.statuses and any(each in said for each in self.phrases)


_RATE = _Kind(
    frozenset({"rate_limit_exceeded", "rate_limit_error", "throttlingexception"}),
    ("tokens per min", "requests per min", "rate limit"),
    frozenset({None, 413}),
)
_FILTER = _Kind(
    frozenset({
        "content_filter", "content_policy_violation", "responsibleaipolicyviolation", "invalid_prompt",
        "cyber_policy_violation", "data_inspection_failed", "moderation_blocked", "content_violation",
        "1301",  # Zhipu's
        "1026", "1027",  # MiniMax's, about the input and the output
    }),
    ("content filter", "content_filter", "content management policy", "content policy",
     "responsibleaipolicyviolation", "safety system", "content exists risk", "violates usage guidelines",
     "new_sensitive", "input was flagged", "flagged by moderation", "inappropriate content"),
    frozenset({None, 400, 403, 422, 451}),
)  # fmt: skip
_AGAINST_POLICY = _Kind(frozenset(), ("usage policies", "usage policy"))
"""Not under 403, with which a provider says that it has locked an account out."""
_TOO_LONG = _Kind(
    frozenset({
        "context_length_exceeded", "request_too_large", "exceed_context_size_error",
        "1261",  # Zhipu's
    }),
    ("context length", "context window", "context size", "context limit", "prompt is too long", "input is too long",
     "maximum prompt length", "maximum number of tokens", "inputs` must have less than",
     "inputs` tokens + `max_new_tokens` must be", "reduce the length of the messages", "range of input length",
     "prompt exceeds max length", "maximum model length", "model token limit", "max_tokens must be at least 1, got -"),
)  # fmt: skip
_TOO_LONG_STRING = _Kind(frozenset({"string_above_max_length"}), ())
_MALFORMED = _Kind(
    frozenset({"tool_use_failed", "json_validate_failed"}), ("tool call validation failed", "failed to call a function")
)
"""The model wrote a call, or an output, that the server could not read. Another try may go well."""
_TOO_LONG_FOR_THE_SERVER = _Kind(
    frozenset(),
    ("exceeds the available context size", "exceeds the maximum context length"),
    frozenset({HTTPStatus.INTERNAL_SERVER_ERROR}),
)
_CALL_ID = compiled(r"tool_calls?\[[0-9]+\]\.id\b|\btool_call_id\b")
"""In the message of an error, the id of a call: a string that is too long is no prompt that is too long."""
_OF_THE_PROMPT = ("messages", "input", "prompt", "system", "instructions")
"""How the names of the parameters begin in which a string that is too long makes a prompt too long."""
_LIMIT_AND_REQUEST = compiled(r"limit:? ([0-9]{1,12})\b.{0,80}\brequested:? ([0-9]{1,12})\b")
"""A rate limit of tokens in a message, and the size of the request. A larger request never succeeds."""
_UNITS_S = {"ms": 0.001, "milli": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_AMOUNT = r"([0-9]{1,6}(?:\.[0-9]{1,9})?) ?(milli|ms|s|m|h|d)[a-z]{0,10}"
_AMOUNTS = compiled(_AMOUNT)
_PAUSE_IN_TEXT = compiled(rf"\b(?:again|retry|wait) (?:in|after|for) ((?:{_AMOUNT} ?){{1,4}})")
"""The pause in a message: "Please try again in 1m26.4s." """
_PAUSE_MEMBERS = ("retry_after", "retry_after_seconds", "retryAfter")
_RESET = "x-ratelimit-reset"
_FIRST_MOMENT, _FIRST_MILLISECONDS, _MOST_DIGITS = 10**9, 10**12, 13
"""The least reset of a rate limit that is a time since 1970, in seconds and in milliseconds."""


@dataclass(slots=True)
class Exchange:
    """One request to the model or embedder called `name`.

    `request_id` is the id that the provider gave to the request, from the provider's response. `received` is the
    beginning of what the server sent. The server may quote users, so the log quotes it only if `quotes` is true. If an
    error has a status of its own, which says what is wrong, `quotes_refusals` must be true, too.
    """

    name: str
    quotes: bool = False
    quotes_refusals: bool = False
    request_id: str | None = None
    received: bytes = b""

    def note(self, chunk: bytes) -> None:
        """Note the beginning of a response for the log."""
        if len(self.received) < _QUOTED:
            self.received += chunk[:_QUOTED]

    def log_success(self) -> None:
        _log.debug("%s answered: request id %s", self.name, _line(self.request_id))

    def log_failure(self, error: PerdureError, failure: ProviderFailure | None = None) -> PerdureError:
        """Log the details of a failed request, add them to `error` as a note, and return `error`.

        The error keeps what the server sent, if it may be quoted. A turn's row is erased with its user, unlike the log.
        """
        status, code = (None, None) if failure is None else (failure.status, failure.code)
        details = f"{self.name}: {error.code}: status {status}, code {_line(code)}, request id {_line(self.request_id)}"
        if failure is not None and failure.param:
            details += f", parameter {_line(failure.param)}"
        error.add_note(details)
        if said := failure.message if failure is not None else self.received.decode(errors="replace"):
            may_quote = self.quotes and (self.quotes_refusals or failure is None or failure.status is None)
            details += f", the server sent: {_line(said)}" if may_quote else ""
            error.received = _line(said) if self.quotes else None
        _log.warning("%s", details)
        return error


def _line(text: str | None) -> str | None:
    """A server's text for the log: one line without control characters, which a terminal would obey."""
    return None if text is None else "".join(filter(str.isprintable, first_line(text, _QUOTED)))


@dataclass(frozen=True, slots=True)
class ProviderFailure:
    """An error that the provider reported. `status` is `None` for an error under status 200.

    `type` comes from the server's JSON, where it may have any type.
    """

    status: int | None
    code: str | None
    message: str
    headers: Mapping[str, str]
    type: object = None
    param: str = ""

    @property
    def said(self) -> str:
        """All texts of the error, in lower case."""
        return f"{self.code} {self.type} {self.param} {self.message}".casefold()


class Refusal(Exception):
    """The server has reported an error. It does not leave this package. `late`: part of a reply came before."""

    def __init__(self, failure: ProviderFailure, *, late: bool = False) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.late = late


def failure_in(data: object, status: int | None = None, headers: Mapping[str, str] | None = None) -> ProviderFailure:
    """The failure that a server's JSON describes, in whatever form."""
    error: Any = data
    for _ in range(_DEEPEST_ERROR):
        told = as_object(error)
        inner = error[0] if isinstance(error, list) and error else told.get("error") or as_array(told.get("errors"))
        inner = inner or told.get("base_resp")  # MiniMax's
        if not inner:
            break
        error = inner
    told = as_object(error) or {**as_object(data), "error": error}  # a text, beside which there may be more
    kind = told.get("type") or told.get("status")
    status_code = told.get("status") if isinstance(told.get("status"), int) else told.get("status_code")
    code = told.get("code") or status_code
    message = "; ".join(_texts({key: told[key] for key in (*_TELLING, "error") if key in told} or error))
    named = str(code) if isinstance(code, str | int) and not isinstance(code, bool) else None
    given = {**pause_in(told), **(headers or {})}
    failure = ProviderFailure(status, named, message, given, kind, as_string(told.get("param")))
    return _with_wrapped(failure, as_object(told.get("metadata")))


def _with_wrapped(failure: ProviderFailure, metadata: Mapping[str, Any]) -> ProviderFailure:
    """`failure` with what the server behind a router said, which OpenRouter's errors have in their `metadata`."""
    raw = metadata.get("raw")
    if metadata.get("flagged_input") or metadata.get("reasons"):
        return replace(failure, type="content_filter")
    if not raw:
        return failure
    try:
        within = failure_in(json.loads(raw) if isinstance(raw, str) else raw, failure.status)
    except (ValueError, RecursionError):
        within = ProviderFailure(failure.status, None, as_string(raw)[:_LONGEST_PAGE], {})
    return replace(
        failure,
        code=within.code or failure.code,
        type=within.type or failure.type,
        param=within.param or failure.param,
        message="; ".join(filter(None, (failure.message, within.message))),
    )


def pause_in(error: Mapping[str, Any]) -> dict[str, str]:
    """The pause that an error contains, as the header that some servers do not send.

    Gemini's has it among its details, OpenRouter's has the headers of another server in its `metadata`.

    >>> pause_in({"details": [{"retryDelay": "39s"}]})
    {'retry-after': '39'}
    >>> pause_in({"metadata": {"headers": {"X-RateLimit-Reset": "1741305600000"}}})
    {'x-ratelimit-reset': '1741305600000'}
    """
    metadata = as_object(error.get("metadata"))
    passed_on = {str(name).lower(): str(each) for name, each in as_object(metadata.get("headers")).items()}
    found = {name: passed_on[name] for name in ("retry-after", _RESET) if name in passed_on}
    delays = [as_string(as_object(each).get("retryDelay")) for each in as_array(error.get("details"))]
    named = [told[name] for told in (error, metadata) for name in _PAUSE_MEMBERS if name in told]
    given = [each.removesuffix("s") for each in delays if each.endswith("s")]
    given += [str(each) for each in named if isinstance(each, int | float | str) and not isinstance(each, bool)]
    return {**found, "retry-after": given[0]} if given else found


def reports_failure(data: object) -> bool:
    """Whether the JSON that a server sent under status 200 is an error and not a part of a reply."""
    if isinstance(data, list):
        return bool(data) and reports_failure(data[0])
    told = as_object(data)
    if told.get("error") or told.get("object") == "error" or as_object(told.get("base_resp")).get("status_code"):
        return True
    return "choices" not in told and ("detail" in told or "errors" in told or isinstance(told.get("message"), str))


def failure_of(status: int, body: bytes, headers: Mapping[str, str]) -> ProviderFailure:
    """The failure that a response with an error's status describes. A body without JSON counts as its message."""
    try:
        return failure_in(json.loads(body), status, headers)
    except (ValueError, RecursionError):
        return ProviderFailure(status, None, body[:_LONGEST_PAGE].decode(errors="replace"), headers)


def _texts(value: object, depth: int = 0) -> Iterator[str]:
    """The texts in an error's JSON, without the input that the server quotes."""
    if isinstance(value, str):
        yield value
    elif depth < _DEEPEST_ERROR:
        for name, each in as_object(value).items():
            if name == "loc":
                yield ".".join(map(str, as_array(each)))
            elif name != "input":
                yield from _texts(each, depth + 1)
        for each in as_array(value):
            yield from _texts(each, depth + 1)


def error_of(failure: ProviderFailure, clock: Clock) -> PerdureError:
    """Map a failure to an error of perdure; see the table in the module's docstring."""
    status = _named_status(failure) if failure.status is None else failure.status
    pause = _pause(failure.headers, clock)
    never_fits = _exceeds_a_whole_limit(failure.message)
    if not never_fits and (status == HTTPStatus.TOO_MANY_REQUESTS or _RATE.names(failure)):
        pause = _pause_of_limit(failure, clock) if pause is None else pause
        return RateLimited("The model's provider limits the rate of requests.", retry_after_s=pause)
    if never_fits or status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return _too_long()
    if (named := _named_error(failure)) is not None:
        return named
    if status is None:
        return ProviderError("The model's server reported an error in the middle of its reply.", transient=True)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.REQUEST_TIMEOUT:
        return ProviderError(f"The model's server failed (status {status}).", transient=True, retry_after_s=pause)
    return ProviderError(f"The model's server refused the request (status {status}).", transient=False)


def _named_error(failure: ProviderFailure) -> PerdureError | None:
    """The error if the failure names what is wrong with the input, or with the model's output."""
    if _FILTER.names(failure) or _AGAINST_POLICY.names(failure):
        return ContentFiltered("The model's provider does not allow an answer to this: its content filter stopped it.")
    if _is_too_long(failure) or _TOO_LONG_FOR_THE_SERVER.names(failure):
        return _too_long()
    if _MALFORMED.names(failure):
        return InvalidResponse("The model's call of a tool, or its output, was malformed.")
    return None


def _too_long() -> ContextTooLong:
    return ContextTooLong("The conversation does not fit the model's context window.")


def _is_too_long(failure: ProviderFailure) -> bool:
    """Whether the prompt is too long, and not one of its other strings, such as the id of a call."""
    if _CALL_ID.search(failure.said):
        return False
    is_of_prompt = not failure.param or failure.param.startswith(_OF_THE_PROMPT)
    return _TOO_LONG.names(failure) or (_TOO_LONG_STRING.names(failure) and is_of_prompt)


def _exceeds_a_whole_limit(message: str) -> bool:
    found = _LIMIT_AND_REQUEST.search(message.lower())
    return found is not None and int(found[2]) > int(found[1])


def _named_status(failure: ProviderFailure) -> int | None:
    """The status 4xx that the code names, or the type's; `None` if they name none, so that the call is tried again."""
    code = str(failure.code)
    if code.isdecimal():
        return int(code) if code in _REFUSALS else None
    return _STATUS_OF_TYPE.get(str(failure.type).casefold())


def connection_error(cause: BaseException | None) -> PerdureError:
    """Map an error of the transport to an error of perdure; see the table in the module's docstring."""
    if isinstance(cause, httpcore2.TimeoutException) and not isinstance(cause, httpcore2.ConnectTimeout):
        return DeadlineExceeded("The model did not answer in time.")
    return ProviderError("The connection to the model's server failed.", transient=True)


def _pause(headers: Mapping[str, str], clock: Clock) -> float | None:
    """The provider's retry delay in seconds; `None` if it is missing or invalid."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        given = headers.get(name, "")
        try:
            seconds = float(given) * unit_s
        except ValueError:
            try:
                moment = parsedate_to_datetime(given)
            except (ValueError, OverflowError):
                continue
            aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            seconds = max(0.0, (aware - clock.now()).total_seconds())
        return _acceptable(seconds)
    return None


def _pause_of_limit(failure: ProviderFailure, clock: Clock) -> float | None:
    """Seconds until a rate limit ends, as the message or the reset of the limit says; `None` if they do not."""
    if found := _PAUSE_IN_TEXT.search(failure.message.lower()):
        return _acceptable(sum(float(each[1]) * _UNITS_S[each[2]] for each in _AMOUNTS.finditer(found[1])))
    reset = failure.headers.get(_RESET, "")
    if not reset.isdecimal() or len(reset) > _MOST_DIGITS or int(reset) < _FIRST_MOMENT:
        return None
    moment_s = int(reset) / (1_000 if int(reset) >= _FIRST_MILLISECONDS else 1)
    return _acceptable(max(0.0, moment_s - clock.now().timestamp()))


def _acceptable(seconds: float) -> float | None:
    return seconds if 0 <= seconds <= _LONGEST_RETRY_AFTER_S else None  # NaN is not
