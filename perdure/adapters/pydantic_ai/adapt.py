"""`adapt`: an agent of pydantic-ai as an agent of perdure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Self

from pydantic_ai import Agent as Bare
from pydantic_ai import capabilities
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.durable_exec import BaseDurabilityCapability
from pydantic_ai.exceptions import UserError
from pydantic_ai.models import Model
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import UsageLimits

from perdure.adapters.pydantic_ai import inner_calls
from perdure.adapters.pydantic_ai.declared import tools_of
from perdure.adapters.pydantic_ai.effects import AdaptedTool
from perdure.adapters.pydantic_ai.own_model import OwnModel
from perdure.adapters.pydantic_ai.turn import AdaptedTurn
from perdure.adapters.pydantic_ai.units import OWN_MODEL, Durability
from perdure.agents import Agent, ErrorMessages
from perdure.casebank import COMMON
from perdure.errors import SettingsError
from perdure.guards import Guards
from perdure.hooks import ApprovalWaiting, Hooks, ToolCalled, ToolCalling, TurnContext, TurnEnding, TurnStarted
from perdure.models.protocol import Model as Own
from perdure.runtime import Runtime
from perdure.settings import OnUnavailable
from perdure.text import declarations
from perdure.tools.variables import VariableSet
from perdure.turns.lease.tenure import Tenure
from perdure.turns.transcript import Transcript

_REQUEST_INPUT: Any = getattr(capabilities, "RequestInput", ())
"""pydantic-ai 2.64 has no such capability."""

Deps = Callable[[TurnContext[Any]], Any]
"""Makes the dependencies of a run: a function, `def` or `async def`, of the turn."""


@dataclass(frozen=True)
class AdaptedAgent(Agent):
    """An agent of pydantic-ai. Made by `adapt`."""

    is_own: ClassVar[bool] = False
    wrapped: Bare[Any, Any] = field(kw_only=True)
    memory: bool = field(default=True, kw_only=True)
    usage_limits: UsageLimits | None = field(default=None, kw_only=True)
    replaced_model: Model | Own | None = field(default=None, kw_only=True)
    """Replaces the agent's model, for a test."""

    @property
    def origin(self) -> object:
        """The agent of pydantic-ai."""
        return self.wrapped

    def begin_turn(
        self, runtime: Runtime, tenure: Tenure, transcript: Transcript, variables: VariableSet
    ) -> AdaptedTurn:
        """The steps of the turn at hand; called by the loop."""
        return AdaptedTurn(runtime, tenure, self, transcript, variables)

    def with_model(self, model: Any) -> Self:
        """The agent with another model, of pydantic-ai or of perdure."""
        return replace(self, replaced_model=model)

    def find_tool(self, name: str) -> Any:
        """What approvals know of the tool `name`; `None` if only a run of the agent shows what the tool declares."""
        for toolset in self.wrapped.toolsets:
            for declared, metadata in tools_of(toolset):
                if declared == name:
                    return AdaptedTool.of(name, metadata)
        return None

    def _declared_tools(self) -> list[Any]:
        return sorted(name for each in self.wrapped.toolsets for name, _ in tools_of(each))

    def asked_model(self, default: str) -> Any:
        return self.model or self.own_model or default

    @property
    def own_model(self) -> Any:
        """The model of the agent itself, which is the first one of its `ModelFallback` if it has no other."""
        if self.wrapped.model is not None:
            return self.wrapped.model
        found = self.wrapped.root_capability.get_model()
        return found if isinstance(found, Model | str) else None

    def model_in(self, runtime: Runtime) -> Model | str:
        """The model of a run: the agent's own, or a model of perdure if it has none.

        Raises:
            PerdureError, SettingsError: the model of perdure cannot be used.
        """
        given = self.replaced_model
        if isinstance(given, Model):
            return given
        if given is not None:
            return OwnModel.of(given, runtime)
        if self.model is None and self.own_model is not None:
            found: Model | str = self.own_model
            return found
        return OwnModel.of(runtime.models(self.model or runtime.settings.model), runtime)

    def given_model(self, model: Model | str) -> Model | None:
        """The argument `model` of a run."""
        return model if isinstance(model, Model) and model is not self.wrapped.model else None

    def durability(self, given: Model | None) -> Durability:
        """The capability of a run with the model `given`, or with the agent's own if it is `None`."""
        return self._durability.with_model(given)

    @cached_property
    def _durability(self) -> Durability:
        return _bound(self)


