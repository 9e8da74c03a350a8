"""Hooks: functions of an agent's author (`def` or `async def`) that run before and after turns and tool calls.

    def blocklist(turn: TurnStarted) -> None:
        if "forbidden" in turn.text:
            raise GuardRejected("I do not talk about that.")

    Agent("assistant", "You help.", before_turn=[required(blocklist), count_it])

If a hook that is not `required` raises, perdure logs the exception and the turn continues.

If a required turn hook raises a `PerdureError`, the turn fails with that error. If it raises any other exception, the
turn fails with `GUARD_REJECTED`. If a required hook before a tool call raises, the tool does not run. If a required
hook after the call raises, the model does not receive the result. In both cases the model receives the error.

A hook that exceeds `PERDURE_TURN__HOOK_TIMEOUT_S` counts as failed. A coroutine is then cancelled. The thread of a
plain function cannot be stopped and counts as leaked (see `perdure.tools.leaks`).

`on_approval_waiting` hooks run before a turn begins to wait, once for each call that waits. If a required one fails,
the turn fails.

`before_turn` hooks run once per turn, even if the turn is parked (waits without a worker) and then continues. The
commit of the user's message records that they have run. After a crash, any hook may run again for the same turn or
call, with the same ids.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar
from uuid import UUID

from perdure.errors import GuardRejected, PerdureError, loggable
from perdure.text import declarations
from perdure.tools import event_loop
from perdure.tools.leaks import Leaks

log = logging.getLogger(__name__)

Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A turn before its first model call.

    `text` is the user's message, `metadata` the message's metadata, and `tenant` the user's tenant.

    Example:
        >>> def log_turn(turn: TurnStarted) -> None:
        ...     print(f"{turn.user_id} says {turn.text!r}")
        >>> assistant = Agent("assistant", "You help.", before_turn=[log_turn])
        >>> answer = ask(assistant, "Hello.", model=Scripted("Hi."), user_id="ana")
        ana says 'Hello.'
    """

    user_id: str
    session_id: UUID
    turn_id: UUID
    agent: str
    channel: str
    text: str
    tenant: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnEnding:
    """A turn that is about to end: its end is not committed yet.

    `status` is `done`, `failed` or `cancelled`. `reply` is `None` if the turn has no reply. `data` is the answer of an
    agent with an `output`, as JSON values.

    Example:
        >>> def log_end(ending: TurnEnding) -> None:
        ...     print(f"{ending.status}: {ending.reply}")
        >>> assistant = Agent("assistant", "You help.", after_turn=[log_end])
        >>> answer = ask(assistant, "Hello.", model=Scripted("Hi."))
        done: Hi.
    """

    turn: TurnStarted
    status: str
    reply: str | None
    data: Any = None


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """A tool call before it runs.

    `arguments` maps argument names to values. `effect_id` is the same for every attempt of the call. `tenant` is the
    user's tenant, and `metadata` the metadata of the user's message.

    Example:
        >>> @tool
        ... def refund(amount: int) -> str:
        ...     '''Refund an amount in cents.'''
        ...     return "done"
        >>> def at_most_100(call: ToolCalling) -> None:
        ...     if call.tool == "refund" and call.arguments["amount"] > 100:
        ...         raise GuardRejected("At most 100 cents.")
        >>> assistant = Agent("assistant", "You help.", tools=[refund], before_tool=[required(at_most_100)])
        >>> answer = ask(assistant, "Refund 5 euros.", model=Scripted(call("refund", amount=500), "I may not."))
        >>> answer.calls[0].status, answer.calls[0].result
        ('failed', 'Error: At most 100 cents.')
    """

    user_id: str
    session_id: UUID
    turn_id: UUID
    effect_id: UUID
    tool: str
    arguments: Mapping[str, Any]
    tenant: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """A tool call with the result that the model will receive.

    Example:
        >>> @tool(effect="pure")
        ... def price(item: str) -> str:
        ...     '''Look up the price of an item.'''
        ...     return "3 euros"
        >>> def log_result(called: ToolCalled) -> None:
        ...     print(f"{called.call.tool}({called.call.arguments['item']}) returned {called.result!r}")
        >>> assistant = Agent("assistant", "You help.", tools=[price], after_tool=[log_result])
        >>> answer = ask(assistant, "How much is tea?", model=Scripted(call("price", item="tea"), "3 euros."))
        price(tea) returned '3 euros'
    """

    call: ToolCalling
    result: str


