"""Hooks: an author's functions, `def` or `async def`, that run before and after turns and tool calls.

    def blocklist(turn: TurnStarted) -> None:
        if "forbidden" in turn.text:
            raise GuardRejected("I do not talk about that.")

    Agent("assistant", "You help.", before_turn=[required(blocklist), count_it])

A failed hook is logged and stops nothing, unless it is `required`: then the turn fails with its error (or
`GUARD_REJECTED`), or the tool does not run or its result is withheld, and the model gets the error.
A hook that exceeds `PERDURE_TURN__HOOK_TIMEOUT_S` has failed: a coroutine is cancelled; a thread cannot be ended, and
counts as leaked.

`before_turn` is called once per turn, also if the turn is parked: its call is committed with the user's message.
After a crash any hook may be called again for the same turn or call, with the same ids.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar
from uuid import UUID

from perdure.errors import GuardRejected, PerdureError, loggable
from perdure.tools import event_loop
from perdure.tools.leaks import Leaks

log = logging.getLogger(__name__)

Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A turn before its first model call. `text` is the user's message, `tenant` the user's."""

    user_id: str
    session_id: UUID
    turn_id: UUID
    agent: str
    channel: str
    text: str
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class TurnEnding:
    """A turn before it is settled: `status` is `done`, `failed` or `cancelled`, `reply` its reply, if any."""

    turn: TurnStarted
    status: str
    reply: str | None


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """A tool call before it runs: `arguments` by name; `effect_id` is the same for every attempt.

    `tenant` is the user's.
    """

    user_id: str
    session_id: UUID
    turn_id: UUID
    effect_id: UUID
    tool: str
    arguments: Mapping[str, Any]
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """A tool call with the result that the model will get."""

    call: ToolCalling
    result: str


@dataclass(frozen=True, slots=True)
class Required(Generic[Seen]):
    """A hook whose failure stops the turn or the tool call."""

    function: Callable[[Seen], object]


Hook = Callable[[Seen], object] | Required[Seen]
Hooks = Sequence[Hook[Seen]]


def required(function: Callable[[Seen], object]) -> Required[Seen]:
    """The hook `function`, whose failure stops the turn or the tool call."""
    return Required(function)


class _Unfinished(Exception):
    """A hook exceeded its time limit, or ended its thread instead of returning."""


def call_hooks(hooks: Hooks[Seen], seen: Seen, within_s: float, leaks: Leaks) -> None:
    """Call each hook in order, for at most `within_s` seconds each.

    Raises:
        PerdureError: a required hook failed, with its own error or as `GuardRejected`.
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
    """Call one hook in a thread of its own, in the caller's context.

    Raises:
        Exception: the hook's own.
        _Unfinished: it exceeded its time limit.
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
