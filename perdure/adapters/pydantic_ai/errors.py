"""pydantic-ai's errors as perdure's. What the provider said decides, as for the models of perdure."""

from __future__ import annotations

from typing import TypeGuard

from pydantic_ai import exceptions

from perdure.clock import Clock
from perdure.errors import (
    BudgetExhausted,
    CircuitBreakerOpen,
    ContentFiltered,
    DeadlineExceeded,
    IncompleteReply,
    InvalidResponse,
    PerdureError,
    ProviderError,
    RateLimited,
)
from perdure.models.adapted.errors import of_api

_CUT_OFF: type[BaseException] | tuple[()] = getattr(exceptions, "OutputTokenLimitExceeded", ())
"""The error of a reply without a text that a limit of tokens cut off. pydantic-ai 2.64 has no such error."""


_OF_PROVIDERS = (CircuitBreakerOpen, DeadlineExceeded, ProviderError, RateLimited)
"""What perdure raises if a model does not answer, and another one may."""


def of_model(error: BaseException, clock: Clock) -> PerdureError | None:
    """The error of perdure for one that a model of pydantic-ai raised; `None` if the model did not cause it."""
    found = _of_model(error, clock)
    if found is not None and not _has(error, found):
        found.__cause__ = error
    return found


def _has(error: BaseException, found: PerdureError) -> bool:
    """Whether `found` is the error or, after `as_raised`, its cause."""
    if isinstance(error, exceptions.FallbackExceptionGroup):
        return any(_has(each, found) for each in error.exceptions)
    return found is error or found is error.__cause__


def as_raised(error: Exception, model: str) -> Exception:
    """The error that the run sees: the one that pydantic-ai raised, if `of_model` made `error` of it.

    A failure that perdure has found, such as an open circuit breaker, is one of pydantic-ai, so that a capability such
    as `ModelFallback` asks another model.
    """
    cause = error.__cause__
    if isinstance(error, PerdureError) and _is_of_model(cause):
        return cause
    if not isinstance(error, _OF_PROVIDERS):
        return error
    raised = exceptions.ModelAPIError(model, error.message)
    raised.__cause__ = error
    return raised


def _is_of_model(error: BaseException | None) -> TypeGuard[Exception]:
    kinds = (exceptions.FallbackExceptionGroup, exceptions.ModelAPIError, exceptions.UnexpectedModelBehavior)
    return isinstance(error, kinds)


def of_run(error: BaseException, clock: Clock) -> PerdureError | None:
    """The error of perdure for one that ended a run; `None` for an error of the agent's own code."""
    if not isinstance(error, exceptions.UsageLimitExceeded):
        return of_model(error, clock)
    found = BudgetExhausted("I reached the limit of this agent's usage, so I stopped.")
    found.__cause__ = error
    return found


def _of_model(error: BaseException, clock: Clock) -> PerdureError | None:  # noqa: C901, PLR0911 (a table)
    match error:
        case PerdureError():
            return error
        case exceptions.ModelAPIError() if isinstance(error.__cause__, PerdureError):  # see `as_raised`
            return error.__cause__
        case exceptions.FallbackExceptionGroup():
            causes = (_of_model(each, clock) for each in error.exceptions)
            found = [each for each in causes if each is not None]
            return found[-1] if found else ProviderError("The models failed.")
        case _ if isinstance(error, _CUT_OFF):
            return IncompleteReply("The model reached its limit of tokens before it had said anything.")
        case exceptions.ContentFilterError():
            return ContentFiltered("The provider's content filter stopped the answer.")
        case exceptions.ModelConnectionError():
            return ProviderError("The model cannot be reached.", transient=True)
        case exceptions.ModelRequestTimeout():
            return ProviderError("The model did not answer in time.", transient=True)
        case exceptions.ModelAPIError():
            return of_api(error, clock)
        case exceptions.UnexpectedModelBehavior():
            return InvalidResponse("The model's answers were not what this agent expects.")
        case _:
            return None