@dataclass(frozen=True, slots=True)
class ApprovalWaiting:
    """A tool call that is about to wait for a person's approval. `approver` says whose: `user` or `staff`.

    `call_id` identifies the call within its turn, as in `POST /v1/turns/{turn_id}/approval`.

    Example:
        >>> @tool(requires_approval=True, approver="staff")
        ... def refund(amount: int) -> str:
        ...     '''Refund an amount in cents.'''
        ...     return "done"
        >>> def notify(waiting: ApprovalWaiting) -> None:
        ...     print(f"{waiting.approver}: may {waiting.call.tool} run with {dict(waiting.call.arguments)}?")
        >>> assistant = Agent("assistant", "You help.", tools=[refund], on_approval_waiting=[notify])
        >>> answer = ask(assistant, "Refund me.", model=Scripted(call("refund", amount=500)))
        staff: may refund run with {'amount': 500}?
        >>> answer.status
        'waiting_approval'
    """

    call: ToolCalling
    call_id: str
    approver: str


@dataclass(frozen=True, slots=True)
class Required(Generic[Seen]):
    """A hook whose failure stops the turn or the tool call."""

    function: Callable[[Seen], object]


Hook = Callable[[Seen], object] | Required[Seen]
Hooks = Sequence[Hook[Seen]]


def required(function: Callable[[Seen], object]) -> Required[Seen]:
    """Wrap the hook `function` so that its failure stops the turn or the tool call.

    Raises:
        SettingsError: `function` is not a function with one parameter.

    Example:
        >>> def blocklist(turn: TurnStarted) -> None:
        ...     if "forbidden" in turn.text:
        ...         raise GuardRejected("I do not talk about that.")
        >>> assistant = Agent("assistant", "You help.", before_turn=[required(blocklist)])
        >>> ask(assistant, "Something forbidden.", model=Scripted()).error_code
        'GUARD_REJECTED'
    """
    declarations.require(
        declarations.takes_one(function), "required()", "function", function, "a function with one parameter"
    )
    return Required(function)


class _Unfinished(Exception):
    """A hook exceeded its time limit, or raised an exception that ends its thread, such as `SystemExit`."""


def call_hooks(hooks: Hooks[Seen], seen: Seen, within_s: float, leaks: Leaks) -> None:
    """Call each hook in order, for at most `within_s` seconds each.

    Raises:
        PerdureError: a required hook raised this error. Any other exception of a required hook becomes `GuardRejected`.
    """
    for hook in hooks:
        function = hook.function if isinstance(hook, Required) else hook
        name = getattr(function, "__qualname__", repr(function))
        try:
            _call(function, seen, name, within_s, leaks)
        except Exception as error:
            if not isinstance(hook, Required):
                log.exception("the hook %s failed; the turn continues", name)
                continue
            log.warning("the required hook %s failed: %s", name, loggable(error))
            if isinstance(error, PerdureError):
                raise
            raise GuardRejected("A guard of this installation refused this.") from error


def _call(function: Callable[[Seen], object], seen: Seen, name: str, within_s: float, leaks: Leaks) -> None:
    """Call one hook in a new thread, with a copy of the caller's context variables.

    Raises:
        Exception: raised by the hook.
        _Unfinished: the hook exceeded its time limit, or raised an exception such as `SystemExit`.
    """
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    context, late = contextvars.copy_context(), threading.Event()

    def work() -> None:
        try:
            context.run(event_loop.call, f"the hook {name}", partial(function, seen), late.is_set)
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            ended.put(error)
        else:
            ended.put(None)

    thread = threading.Thread(target=work, name=f"perdure-hook-{name[:40]}", daemon=True)
    thread.start()
    try:
        error = ended.get(timeout=within_s)
    except queue.Empty:
        late.set()
        leaks.add(thread)
        raise _Unfinished(f"it did not return within {within_s:g} s") from None
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise _Unfinished(f"it ended its thread with {type(error).__name__}") from error
