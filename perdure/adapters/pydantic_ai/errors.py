"""pydantic-ai's errors as perdure's. What the provider said decides, as for the models of perdure."""

from __future__ import annotations

from typing import TypeGuard

from pydantic_ai import exceptions

from perdure.clock import Clock
from perdure.errors import (
    BudgetExhausted,
    ContentFiltered,
    IncompleteReply,
    InvalidResponse,
    PerdureError,
    ProviderError,
)
from perdure.models.adapted.errors import of_api

_CUT_OFF: type[BaseException] | tuple[()] = getattr(exceptions, "OutputTokenLimitExceeded", ())
"""The error of a reply without a text that a limit of tokens cut off. pydantic-ai 2.64 has no such error."""


def of_model(error: BaseException, clock: Clock) -> PerdureError | None:
    """The error of perdure for one that a model of pydantic-ai raised; `None` if the model did not cause it."""
    found = _of_model(error, clock)
    if found is not None and found is not error:
        found.__cause__ = error
    return found


def as_raised(error: Exception) -> Exception:
    """The error that pydantic-ai raised, if `of_model` made `error` of it; else `error`."""
    cause = error.__cause__
    return cause if isinstance(error, PerdureError) and _is_of_model(cause) else error


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
