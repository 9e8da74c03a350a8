"""What turns cost: the sum over their replies, each with the prices of the model that wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey, tenant_of, user_of
from perdure.agents import Agent, Agents
from perdure.database.engine import Executor
from perdure.errors import SettingsError
from perdure.ids import first_id
from perdure.models.prices import cost
from perdure.models.protocol import ForeignModel, Usage, added, name_of
from perdure.settings import Settings
from perdure.text.zones import zone_in_sql
from perdure.turns import queries
from perdure.turns.transcript import Entry


def cost_of(executor: Executor, turn_id: UUID, settings: Settings, agents: Agents) -> Decimal | None:
    """The turn's cost so far in US dollars, with the models that are configured now.

    Includes that of other agents that answered its calls.

    `None` if there is no reply, if a reply's usage was not reported, or if the prices of its model are unknown.
    """
    rows = executor.run(queries.USED, {"turn_id": turn_id, "with_others": True})
    costs = [_cost_of_row(row, settings, agents) for row in rows]
    return _sum_of_known(costs) if costs and None not in costs else None


def spent(replies: Iterable[Entry], agent: Agent, settings: Settings) -> Decimal:
    """What the model's `replies` to the agent cost, in US dollars, as far as their usage and prices are known."""
    asked = agent.asked_model(settings.model)
    models = [(_writer(asked, each.model or "", settings, fallback=each.fallback), each) for each in replies]
    return _sum_of_known(_cost(model, each.usage, each.created_at, settings) for model, each in models)


def spent_in_all(
    executor: Executor, turn_id: UUID, settings: Settings, agents: Agents, *, with_others: bool
) -> Decimal:
    """What the turn's committed replies cost, as far as known; `with_others`: and those of agents that it asked."""
    rows = executor.run(queries.USED, {"turn_id": turn_id, "with_others": with_others})
    return _sum_of_known(_cost_of_row(row, settings, agents) for row in rows)


def limit_above(executor: Executor, turn_id: UUID, settings: Settings, agents: Agents) -> str | None:
    """The limit that a turn for which this one works has reached, with all that other agents used for it, if any."""
    for asking in executor.run(queries.ABOVE, {"turn_id": turn_id}):
        agent = agents.find(asking.agent)
        if agent is None or (agent.max_tokens is None and agent.max_cost is None):
            continue
        rows = executor.run(queries.USED, {"turn_id": asking.turn_id, "with_others": True})
        used = [Usage.from_dict(row.usage) for row in rows if row.usage is not None]
        tokens = sum(each.input_tokens + each.output_tokens for each in used)
        if agent.max_tokens is not None and tokens >= agent.max_tokens:
            return f"the {agent.max_tokens:,} tokens of {agent.name}"
        spent_so_far = _sum_of_known(_cost_of_row(row, settings, agents) for row in rows)
        if agent.max_cost is not None and spent_so_far >= Decimal(str(agent.max_cost)):
            return f"the {agent.max_cost} US dollars of {agent.name}"
    return None


BY = ("user", "tenant", "agent", "model", "day")
"""What `usage` can be added up by."""

PART = 10_000
"""How many turns one statement of `usage` reads."""

_LAST_ID = UUID(int=2**128 - 1)


@dataclass(slots=True)
class Used:
    """What the replies of a user, a tenant, an agent, a model or a day used.

    A count is `None` if none of the replies reports it. `cost` is in US dollars, without that of the `unpriced`
    replies: their usage was not reported, or the prices of their model are unknown.
    """

    replies: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    cost: Decimal = Decimal()
    unpriced: int = 0


def usage(
    executor: Executor, settings: Settings, agents: Agents, *, since: datetime, by: str
) -> dict[tuple[str | None, str | None], Used]:
    """What all turns used that were accepted since `since`, by user, tenant, agent, model or day: see `BY`.

    A key of the result is the value and its tenant, which only users and tenants have. Days are those of
    `PERDURE_TIMEZONE`. Prices are those of the models that are configured now. Reads each message of the time, in parts
    of `PART` turns: no statement takes long, or keeps PostgreSQL from removing dead rows.

    Raises:
        ValueError: `by` is none of `BY`.
    """
    if by not in BY:
        raise ValueError(f"usage is added up by one of {', '.join(BY)}, not by {by!r}")
    found: dict[tuple[str | None, str | None], Used] = {}
    given = {"by": by, "since": since, "zone": zone_in_sql(settings.timezone)}
    for row in _used_since(executor, since, given):
        used = found.setdefault(_key(row.key, by), Used())
        used.replies += row.replies
        used.input_tokens = added(used.input_tokens, row.input)
        used.cached_tokens = added(used.cached_tokens, row.cached)
        used.output_tokens = added(used.output_tokens, row.output)
        price = _cost_of_replies(row, settings, agents) if row.reported else None
        used.cost += price or Decimal()
        used.unpriced += row.replies if price is None else 0
    return found


