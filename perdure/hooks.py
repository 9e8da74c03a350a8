"""Hooks: functions of an agent's author (`def` or `async def`) that run before and after turns and tool calls.

    def blocklist(turn: TurnStarted) -> None:
        if "forbidden" in turn.text:
            raise GuardRejected("I do not talk about that.")

    Agent("assistant", "You help.", before_turn=[required(blocklist), count_it])

A hook may change what it sees: it returns the event's `replace(…)`. The next hook sees the change.

    def mask_cards(turn: TurnStarted) -> TurnStarted:
        return turn.replace(text=CARD.sub("[card]", turn.text))

A hook that returns `None` changes nothing. Any other value is a failure of the hook.

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
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast
from uuid import UUID

from perdure.errors import GuardRejected, PerdureError, loggable
from perdure.text import declarations
from perdure.text.untrusted import storable
from perdure.tools import event_loop
from perdure.tools.leaks import Leaks
from perdure.tools.registry import Deps

log = logging.getLogger(__name__)

_POLL_S = 0.1
"""Seconds between two checks whether the caller still waits for a function."""

Seen = TypeVar("Seen")

Returned: TypeAlias = Seen | Awaitable[Seen | None] | None
"""What a hook returns: a changed event, or `None`."""


@dataclass(frozen=True, slots=True)
class TurnContext(Generic[Deps]):
    """A turn, for functions of the agent's author: `instructions`, `deps` and the hooks.

    `text` is the user's message, `metadata` the message's metadata, and `tenant` the user's tenant. `now` is the time
    at which the turn began, in the user's time zone `timezone`, such as `Europe/Paris`. `deps` is what the agent's
    function `deps` made; it is `None` in this function itself.

    Example:
        >>> def instructions(turn: TurnContext) -> str:
        ...     return f"You help {turn.user_id}. It is {turn.now:%A}."
        >>> model = Scripted("Hi.")
        >>> answer = ask(Agent("assistant", instructions), "Hello.", model=model, user_id="ana")
        >>> model.requests[0].messages[0].content.startswith("You help ana. It is ")
        True
    """

    user_id: str
    session_id: UUID
    turn_id: UUID
    agent: str
    channel: str
    text: str
    tenant: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.now(UTC), compare=False)
    timezone: str = "UTC"
    deps: Deps = field(default=cast("Deps", None), compare=False)

    def replace(self, *, text: str) -> TurnContext[Deps]:
        """The turn with another text of the user, for a `before_turn` hook to return.

        The model, the transcript, memory and later hooks get this text only.
        """
        return dataclasses.replace(self, text=_text("text", text))


TurnStarted = TurnContext
"""A turn before its first model call, for `before_turn` hooks.

Example:
    >>> def mask(turn: TurnStarted) -> TurnStarted:
    ...     return turn.replace(text=turn.text.replace("4111 1111 1111 1111", "[card]"))
    >>> assistant = Agent("assistant", "You help.", before_turn=[required(mask)])
    >>> model = Scripted("Never send a card number.")
    >>> answer = ask(assistant, "My card is 4111 1111 1111 1111.", model=model)
    >>> model.requests[0].messages[-1].content
    'My card is [card].'
