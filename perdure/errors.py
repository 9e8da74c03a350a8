"""The errors of perdure: a tree of classes, each with a stable code and an HTTP status.

    PerdureError                     UNKNOWN               500
    ├── RateLimited                  RATE_LIMITED          429
    ├── DeadlineExceeded             TIMEOUT               504
    ├── ContextTooLong               CONTEXT_TOO_LONG      400
    ├── ContentFiltered              CONTENT_FILTERED      400
    ├── IncompleteReply              INCOMPLETE_REPLY      400
    ├── ToolError                    TOOL_ERROR            500
    │   └── OutcomeUnknown           TOOL_ERROR            500
    ├── GuardRejected                GUARD_REJECTED        403
    ├── InvalidRequest               INVALID_REQUEST       400
    ├── Unauthorized                 UNAUTHORIZED          401
    ├── Forbidden                    FORBIDDEN             403
    ├── NotFound                     NOT_FOUND             404
    ├── Conflict                     CONFLICT              409
    ├── TooLarge                     TOO_LARGE             413
    ├── InvalidResponse              INVALID_RESPONSE      502
    │   └── ModelRetry               INVALID_RESPONSE      502
    ├── ProviderError                PROVIDER_ERROR        502
    ├── CircuitBreakerOpen           CIRCUIT_BREAKER_OPEN  503
    ├── Unavailable                  UNAVAILABLE           503
    │   └── IncompatibleDatabase     UNAVAILABLE           503
    ├── BudgetExhausted              BUDGET_EXHAUSTED      500
    ├── TurnCancelled                TURN_CANCELLED        409
    └── Abandoned                    (internal: the caller has aborted the call)

An error's `message` is for the caller: it has no stack trace, no query and no secret. The operator finds the exception
in the log. The code that first catches an error of a driver or of a provider's SDK converts it to one of these classes.

`transient`: whether the same call may succeed if it is repeated; see `perdure.resilience.failures`. `retry_after_s`:
the seconds that the called service asks the caller to wait before a retry.
"""

from __future__ import annotations

from copy import copy
from datetime import datetime
from typing import ClassVar

INTERNAL_ERROR = "Internal error. The operator's log has the details."
"""The message for an unexpected exception, whose own text may hold a query or a secret."""


class PerdureError(Exception):
    """The base class of all errors that have a code. The caller may see `message`.

    `transient` is `None` if the error's cause decides whether a retry may succeed. `retry_after_s` counts seconds from
    the creation of the error; `None` if unknown. `received` is the beginning of what a model's server sent instead, if
    it may be quoted: only the operator sees it.
    """

    code: ClassVar[str] = "UNKNOWN"
    http_status: ClassVar[int] = 500
    transient: bool | None = None
    retry_after_s: float | None = None
    received: str | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RateLimited(PerdureError):
    """The request exceeds a rate limit of the provider or of this installation."""

    code = "RATE_LIMITED"
    http_status = 429
    transient = True

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(PerdureError):
    """A call or a turn exceeded its time limit."""

    code = "TIMEOUT"
    http_status = 504
    transient = True


class ContextTooLong(PerdureError):
    """The prompt does not fit the model."""

    code = "CONTEXT_TOO_LONG"
    http_status = 400
    transient = False


class ContentFiltered(PerdureError):
    """The model or its provider's content filter refuses to answer this input."""

    code = "CONTENT_FILTERED"
    http_status = 400
    transient = False


class IncompleteReply(PerdureError):
    """The model's reply ended before it had any text or a complete tool call; the message says why."""

    code = "INCOMPLETE_REPLY"
    http_status = 400
    transient = False


OF_INPUT = ContextTooLong, ContentFiltered, IncompleteReply
"""The errors of models that the input causes. The same input causes them again, and no other input suffers."""


