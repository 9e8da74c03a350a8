"""What a turn cost: the sum over its replies, each with the prices of the model that wrote it."""

from __future__ import annotations

from decimal import Decimal
from uuid import UUID

from sqlalchemy import Row

from perdure.agents import Agents
from perdure.database.engine import Executor
from perdure.models.prices import cost
from perdure.models.protocol import ForeignModel, Usage
from perdure.settings import Settings
from perdure.turns import queries


def cost_of(executor: Executor, turn_id: UUID, settings: Settings, agents: Agents) -> Decimal | None:
    """The turn's cost so far in US dollars, with the models that are configured now.

    `None` if there is no reply, if a reply's usage was not reported, or if the prices of its model are unknown.
    """
    costs = [_cost(row, settings, agents) for row in executor.run(queries.USED, {"turn_id": turn_id})]
    known = [each for each in costs if each is not None]
    return sum(known, Decimal()) if known and len(known) == len(costs) else None


def _cost(row: Row[object], settings: Settings, agents: Agents) -> Decimal | None:
    agent = agents.find(row.agent)
    asked = (agent and agent.model) or settings.model
    model = _fallback(row.model, settings) if row.fallback else asked
    if model is None or row.usage is None:
        return None
    return cost(model, Usage.from_dict(row.usage), settings, row.created_at)


def _fallback(reported: str, settings: Settings) -> str | ForeignModel | None:
    """The fallback whose provider reported the model `reported`, such as `gpt-5-mini-2025-08-07`."""
    named = [each for each in settings.fallback_models if reported.startswith((each.partition(":")[2] or each, each))]
    return max(named, key=len, default=None)
