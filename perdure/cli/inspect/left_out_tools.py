"""Finds the agents whose tools do not fit their prompts. Connects to the agents' MCP servers."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.assembly import load_agents
from perdure.cli.inspect.server_settings import Finding
from perdure.clock import SystemClock
from perdure.resilience.registry import Breakers
from perdure.settings import Settings
from perdure.tools.mcp.connections import Connections
from perdure.turns.prompt.tools import MOST_TOOLS, budget, offered, window


def findings(settings: Settings) -> Iterator[Finding]:
    """One finding for each agent that has more tools than fit.

    Raises:
        SettingsError: the agents cannot be loaded, or the settings do not allow the command of an MCP server.
    """
    clock = SystemClock()
    connections = Connections(settings, Breakers(settings.breaker, clock), clock)
    try:
        for agent in load_agents(settings):
            tools = agent.toolset(connections)
            most = budget(settings, window(settings, agent))
            prompt = offered(tools, most)
            if prompt.left_out:
                found = "a model finds them only with search_tools"
                without = "a model does not have them: not even search_tools fits"
                yield Finding(
                    f"agent {agent.name}",
                    f"{len(prompt.left_out)} of {len(tools.names)} tools do not fit {most} tokens",
                    f"{found if (finder := tools.search) and finder.schema() in prompt.sent else without}: "
                    + ", ".join(prompt.left_out),
                    "Set PERDURE_MODEL_WINDOW to the model's window or raise PERDURE_MEMORY__BUDGET_TOOLS, "
                    f"give the agent fewer tools, at most {MOST_TOOLS}, or list the most important ones first.",
                )
    finally:
        connections.close()