def adapt(
    agent: Bare[Any, Any],
    *,
    name: str | None = None,
    deps: Deps | None = None,
    memory: bool = True,
    model: str | None = None,
    usage_limits: UsageLimits | None = None,
    max_steps: int | None = None,
    timeout_s: float | None = None,
    max_tokens: int | None = None,
    max_cost: float | Decimal | None = None,
    window: int | None = None,
    keep_turns: int | None = None,
    on_unavailable: OnUnavailable | str | None = None,
    error_messages: ErrorMessages | None = None,
    casebank: str | Literal[False] | None = COMMON,
    before_turn: Hooks[TurnStarted] = (),
    after_turn: Hooks[TurnEnding] = (),
    before_tool: Hooks[ToolCalling] = (),
    after_tool: Hooks[ToolCalled] = (),
    on_approval_waiting: Hooks[ApprovalWaiting] = (),
    input_guards: Guards = (),
    output_guards: Guards = (),
) -> AdaptedAgent:
    """An agent of pydantic-ai as an agent of perdure, for the module of `PERDURE_AGENTS`. The agent is not changed.

    Args:
        agent: The agent. A module may also hold it bare.
        name: Defaults to the agent's own name.
        deps: Makes the dependencies of each run, from the turn; required if the agent has a `deps_type`.
        memory: Whether what perdure remembers of the user is added to the agent's instructions.
        model: The name of a model of perdure. Defaults to the agent's own model, to the first
            one of its `ModelFallback`, or to `PERDURE_MODEL`.
        usage_limits: The limits of a run, as pydantic-ai's `run` takes them.
        max_steps: As for `Agent`.
        timeout_s: As for `Agent`.
        max_tokens: As for `Agent`.
        max_cost: As for `Agent`.
        window: As for `Agent`.
        keep_turns: As for `Agent`.
        on_unavailable: As for `Agent`.
        error_messages: As for `Agent`.
        casebank: As for `Agent`.
        before_turn: As for `Agent`.
        after_turn: As for `Agent`.
        before_tool: As for `Agent`.
        after_tool: As for `Agent`. A hook receives the text of the result.
        on_approval_waiting: As for `Agent`.
        input_guards: As for `Agent`.
        output_guards: As for `Agent`. A guard receives an output that is no text as JSON.

    Raises:
        SettingsError: the agent cannot be durable, or an argument is invalid; the message gives the reason.

    Example:
        >>> from pydantic_ai import Agent as PydanticAgent
        >>> greeter = adapt(PydanticAgent(name="greeter", instructions="You greet people."))
        >>> ask(greeter, "Hello.", model=Scripted("Hi.")).reply
        'Hi.'
    """
    if not isinstance(agent, Bare):
        raise SettingsError(f"adapt() is given {declarations.shown(agent)}; accepted: an Agent of pydantic-ai")
    chosen = name or agent.name
    if not chosen:
        raise SettingsError("adapt() is given an agent without a name: pass name=… to it or to adapt()")
    _check_deps(chosen, agent, deps)
    owner = f"agent {chosen!r}"
    declarations.require(isinstance(memory, bool), owner, "memory", memory, "True or False")
    has_limits = usage_limits is None or isinstance(usage_limits, UsageLimits)
    declarations.require(has_limits, owner, "usage_limits", usage_limits, "UsageLimits(…) of pydantic-ai, or None")
    made = AdaptedAgent(
        chosen,
        "",
        model=model,
        max_steps=max_steps,
        timeout_s=timeout_s,
        max_tokens=max_tokens,
        max_cost=max_cost,
        window=window,
        keep_turns=keep_turns,
        on_unavailable=on_unavailable,
        error_messages=error_messages,
        casebank=casebank,
        before_turn=before_turn,
        after_turn=after_turn,
        before_tool=before_tool,
        after_tool=after_tool,
        on_approval_waiting=on_approval_waiting,
        input_guards=input_guards,
        output_guards=output_guards,
        wrapped=agent,
        deps=deps,
        memory=memory,
        usage_limits=usage_limits,
    )
    _check_durable(made)
    inner_calls.install()
    return made


def _check_deps(name: str, agent: Bare[Any, Any], deps: object) -> None:
    wanted = agent.deps_type
    if deps is None and wanted not in {object, type(None)}:
        raise SettingsError(
            f"agent {name!r} needs dependencies ({declarations.shown(wanted)}): "
            "put perdure.adapt(agent, deps=function of the turn) into the module"
        )
    if deps is not None and not (declarations.takes_one(deps) or inspect.iscoroutinefunction(deps)):
        raise SettingsError(
            f"agent {name!r} has deps={declarations.shown(deps)}; accepted: a function with one parameter, or None"
        )


def _check_durable(made: AdaptedAgent) -> None:
    agent = made.wrapped
    try:
        engine = BaseDurabilityCapability.from_agent(agent)
        bound = _bound(made)
    except UserError as error:
        raise SettingsError(f"agent {made.name!r} cannot be durable: {error}") from error
    if engine is not None:
        other = type(engine).__name__
        raise SettingsError(f"agent {made.name!r} has {other}, but perdure makes it durable: remove {other}")
    if bound.has_units_of_capabilities:
        raise SettingsError(
            f"agent {made.name!r} has a capability with durable operations of its own, or a workspace: "
            "perdure records model requests and tool calls only"
        )
    if made.model is None and made.own_model is None and agent.root_capability.get_model() is not None:
        raise SettingsError(
            f"agent {made.name!r} has a capability that selects a model, such as SelectModel, but no model for it to "
            "replace: pass model=… to the Agent"
        )
    agent.root_capability.apply(partial(_check_waits, made.name))
    for toolset in agent.toolsets:
        for name, metadata in tools_of(toolset):
            AdaptedTool.of(name, metadata)


def _check_waits(name: str, capability: AbstractCapability[Any]) -> None:
    if isinstance(capability, _REQUEST_INPUT):
        raise SettingsError(
            f"agent {name!r} has RequestInput, which waits within the process: remove it. perdure itself waits for the "
            "approvals and the results of deferred calls, and takes them with POST /v1/turns/{id}/approval and "
            "perdure.answer"
        )


def _bound(made: AdaptedAgent) -> Durability:
    """The capability, bound to the agent: scans its capabilities and toolsets."""
    agent = made.wrapped
    own = {OWN_MODEL: TestModel()} if agent.model is None or made.model is not None else None
    return Durability(made.name, own)._bind_for_agent(agent)  # noqa: SLF001 (as pydantic-ai does for a run)
