"""Finds agents whose replies may cost more than a budget reserves for them."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.assembly import load_agents
from perdure.cli.inspect.server_settings import Finding
from perdure.settings import Settings
from perdure.turns.budgets import OUTPUT_TOKENS


def findings(settings: Settings) -> Iterator[Finding]:
    """The agents of perdure without `max_tokens`, if a budget is set. What an adapted agent sets is not known."""
    if not settings.budget.limits:
        return
    for agent in load_agents(settings):
        if agent.is_own and "max_tokens" not in {**settings.model_settings, **agent.settings}:
            yield Finding(
                f"agent {agent.name!r}",
                "no max_tokens, but a budget is set",
                f"a reply of more than {OUTPUT_TOKENS:,} tokens costs more than is reserved for it",
                "Set max_tokens in the agent's settings, or in PERDURE_MODEL_SETTINGS.",
            )
