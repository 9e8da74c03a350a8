"""Which of an agent's tools are in a prompt, if not all of them fit.

The budget of tools is `PERDURE_MEMORY__BUDGET_TOOLS`, by default a share of the model's window. If it does not suffice,
or if there are more tools than providers accept, the first tools are sent, with `search_tools` and the tools that the
turn has found with it (`perdure.tools.search`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from perdure.agents import Agent
from perdure.models import endpoints, prices
from perdure.models.protocol import Message, ToolSchema, name_of
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.tools import search
from perdure.tools.sources import Toolset
from perdure.turns.prompt.parts import affordable

DEFAULT_WINDOW = 32_000
"""The tokens of a window that is not known."""

MOST_TOOLS = 127
"""Maximum tools of a prompt. OpenAI and Google accept 128; an agent's output may be one more (`models.output_tool`)."""

_SHARE = 4
"""Tools have the window divided by this number."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools of a prompt, the names of the tools that are left out, and the budget, in tokens."""

    sent: tuple[ToolSchema, ...]
    left_out: tuple[str, ...]
    budget: int


def budget(settings: Settings, tokens: int | None) -> int:
    """The tokens that an agent's tools may have in a prompt, if the model's window has `tokens` (`None`: unknown)."""
    given = settings.memory.budget_tools
    return given if given is not None else (tokens or DEFAULT_WINDOW) // _SHARE


def window(settings: Settings, agent: Agent) -> int | None:
    """The tokens of the window of the agent's model: the agent's own number, or what is known of the model."""
    return agent.window or prices.window(agent.asked_model(settings.model), settings)


def usable_window(runtime: Runtime, agent: Agent) -> int | None:
    """The tokens of the window of the agent's model, or less, if a prompt of less was too long for the model.

    Raises:
        Unavailable: the database cannot be reached.
    """
    settings = runtime.settings
    known = window(settings, agent)
    learned = runtime.windows.of(endpoints.canonical(name_of(agent.asked_model(settings.model)), settings))
    return min((each for each in (known, learned) if each is not None), default=None)


def offered(tools: Toolset, most: int, messages: Iterable[Message] = ()) -> Offered:
    """At most `MOST_TOOLS` tools that fit into `most` tokens. `messages` are the turn's own, whose searches count."""
    schemas = tools.schemas()
    sent = affordable(schemas[:MOST_TOOLS], most)
    finder = tools.search if len(sent) < len(schemas) else None
    if finder is not None and (room := most - finder.schema().tokens) > 0:
        found = affordable(search.found_in(messages, schemas)[: MOST_TOOLS - 1], room)
        others = [each for each in schemas if each not in found]
        first = affordable(others[: MOST_TOOLS - 1 - len(found)], room - sum(each.tokens for each in found))
        sent = (*first, finder.schema(), *found)
    names = {each.name for each in sent}
    return Offered(sent, tuple(each.name for each in schemas if each.name not in names), most)
