"""pydantic-ai's errors as perdure's."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeGuard

from pydantic_ai import exceptions

from perdure.errors import (
    BudgetExhausted,
    ContentFiltered,
    ContextTooLong,
    IncompleteReply,
    InvalidResponse,
    PerdureError,
    ProviderError,
    RateLimited,
)


def of_model(error: BaseException) -> PerdureError | None:
    """The error of perdure for one that a model of pydantic-ai raised; `None` if the model did not cause it."""
    found = _of_model(error)
    if found is not None and found is not error:
        found.__cause__ = error
    return found


def as_raised(error: Exception) -> Exception:
    """The error that pydantic-ai raised, if `of_model` made `error` of it; else `error`."""
    cause = error.__cause__
    return cause if isinstance(error, PerdureError) and _is_foreign(cause) else error


def _is_foreign(error: BaseException | None) -> TypeGuard[Exception]:
    return isinstance(error, Exception) and not isinstance(error, PerdureError) and _of_model(error) is not None


def of_run(error: BaseException) -> PerdureError | None:
    """The error of perdure for one that ended a run; `None` for an error of the agent's own code."""
    if not isinstance(error, exceptions.UsageLimitExceeded):
        return of_model(error)
    found = BudgetExhausted("I reached the limit of this agent's usage, so I stopped.")
    found.__cause__ = error
    return found


def _of_model(error: BaseException) -> PerdureError | None:
    if isinstance(error, PerdureError):
        return error
    if isinstance(error, exceptions.FallbackExceptionGroup):
        found = [each for each in map(_of_model, error.exceptions) if each is not None]
        return found[-1] if found else ProviderError("The models failed.")
    kinds = {each.__name__ for each in type(error).__mro__}
    return next((make(error) for name, make in _KINDS if name in kinds), None)


def _busy(error: Any) -> PerdureError:
    return RateLimited("The model is busy.", retry_after_s=getattr(error, "retry_after", None))


def _refused(error: Any) -> PerdureError:
    status = error.status_code
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return _busy(error)
    transient = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.REQUEST_TIMEOUT
    return ProviderError(f"The model's provider answered with the status {status}.", transient=transient)


_KINDS: tuple[tuple[str, Callable[[Any], PerdureError]], ...] = (
    ("ModelContextWindowExceededError", lambda _: ContextTooLong("The conversation is too long for the model.")),
    (
        "OutputTokenLimitExceeded",
        lambda _: IncompleteReply("The model reached its limit of tokens before it had said anything."),
    ),
    ("ContentFilterError", lambda _: ContentFiltered("The provider's content filter stopped the answer.")),
    ("ModelRateLimitError", _busy),
    ("ModelConnectionError", lambda _: ProviderError("The model cannot be reached.", transient=True)),
    ("ModelRequestTimeout", lambda _: ProviderError("The model did not answer in time.", transient=True)),
    ("ModelHTTPError", _refused),
    ("ModelAPIError", lambda _: ProviderError("The model's provider failed.", transient=True)),
    ("UnexpectedModelBehavior", lambda _: InvalidResponse("The model's answers were not what this agent expects.")),
)
"""For each kind of error, the special ones first, the error of perdure. An older pydantic-ai lacks some kinds."""
