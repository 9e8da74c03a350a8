"""Fallbacks: if a call fails after all retries, a strategy supplies the reply.

If the strategy has no reply or fails, the call's error is raised. There is no fallback after a content filter's
refusal. If the strategy raises one, it replaces the call's error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from perdure.errors import loggable
from perdure.resilience.failures import allows_fallback

log = logging.getLogger(__name__)

Asked = TypeVar("Asked")
Reply = TypeVar("Reply")
Asked_contra = TypeVar("Asked_contra", contravariant=True)
Reply_co = TypeVar("Reply_co", covariant=True)


class FallbackStrategy(Protocol[Asked_contra, Reply_co]):
    """Supplies a reply to a request whose call failed."""

    def execute(self, asked: Asked_contra, error: Exception) -> Reply_co | None:
        """The reply to the request `asked`, whose call failed with `error`; `None` if the strategy has no reply.

        Raises:
            Abandoned: the call was cancelled.
            Exception: the strategy failed. `with_fallback` treats this failure like the result `None`.
        """
        ...


def with_fallback(
    what: str, work: Callable[[], Reply], strategy: FallbackStrategy[Asked, Reply], asked: Asked
) -> Reply:
    """Return the result of `work`, or the reply of `strategy` if `work` fails.

    Raises:
        Exception: the error of `work`, if the strategy has no reply or fails.
        ContentFiltered: a content filter refuses the input.
        Abandoned: the call was cancelled.
    """
    try:
        return work()
    except Exception as error:
        if not allows_fallback(error):
            raise
        log.warning("%s failed (%s), calling its fallback", what, loggable(error), exc_info=error.__cause__)
        found = _recover(what, strategy, asked, error)
        if found is None:
            raise
        return found


def _recover(what: str, strategy: FallbackStrategy[Asked, Reply], asked: Asked, error: Exception) -> Reply | None:
    try:
        return strategy.execute(asked, error)
    except Exception as further:
        if not allows_fallback(further):
            raise
        log.exception("the fallback of %s failed", what)
        return None