"""


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

    def replace(self, *, reply: str) -> TurnEnding:
        """The turn with another reply, for an `after_turn` hook to return. Of an `output`, `reply` is the JSON.

        Raises:
            ValueError: the turn is not `done`, or `reply` is empty.
        """
        if self.status != "done":
            raise ValueError(f"the turn is {self.status}: only the reply of a turn that is done can be replaced")
        text = _text("reply", reply)
        if not text.strip():
            raise ValueError("a reply cannot be replaced with an empty text")
        return dataclasses.replace(self, reply=text)


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

    def replace(self, *, arguments: Mapping[str, Any]) -> ToolCalling:
        """The call with other arguments, for a `before_tool` hook to return. They must fit the tool's schema.

        They are recorded as the call's arguments before the tool runs. The model is not told.
        """
        if not isinstance(arguments, Mapping):
            raise TypeError(f"replace(arguments=…) takes a mapping, not {declarations.shown(arguments)}")
        return dataclasses.replace(self, arguments=arguments)


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

    def replace(self, *, result: str) -> ToolCalled:
        """The call with another result for the model, for an `after_tool` hook to return."""
        return dataclasses.replace(self, result=_text("result", result))


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

    function: Callable[[Seen], Returned[Seen]]


Hook = Callable[[Seen], Returned[Seen]] | Required[Seen]
Hooks = Sequence[Hook[Seen]]


def required(function: Callable[[Seen], Returned[Seen]]) -> Required[Seen]:
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


REFUSED = "A guard of this installation refused this."
"""What the user reads if a hook or a guard failed with an error of its own."""


class _Unfinished(Exception):
    """A function exceeded its time limit, or raised an exception that ends its thread, such as `SystemExit`."""


def call_hooks(hooks: Hooks[Seen], seen: Seen, within_s: float, leaks: Leaks) -> Seen:
    """Call each hook in order, for at most `within_s` seconds each; returns `seen` with the changes of the hooks.

    Raises:
        PerdureError: a required hook raised this error. Any other exception of a required hook becomes `GuardRejected`.
    """
    for hook in hooks:
        function = hook.function if isinstance(hook, Required) else hook
        name = getattr(function, "__qualname__", repr(function))
        try:
            made = evaluate(partial(function, seen), f"the hook {name}", within_s, leaks)
            seen = seen if made is None else _event(made, seen, name)
        except Exception as error:
            if not isinstance(hook, Required):
                log.exception("the hook %s failed; the turn continues", name)
                continue
            log.warning("the required hook %s failed: %s", name, loggable(error))
            if isinstance(error, PerdureError):
                raise
            raise GuardRejected(REFUSED) from error
    return seen


def _event(made: object, seen: Seen, name: str) -> Seen:
    if not isinstance(made, type(seen)):
        raise TypeError(
            f"the hook {name} returned {declarations.shown(made)}; accepted: what its event's replace(…) returns, or "
            "None"
        )
    return made


def _text(argument: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"replace({argument}=…) takes text, not {declarations.shown(value)}")
    return storable(value)


def evaluate(
    work: Callable[[], Any], what: str, within_s: float, leaks: Leaks, *, stopping: threading.Event | None = None
) -> Any:
    """Call a function of the agent's author, `def` or `async def`, in a new thread; returns its value.

    The thread has a copy of the caller's context variables. `what` names the function in the log. If `stopping` is set
    before the function returns, the caller does not wait for it any longer.

    Raises:
        Exception: raised by the function.
        _Unfinished: the function exceeded its time limit or `stopping` was set, or it raised an exception such as
            `SystemExit`.
    """
    ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    context, late = contextvars.copy_context(), threading.Event()

    def run() -> None:
        try:
            value = context.run(event_loop.call, what, work, late.is_set)
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            ended.put((None, error))
        else:
            ended.put((value, None))

    thread = threading.Thread(
        target=run, name=f"perdure-{what.removeprefix('the ')[:40]}".replace(" ", "-"), daemon=True
    )
    thread.start()
    try:
        value, error = _taken(ended, within_s, stopping)
    except queue.Empty:
        late.set()
        leaks.add(thread)
        raise _Unfinished(f"{what} did not return within {within_s:g} s") from None
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise _Unfinished(f"{what} ended its thread with {type(error).__name__}") from error
    return value


def _taken(ended: queue.SimpleQueue[Any], within_s: float, stopping: threading.Event | None) -> Any:
    """The next item. Raises `queue.Empty` after `within_s` seconds, or when `stopping` is set."""
    if stopping is None:
        return ended.get(timeout=within_s)
    until = time.monotonic() + within_s
    while True:
        left_s = until - time.monotonic()
        try:
            return ended.get(timeout=max(0.0, min(left_s, _POLL_S)))
        except queue.Empty:
            if left_s <= _POLL_S or stopping.is_set():
                raise
