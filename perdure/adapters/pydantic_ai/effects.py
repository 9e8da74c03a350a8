"""What a tool of pydantic-ai declares in its metadata: its effect class, its probe and who approves its calls."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import UUID, uuid5

from perdure.errors import SettingsError
from perdure.models.protocol import ToolSchema
from perdure.text import declarations
from perdure.text.untrusted import load_object
from perdure.tools.registry import (
    MAX_RESULT_CHARS,
    USER,
    Approver,
    Effect,
    EffectName,
    Probe,
    ToolContext,
    require_approval,
    require_effect,
    require_probe,
    who_approves,
)

KEY = "perdure"
"""The member of a tool's metadata that `effect` makes."""


class RunningCall:
    """A tool call that runs. Agents that its tool runs make calls within it."""

    def __init__(self, effect_id: UUID) -> None:
        self.effect_id = effect_id
        self._counts: dict[str, count[int]] = {}

    def inner(self, asked: str) -> RunningCall:
        """The next call within this one that asks for `asked`."""
        number = next(self._counts.setdefault(asked, count()))
        return RunningCall(uuid5(self.effect_id, f"{number} {asked}"))


running: ContextVar[RunningCall | None] = ContextVar("perdure_running_call", default=None)


def effect_id() -> UUID:
    """The id of the tool call that runs. A repeated call has the same id, so it serves as an idempotency key.

    In a tool of an agent that a tool runs, the call has an id of its own: the same when the outer call is repeated and
    the inner agent asks for the same calls again.

    Raises:
        LookupError: no tool call of an adapted agent runs.

    Example:
        >>> from pydantic_ai import Agent as PydanticAgent
        >>> shop = PydanticAgent(name="shop")
        >>> @shop.tool_plain(metadata=effect("idempotent"))
        ... def order(item: str) -> str:
        ...     '''Order an item.'''
        ...     return f"{item}, {len(str(effect_id()))} characters of key"
        >>> ask(shop, "Tea!", model=Scripted(call("order", item="tea"), "Ordered.")).calls[0].result
        'tea, 36 characters of key'
    """
    found = running.get()
    if found is None:
        raise LookupError("effect_id() is called outside a tool of an agent that perdure runs")
    return found.effect_id


def effect(kind: Effect | EffectName, *, probe: Probe | None = None, approver: Approver = USER) -> dict[str, Any]:
    """The metadata of a pydantic-ai tool: what perdure may do if the outcome of a call is unknown.

    `kind` is `pure`, `idempotent` or `unsafe`, which a tool without this metadata is. `probe` finds out whether a call
    took effect. `approver` says who approves calls of a tool with `requires_approval=True`.

    Raises:
        SettingsError: an argument is invalid.

    Example:
        >>> from pydantic_ai import Agent as PydanticAgent
        >>> greeter = PydanticAgent("test", name="greeter")
        >>> @greeter.tool_plain(metadata=effect("pure"))
        ... def weather(city: str) -> str:
        ...     '''Say what the weather is like.'''
        ...     return f"Rain in {city}."
    """
    found = {"effect": str(kind), "probe": probe, "approver": approver}
    _declared("effect()", found)
    return {KEY: found}


@dataclass(frozen=True, slots=True)
class AdaptedTool:
    """A tool of pydantic-ai, as far as the ledger and approvals need it; see `RunnableTool`."""

    name: str
    effect: Effect = Effect.UNSAFE
    probe: Probe | None = None
    approver: Approver = USER
    timeout_s: float | None = None
    breaker: str | None = None
    waits_for: str | None = None
    max_result_chars: int = MAX_RESULT_CHARS

    @classmethod
    def of(cls, name: str, metadata: Mapping[str, Any] | None, timeout_s: float | None = None) -> AdaptedTool:
        """The tool with what its metadata declares.

        Raises:
            SettingsError: the declaration is invalid.
        """
        kind, probe, approver = _declared(f"the tool {name!r}", (metadata or {}).get(KEY) or {})
        return cls(name, kind, probe, approver, timeout_s)

    def schema(self) -> ToolSchema:
        return ToolSchema(self.name, "", {})

    def parse(self, arguments: str) -> dict[str, Any]:
        """The arguments by name. pydantic-ai checks them against the tool's signature when it runs the call."""
        return load_object(arguments)

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:  # noqa: ARG002 (pydantic-ai decides)
        return False

    def approver_of(self, arguments: Mapping[str, Any]) -> str:
        return who_approves(self.name, self.approver, arguments)

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """Refuse: pydantic-ai runs the tool."""
        raise NotImplementedError(f"pydantic-ai runs the tool {self.name}")


def _declared(what: str, given: object) -> tuple[Effect, Probe | None, Approver]:
    if not isinstance(given, Mapping):
        raise SettingsError(f"{what} has metadata {KEY!r}={declarations.shown(given)}; accepted: perdure.effect(…)")
    kind, probe, approver = given.get("effect", Effect.UNSAFE), given.get("probe"), given.get("approver", USER)
    require_effect(what, kind)
    require_probe(what, probe)
    require_approval(what, True, approver)  # noqa: FBT003 (whether a call needs it is pydantic-ai's to say)
    return Effect(kind), probe, approver