class ToolError(PerdureError):
    """A tool failed; the model receives the message.

    Example:
        >>> @tool(effect="pure")
        ... def weather(city: str) -> str:
        ...     '''Say what the weather is like.'''
        ...     raise ToolError(f"There is no city {city}.")
        >>> assistant = Agent("assistant", "You help.", tools=[weather])
        >>> ask(assistant, "Umbrella?", model=Scripted(call("weather", city="X"), "Which city?")).calls[0].result
        'Error: There is no city X.'
    """

    code = "TOOL_ERROR"
    http_status = 500


class OutcomeUnknown(ToolError):
    """A tool was interrupted after it had begun: its effect may or may not have happened.

    Example:
        >>> @tool
        ... def pay(amount: int) -> str:
        ...     '''Pay an amount in cents.'''
        ...     raise OutcomeUnknown("The bank did not answer.")
        >>> assistant = Agent("assistant", "You help.", tools=[pay])
        >>> answer = ask(assistant, "Pay.", model=Scripted(call("pay", amount=5), "I do not know whether it was paid."))
        >>> answer.calls[0].status
        'unknown'
    """


class GuardRejected(PerdureError):
    """A guard (a required hook) rejected the turn or the tool call.

    Example:
        >>> def closed(turn: TurnStarted) -> None:
        ...     raise GuardRejected("The shop is closed.")
        >>> shop = Agent("shop", "You sell tea.", before_turn=[required(closed)])
        >>> ask(shop, "Tea!", model=Scripted()).reply
        'The shop is closed.'
    """

    code = "GUARD_REJECTED"
    http_status = 403
    transient = False


class InvalidRequest(PerdureError):
    """The request is invalid; repeating it does not help."""

    code = "INVALID_REQUEST"
    http_status = 400
    transient = False


class Unauthorized(PerdureError):
    """The key is missing or unknown."""

    code = "UNAUTHORIZED"
    http_status = 401
    transient = False


class Forbidden(PerdureError):
    """The key has no access to the object or the action."""

    code = "FORBIDDEN"
    http_status = 403
    transient = False


class NotFound(PerdureError):
    """The object does not exist, or the caller may not see it."""

    code = "NOT_FOUND"
    http_status = 404
    transient = False


class Conflict(PerdureError):
    """The request conflicts with the current state."""

    code = "CONFLICT"
    http_status = 409
    transient = False


class TooLarge(PerdureError):
    """The input is longer than the limit that the message names."""

    code = "TOO_LARGE"
    http_status = 413
    transient = False


class InvalidResponse(PerdureError):
    """A provider's answer is malformed."""

    code = "INVALID_RESPONSE"
    http_status = 502
    transient = True


class ModelRetry(InvalidResponse):
    """The model's answer is not what the agent wants; the model receives the message, and answers again.

    Raised by a function `check_output` of an agent.

    Example:
        >>> def in_stock(item: str) -> None:
        ...     if item != "tea":
        ...         raise ModelRetry("Only tea is in stock.")
        >>> shop = Agent("shop", "You sell drinks.", check_output=in_stock)
        >>> ask(shop, "What do you have?", model=Scripted("coffee", "tea")).reply
        'tea'
    """

    transient = False


