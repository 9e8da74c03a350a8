"""Fallbacks: another reply after a call has finally failed, or the original error.

A failure of the strategy itself never hides the original error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from perdure.errors import loggable
from perdure.resilience.failures import Verdict, verdict

log = logging.getLogger(__name__)

Asked = TypeVar("Asked")
Reply = TypeVar("Reply")
Asked_contra = TypeVar("Asked_contra", contravariant=True)
Reply_co = TypeVar("Reply_co", covariant=True)


class FallbackStrategy(Protocol[Asked_contra, Reply_co]):
    """Finds another reply to a request."""

    def execute(self, asked: Asked_contra, error: Exception) -> Reply_co | None:
        """Another reply to `asked`, which failed with `error`; `None` if there is none.

        Raises:
            Exception: has the effect of `None`, except a cancellation, which is passed on.
        """
        ...


def with_fallback(
    what: str, work: Callable[[], Reply], strategy: FallbackStrategy[Asked, Reply], asked: Asked
) -> Reply:
    """The result of `work`, or of `strategy` after any failure but a cancellation.

    Raises:
        Exception: that of `work`, if the strategy finds nothing or fails.
        Abandoned: the caller ended the call.
    """
    try:
        return work()
    except Exception as error:
        if verdict(error) is Verdict.ABANDONED:
            raise
        log.warning("%s failed (%s); calling its fallback", what, loggable(error), exc_info=error.__cause__)
        found = _recover(what, strategy, asked, error)
        if found is None:
            raise
        return found


def _recover(what: str, strategy: FallbackStrategy[Asked, Reply], asked: Asked, error: Exception) -> Reply | None:
    try:
        return strategy.execute(asked, error)
    except Exception as further:
        if verdict(further) is Verdict.ABANDONED:
            raise
        log.exception("the fallback of %s failed as well", what)
        return None
