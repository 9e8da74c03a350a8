"""Guards: functions of an agent's author that judge the user's message, or the agent's reply, and return a verdict.

    def no_cards(text: str, turn: TurnContext) -> Verdict:
        return Replace(CARD.sub("[card]", text)) if CARD.search(text) else Allow()

    Agent("assistant", "You help.", input_guards=[no_cards], output_guards=[no_cards])

An input guard is a `before_turn` hook, and an output guard an `after_turn` hook, with a verdict in place of an
exception. Unlike a hook, a guard is required: if it raises, returns no verdict, or exceeds its time limit, the turn
fails with `GUARD_REJECTED`, and the log has the error. `guard(required=False)` lets the turn continue instead.

An input guard with `parallel=True` runs while the model is called for the first time. The model's answer is neither
shown nor committed, and none of its tools runs, before the guard allows the message. If the guard refuses, the call of
the model is cancelled.

The commit of the user's message records that the input guards let it pass. After a crash before this commit, they run
again; after it, they do not.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, overload

from perdure.errors import GuardRejected, PerdureError, loggable
from perdure.hooks import REFUSED, TurnContext, evaluate
from perdure.models.protocol import Usage
from perdure.text import declarations
from perdure.tools.leaks import Leaks

log = logging.getLogger(__name__)


class Verdict:
    """What a guard returns: an `Allow`, a `Refuse` or a `Replace`.

    Attributes:
        usage: What the guard used.

    Example:
        >>> def on_topic(text: str, turn: TurnContext) -> Verdict:
        ...     return Refuse("I only talk about tea.") if "lottery" in text else Allow()
        >>> assistant = Agent("assistant", "You sell tea.", input_guards=[on_topic])
        >>> ask(assistant, "Which lottery numbers?", model=Scripted()).reply
        'I only talk about tea.'
    """

    __slots__ = ()
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Allow(Verdict):
    """The text may pass. `usage` is what the guard used, if it called a model: it counts as the turn's.

    Example:
        >>> def polite(text: str, turn: TurnContext) -> Verdict:
        ...     return Allow(usage=Usage(90, 1))
        >>> assistant = Agent("assistant", "You help.", output_guards=[polite])
        >>> ask(assistant, "Hello.", model=Scripted("Hi.")).usage.input_tokens
        90
    """

    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Refuse(Verdict):
    """The turn fails with `GUARD_REJECTED` and `message`, which the user reads. `usage` as for `Allow`.

    Example:
        >>> def no_prices(text: str, turn: TurnContext) -> Verdict:
        ...     return Refuse("Please ask our staff.") if "euro" in text else Allow()
        >>> assistant = Agent("assistant", "You help.", output_guards=[no_prices])
        >>> answer = ask(assistant, "How much is it?", model=Scripted("3 euros."))
        >>> answer.error_code, answer.reply
        ('GUARD_REJECTED', 'Please ask our staff.')
    """

    message: str
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Replace(Verdict):
    """`text` replaces the text. A guard that runs in parallel cannot replace it. `usage` as for `Allow`.

    Example:
        >>> def no_names(text: str, turn: TurnContext) -> Verdict:
        ...     return Replace(text.replace("Ana", "the customer"))
        >>> assistant = Agent("assistant", "You help.", output_guards=[no_names])
        >>> ask(assistant, "Who called?", model=Scripted("Ana called.")).reply
        'the customer called.'
    """

    text: str
    usage: Usage | None = None


GuardFunction = Callable[[str, TurnContext[Any]], Verdict | Awaitable[Verdict]]
"""A function, `def` or `async def`, of the text and the turn."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A guard with options. Made by `guard`."""

    function: GuardFunction
    parallel: bool = False
    required: bool = True
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


Guards = Sequence[Guard | GuardFunction]


@overload
def guard(
    function: GuardFunction, *, parallel: bool = False, required: bool = True, timeout_s: float | None = None
) -> Guard: ...


@overload
def guard(
    function: None = None, *, parallel: bool = False, required: bool = True, timeout_s: float | None = None
) -> Callable[[GuardFunction], Guard]: ...


