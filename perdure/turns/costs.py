"""What a turn cost: the sum over its replies, each with the prices of the model that wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from sqlalchemy import Row

from perdure.agents import Agent, Agents
from perdure.database.engine import Executor
from perdure.errors import SettingsError
from perdure.models.prices import cost
from perdure.models.protocol import ForeignModel, Usage, name_of
from perdure.settings import Settings
from perdure.turns import queries
from perdure.turns.transcript import Entry


def cost_of(executor: Executor, turn_id: UUID, settings: Settings, agents: Agents) -> Decimal | None:
    """The turn's cost so far in US dollars, with the models that are configured now.

    `None` if there is no reply, if a reply's usage was not reported, or if the prices of its model are unknown.
    """
    costs = [_cost_of_row(row, settings, agents) for row in executor.run(queries.USED, {"turn_id": turn_id})]
    known = [each for each in costs if each is not None]
    return sum(known, Decimal()) if known and len(known) == len(costs) else None


def spent(replies: Iterable[Entry], agent: Agent, settings: Settings) -> Decimal:
    """What the model's `replies` to the agent cost, in US dollars, as far as their usage and prices are known."""
    asked = agent.model or settings.model
    models = [(_fallback(each.model or "", settings) if each.fallback else asked, each) for each in replies]
    costs = [_cost(model, each.usage, each.created_at, settings) for model, each in models]
    return sum((each for each in costs if each is not None), Decimal())


def check_prices(agent: Agent, settings: Settings) -> None:
    """Check that a limit of the agent's cost can be kept.

    Raises:
        SettingsError: the prices of the agent's model are unknown.
    """
    model = agent.model or settings.model
    if agent.max_cost is not None and cost(model, Usage(1, 1), settings) is None:
        raise SettingsError(
            f"agent {agent.name!r} has max_cost={agent.max_cost}, but the prices of its model {name_of(model)!r} are "
            "unknown: give it max_tokens instead"
        )


def _cost_of_row(row: Row[object], settings: Settings, agents: Agents) -> Decimal | None:
    agent = agents.find(row.agent)
    asked = (agent and agent.model) or settings.model
    usage = None if row.usage is None else Usage.from_dict(row.usage)
    return _cost(_fallback(row.model, settings) if row.fallback else asked, usage, row.created_at, settings)


def _cost(
    model: str | ForeignModel | None, usage: Usage | None, at: datetime | None, settings: Settings
) -> Decimal | None:
    return None if model is None or usage is None else cost(model, usage, settings, at)


def _fallback(reported: str, settings: Settings) -> str | ForeignModel | None:
    """The fallback whose provider reported the model `reported`, such as `gpt-5-mini-2025-08-07`."""
    named = [each for each in settings.fallback_models if reported.startswith((each.partition(":")[2] or each, each))]
    return max(named, key=len, default=None)