def _used_since(executor: Executor, since: datetime, given: Mapping[str, Any]) -> Iterator[Row[Any]]:
    first, rest = first_id(since), True
    while rest:
        following = executor.run(queries.USAGE_PART, {"first_id": first, "most": PART})
        until, rest = (following[0].turn_id, True) if following else (_LAST_ID, False)
        yield from executor.run(queries.USAGE, {**given, "first_id": first, "until_id": until})
        first = until


def _key(key: str, by: str) -> tuple[str | None, str | None]:
    if by == "tenant":
        return None, tenant_of(UserKey(key))
    return (user_of(UserKey(key)), tenant_of(UserKey(key))) if by == "user" else (key, None)


def _cost_of_replies(row: Row[Any], settings: Settings, agents: Agents) -> Decimal | None:
    """What the replies of a row of USAGE cost. Their prompts have similar sizes, so the prices of the average hold."""
    at = datetime.combine(row.day, time(12), UTC)
    model, number = _model(row.agent, row.model, settings, agents, fallback=row.fallback), row.replies
    counts = [divmod(each or 0, number) for each in (row.input, row.output, row.cached)]
    average, rest = (_cost(model, Usage(*each), at, settings) for each in zip(*counts, strict=True))
    return None if average is None or rest is None else average * number + rest


def check_prices(agent: Agent, settings: Settings) -> None:
    """Check that the limit of the agent's cost and the budgets can be kept.

    Raises:
        SettingsError: the prices of the agent's model are unknown, or those of a model that may take its place.
    """
    model, limits = agent.asked_model(settings.model), settings.budget.limits
    is_known = (agent.max_cost is None and not limits) or cost(model, Usage(1, 1), settings) is not None
    if agent.max_cost is not None and not is_known:
        raise SettingsError(
            f"agent {agent.name!r} has max_cost={agent.max_cost}, but the prices of its model {name_of(model)!r} are "
            "unknown: give it max_tokens instead"
        )
    if not limits:
        return
    unknown = [] if is_known else [f"{name_of(model)!r}, the model of agent {agent.name!r},"]
    unknown += [
        f"{other!r} in {variable}"
        for other, variable in _substitutes(settings)
        if cost(other, Usage(1, 1), settings) is None
    ]
    if unknown:
        variable, limit = next(iter(limits.items()))
        raise SettingsError(
            f"{variable} is {limit}, but the prices of {unknown[0]} are unknown: choose a model whose prices are "
            f"known, or unset {variable}"
        )


def _substitutes(settings: Settings) -> list[tuple[str, str]]:
    """The models that may get a call instead of an agent's model, each with the setting that names it."""
    cheaper = settings.budget.cheaper_model
    found = [] if cheaper is None else [(cheaper, "PERDURE_BUDGET__ON_EXCEEDED")]
    return [*found, *((each, "PERDURE_FALLBACK_MODELS") for each in settings.fallback_models)]


def at_most(model: str | ForeignModel, prompt_tokens: int, output_tokens: int, settings: Settings) -> Decimal:
    """What one call of `model` may cost, in US dollars: that of the most expensive of it and its fallbacks."""
    used = Usage(prompt_tokens, output_tokens)
    costs = [cost(each, used, settings) for each in (model, *settings.fallback_models)]
    return max((each for each in costs if each is not None), default=Decimal())


def _sum_of_known(costs: Iterable[Decimal | None]) -> Decimal:
    return sum((each for each in costs if each is not None), Decimal())


def _cost_of_row(row: Row[Any], settings: Settings, agents: Agents) -> Decimal | None:
    reported = None if row.usage is None else Usage.from_dict(row.usage)
    model = _model(row.agent, row.model, settings, agents, fallback=row.fallback)
    return _cost(model, reported, row.created_at, settings)


def _model(
    name: str, reported: str | None, settings: Settings, agents: Agents, *, fallback: bool | None
) -> str | ForeignModel | None:
    """The model that wrote a reply of the agent `name`, and that its server calls `reported`."""
    agent = agents.find(name)
    asked = settings.model if agent is None else agent.asked_model(settings.model)
    return _writer(asked, reported or "", settings, fallback=fallback)


def _cost(
    model: str | ForeignModel | None, usage: Usage | None, at: datetime | None, settings: Settings
) -> Decimal | None:
    return None if model is None or usage is None else cost(model, usage, settings, at)


def _writer(
    asked: str | ForeignModel, reported: str, settings: Settings, *, fallback: bool | None
) -> str | ForeignModel | None:
    """The model that wrote a reply of an agent that asks `asked`. The model's server calls it `reported`."""
    if fallback:
        only = settings.fallback_models[0] if len(settings.fallback_models) == 1 else None
        return _named(reported, settings.fallback_models) or only
    cheaper = settings.budget.cheaper_model
    if cheaper is None:
        return asked
    return cheaper if _named(reported, (name_of(asked), cheaper)) == cheaper else asked


def _named(reported: str, models: Iterable[str]) -> str | None:
    """The one of `models` whose provider reported the model `reported`, such as `gpt-5-mini-2025-08-07`."""
    named = [each for each in models if reported.startswith((each.partition(":")[2] or each, each))]
    return max(named, key=len, default=None)