def guard(
    function: GuardFunction | None = None,
    *,
    parallel: bool = False,
    required: bool = True,
    timeout_s: float | None = None,
) -> Guard | Callable[[GuardFunction], Guard]:
    """A guard with options, from a function or as a decorator. A plain function is a guard, too.

    Args:
        function: The function. Without it, `guard` returns a decorator.
        parallel: Run the guard while the model is called. For input guards only.
        required: Whether the turn fails if the guard fails.
        timeout_s: The guard's time limit in seconds, within that of the turn. Defaults to
            `PERDURE_TURN__HOOK_TIMEOUT_S`.

    Raises:
        SettingsError: an argument is invalid.

    Example:
        >>> @guard(parallel=True, timeout_s=20)
        ... async def harmless(text: str, turn: TurnContext) -> Verdict:
        ...     return Refuse("No.") if "bomb" in text else Allow(usage=Usage(120, 1))
        >>> assistant = Agent("assistant", "You help.", input_guards=[harmless])
        >>> ask(assistant, "A bomb, please.", model=Scripted("Take some…")).reply
        'No.'
    """
    for argument, value in (("parallel", parallel), ("required", required)):
        declarations.require(isinstance(value, bool), "guard()", argument, value, "True or False")
    within = timeout_s is None or declarations.is_seconds(timeout_s)
    declarations.require(within, "guard()", "timeout_s", timeout_s, f"{declarations.SECONDS}, or None")

    def made(given: GuardFunction) -> Guard:
        declarations.require(
            _takes_two(given), "guard()", "function", given, "a function of the text and the turn (TurnContext)"
        )
        return Guard(given, parallel, required, timeout_s)

    return made if function is None else made(function)


def guards_of(given: object, agent: str, argument: str) -> tuple[Guard, ...]:
    """The declared guards of an agent.

    Raises:
        SettingsError: the declaration is invalid.
    """
    accepted = "a list of functions of the text and the turn, each plain or guard(…)"
    is_list = declarations.is_list(given)
    each_fits = is_list and all(isinstance(each, Guard) or _takes_two(each) for each in given)  # type: ignore[attr-defined]
    declarations.require(each_fits, agent, argument, given, accepted)
    return tuple(each if isinstance(each, Guard) else Guard(each) for each in given)  # type: ignore[attr-defined]


def judge(
    given: Guard, text: str, turn: TurnContext[Any], within_s: float, leaks: Leaks, *, stopping: Event | None = None
) -> Verdict:
    """The verdict of a guard on `text`. If `stopping` is set, the caller does not wait for it, and the turn must stop.

    Raises:
        PerdureError: the guard failed with this error, and is required, or `stopping` was set. Any other exception
            becomes `GuardRejected`.
    """
    work = partial(given.function, text, turn)
    try:
        return _verdict(given, evaluate(work, f"the guard {given.name}", within_s, leaks, stopping=stopping))
    except Exception as error:
        is_over = stopping is not None and stopping.is_set()  # then it did not fail, and nothing continues
        if not given.required and not is_over:
            log.exception("the guard %s failed; the turn continues", given.name)
            return Allow()
        log.warning("the guard %s failed: %s", given.name, loggable(error))
        if isinstance(error, PerdureError):
            raise
        raise GuardRejected(REFUSED) from error


def _verdict(given: Guard, made: object) -> Verdict:
    if not isinstance(made, Allow | Refuse | Replace):
        raise TypeError(f"it returned {declarations.shown(made)}; accepted: Allow(), Refuse(message) or Replace(text)")
    if not isinstance(made.usage, Usage | None):
        raise TypeError(f"the usage of its verdict is {declarations.shown(made.usage)}; accepted: a Usage, or None")
    given_text = made.message if isinstance(made, Refuse) else made.text if isinstance(made, Replace) else ""
    if not isinstance(given_text, str):
        raise TypeError(f"it returned {type(made).__name__}({declarations.shown(given_text)}); accepted: a text")
    if given.parallel and isinstance(made, Replace):
        raise TypeError("it runs in parallel, so it cannot replace the text")
    return made


def _takes_two(value: object) -> bool:
    if not callable(value) or inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        return False
    try:
        inspect.signature(value).bind(None, None)
    except ValueError:  # a builtin without a signature
        return True
    except TypeError:
        return False
    return True
