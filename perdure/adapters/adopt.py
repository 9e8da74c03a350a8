"""Finds the agents of other libraries among the values of a module, without importing the libraries."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from perdure.agents import Agent
from perdure.errors import SettingsError
from perdure.text import declarations


def adopt(agent: object, model: object = None) -> Agent:
    """`agent` as an agent of perdure, with another model if it is adapted and `model` is not `None`.

    Raises:
        SettingsError: it is no agent, or an agent of pydantic-ai that cannot be durable.
    """
    if "pydantic_ai" in sys.modules:
        from pydantic_ai import Agent as Bare  # noqa: PLC0415 (it is imported already)

        from perdure.adapters.pydantic_ai.adapt import AdaptedAgent, adapt  # noqa: PLC0415 (the same)

        if isinstance(agent, Bare):
            agent = adapt(agent, name=agent.name or "agent")
        if isinstance(agent, AdaptedAgent):
            return agent if model is None else agent.with_model(model)
    if not isinstance(agent, Agent):
        raise SettingsError(f"{declarations.shown(agent)} is no agent of perdure or of pydantic-ai")
    return agent


def collect(values: Mapping[str, object]) -> list[Agent]:
    """The agents among a module's variables: perdure's own, and those of pydantic-ai under their own names.

    An agent of pydantic-ai without a name is named like its variable. A variable whose name begins with an underscore
    is skipped unless it holds an agent of perdure, and so is an agent that the module also passes to `perdure.adapt`.

    Raises:
        SettingsError: an agent of pydantic-ai cannot be durable.
    """
    own = [value for value in values.values() if isinstance(value, Agent)]
    if "pydantic_ai" not in sys.modules:
        return own
    from pydantic_ai import Agent as Bare  # noqa: PLC0415 (the module has imported it)

    from perdure.adapters.pydantic_ai.adapt import AdaptedAgent, adapt  # noqa: PLC0415 (the same)

    known = {id(each.wrapped) for each in own if isinstance(each, AdaptedAgent)}
    found: list[Agent] = []
    for name, value in values.items():
        if isinstance(value, Agent):
            found.append(value)
        elif isinstance(value, Bare) and not name.startswith("_") and id(value) not in known:
            known.add(id(value))
            found.append(adapt(value, name=value.name or name))
    return found
