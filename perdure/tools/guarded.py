"""Calls a tool through the circuit breaker `tool:NAME` that the tool declares.

The breaker counts these as failures of the service that the tool calls: a time-out, an interrupted call, an exception
that is not a `ToolError`, and a `ToolError` that such an exception caused. Any other `ToolError` counts neither as a
failure nor as a success. Tools of MCP servers use their server's breaker instead.
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
    """Raised inside the breaker if a call ended after its time-out. The breaker ignores this exception.

    `text` is the call's result. If the call failed, `__cause__` is its error.
    """

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
    """Call the tool; see `RunnableTool.call`. After `lease_s` seconds, the breaker may treat the call as ended.

    `is_over` returns True if the call has timed out. The breaker ignores the outcome of a call that has timed out,
    because `note_overdue` counts the time-out.

    Raises:
        ToolError: the tool raised it, or its breaker is open.
        OutcomeUnknown: the tool raised it.
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
        raise ToolError(f"Not called: {tool.breaker} failed too often recently.{again_in(error)}") from error


def note_overdue(tool: RunnableTool, breakers: BreakerRegistry | None) -> None:
    """Count a timed-out call as a failure in the tool's breaker."""
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
            error.transient = False  # the breaker counts it neither as success nor as failure
        raise


def _is_the_tools_own(error: BaseException | None) -> bool:
    """Whether the error and all errors in its chain of causes are `ToolError`s that the tool raised."""
    while isinstance(error, ToolError) and error.transient is None:
        error = error.__cause__
    return error is None


def _overdue() -> None:
    raise DeadlineExceeded("The tool ran past its time.")


def again_in(error: PerdureError) -> str:
    """When the breaker lets the next call pass, as a sentence for the model; empty if that is unknown."""
    return "" if error.retry_after_s is None else f" Try again in {math.ceil(error.retry_after_s)} s."
