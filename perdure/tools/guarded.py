"""Calls of tools that need somebody else, through the breaker `tool:NAME` that they declare.

What a tool refuses in its own words is no failure of whoever is behind it; what it meets there
(an error of another kind, or one with such a cause), a broken-off call and a time-out are. Tools
of MCP servers have the breaker of their server already.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from perdure.errors import Abandoned, CircuitBreakerOpen, DeadlineExceeded, OutcomeUnknown, PerdureError, ToolError
from perdure.resilience.registry import Breaker, BreakerRegistry
from perdure.tools.registry import ToolContext
from perdure.tools.sources import RunnableTool


class _Late(Abandoned):
    """What came after its time, and counts neither way: a text, or the error that is its cause."""

    def __init__(self, text: str | None = None) -> None:
        super().__init__("The tool ran past its time.")
        self.text = text


def call(
    tool: RunnableTool,
    arguments: Mapping[str, Any],
    context: ToolContext,
    breakers: BreakerRegistry | None,
    *,
    lease_s: float,
    is_over: Callable[[], bool],
) -> str:
    """What the tool returns; see `RunnableTool.call`. After `lease_s` it is over, or counts as overdue.

    What it comes to when its time `is_over` counts neither way: that it is overdue is noted, and once.

    Raises:
        ToolError: as the tool does, or because its breaker lets no call through.
        OutcomeUnknown: as the tool does.
    """
    breaker = _breaker_of(tool, breakers)
    if breaker is None:
        return tool.call(arguments, context)
    try:
        return breaker.execute(lambda: _in_time(tool, arguments, context, is_over), lease_s)
    except _Late as late:
        if late.text is not None:
            return late.text
        raise late.__cause__ or late from None
    except CircuitBreakerOpen as error:
        raise ToolError(f"Not called: {tool.breaker} failed too often of late.{_in(error)}") from error


def note_overdue(tool: RunnableTool, breakers: BreakerRegistry | None) -> None:
    """A call of the tool ran past its time: a failure, though nobody knows whether it will ever end."""
    breaker = _breaker_of(tool, breakers)
    if breaker is not None:
        with contextlib.suppress(DeadlineExceeded, CircuitBreakerOpen):
            breaker.execute(_overdue, lease_s=1)


def _breaker_of(tool: RunnableTool, breakers: BreakerRegistry | None) -> Breaker | None:
    return None if tool.breaker is None or breakers is None else breakers.get(f"tool:{tool.breaker}")


def _in_time(
    tool: RunnableTool, arguments: Mapping[str, Any], context: ToolContext, is_over: Callable[[], bool]
) -> str:
    try:
        text = _called(tool, arguments, context)
    except Exception as error:
        if is_over():
            raise _Late from error
        raise
    if is_over():
        raise _Late(text)
    return text


def _called(tool: RunnableTool, arguments: Mapping[str, Any], context: ToolContext) -> str:
    try:
        return tool.call(arguments, context)
    except OutcomeUnknown:
        raise
    except ToolError as error:
        if _is_the_tools_own(error):
            error.transient = False  # a refusal, which counts neither way
        raise


def _is_the_tools_own(error: BaseException | None) -> bool:
    """Whether nothing but the tool's own words is in the chain of causes."""
    while isinstance(error, ToolError) and error.transient is None:
        error = error.__cause__
    return error is None


def _overdue() -> None:
    raise DeadlineExceeded("The tool ran past its time.")


def _in(error: PerdureError) -> str:
    return "" if error.retry_after_s is None else f" Try again in {math.ceil(error.retry_after_s)} s."