class ProviderError(PerdureError):
    """A provider failed, refused the request, or could not be reached.

    `transient` is `None` if it is unknown whether a retry may succeed.
    """

    code = "PROVIDER_ERROR"
    http_status = 502

    def __init__(self, message: str, *, transient: bool | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.transient = transient
        self.retry_after_s = retry_after_s


class CircuitBreakerOpen(PerdureError):
    """A circuit breaker refuses calls until the time `until`.

    `retry_after_s` is the number of seconds until that time. Both are `None` if the time is unknown.
    """

    code = "CIRCUIT_BREAKER_OPEN"
    http_status = 503
    transient = False

    def __init__(
        self,
        message: str = "Service temporarily unavailable due to repeated failures. Please try again later.",
        *,
        until: datetime | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.until = until
        self.retry_after_s = retry_after_s


class Unavailable(PerdureError):
    """A required service (PostgreSQL, the broker) cannot be reached or refuses work.

    `reason` is what the service or its driver says, such as that a password is wrong. It names hosts and accounts, so
    only operators see it: in logs and in the output of commands.
    """

    code = "UNAVAILABLE"
    http_status = 503
    transient = True

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float = 1) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s

    @property
    def explained(self) -> str:
        """The message with the reason, for operators."""
        return f"{self.message} ({self.reason})" if self.reason else self.message


class IncompatibleDatabase(Unavailable):
    """This release cannot use the database: the server's version or the schema's revision is not supported."""

    transient = False


class BudgetExhausted(PerdureError):
    """The turn used up its steps or its attempts, or its next model call exceeds the budget of `setting`.

    `wait_s`: seconds until the call may be tried again; `None`: waiting does not help.
    """

    code = "BUDGET_EXHAUSTED"
    http_status = 500
    transient = False

    def __init__(self, message: str, *, setting: str | None = None, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.setting = setting
        self.wait_s = wait_s


class TurnCancelled(PerdureError):
    """The turn was cancelled."""

    code = "TURN_CANCELLED"
    http_status = 409
    transient = False


class Abandoned(PerdureError):
    """The caller aborted the call; the called service did not fail."""

    transient = False


def reworded(error: PerdureError, message: str) -> PerdureError:
    """A copy of `error` with another `message`, and with `error` as its cause."""
    other = copy(error)
    other.message = message
    other.__cause__ = error
    return other


def loggable(error: BaseException) -> str:
    """`error` in one line for a log: its code or type, and its message if it cannot contain a user's text.

    Logs outlive the erasure of a user, and an error message of a tool, a hook or a library may quote a user's text. The
    full message of a tool's error is in the transcript. The message of a database driver's error is included if the
    error's attribute `hides_values` is true: such a message contains no values.
    """
    kind = error.code if isinstance(error, PerdureError) else type(error).__name__
    text = _shown_text(error).partition("\n")[0][:_MAX_TEXT]
    return f"{kind}: {text}" if text else kind


_MAX_TEXT = 500


def _shown_text(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or ""  # the full message contains the file name, which a user may have chosen
    if isinstance(error, Unavailable):
        return error.explained
    if isinstance(error, PerdureError):
        return error.message if isinstance(error, _OF_SERVERS) else ""
    if isinstance(error, SettingsError | IllegalTransition) or getattr(error, "hides_values", False):
        return str(error)
    return str(error) if _is_of_a_broker(type(error)) else ""


_OF_SERVERS = (
    RateLimited, DeadlineExceeded, ContextTooLong, ContentFiltered, IncompleteReply, ProviderError, CircuitBreakerOpen,
    Unavailable, BudgetExhausted, TurnCancelled, Abandoned,
)  # fmt: skip
"""Errors such as a failed server or an exceeded limit, whose messages never contain a user's text.

The messages of other errors may contain a user's text.
"""


def _is_of_a_broker(kind: type[BaseException]) -> bool:
    return kind.__module__.partition(".")[0] in {"redis", "kombu", "amqp"} and kind.__name__ in {
        "ConnectionError", "TimeoutError", "OperationalError", "BusyLoadingError", "AuthenticationError",
        "ReadOnlyError", "OutOfMemoryError",
    }  # fmt: skip


class SettingsError(Exception):
    """A setting is invalid. The message names the variable, its value and the accepted values.

    Not a `PerdureError`: it stops a program when it starts, and is never shown to a user.
    """


class MissingKey(SettingsError):
    """A vendor's key for the model or the embedder is missing. Processes that do not call the vendor still start."""


class IllegalTransition(Exception):
    """A session's state does not allow a transition: a bug in perdure.

    Not a `PerdureError`, so that it is logged with its traceback. The transition wrote nothing to the database. `state`
    is the session's state. `trigger` names the event that was to cause the transition, and the source and target
    states of the transition.
    """

    def __init__(self, state: str, trigger: str) -> None:
        super().__init__(f"The session is {state}, which does not allow: {trigger}.")
        self.state = state
        self.trigger = trigger
