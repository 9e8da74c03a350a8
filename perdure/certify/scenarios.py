"""The scenarios of a module: those of its `Certification`, and one for each further tool of its agents."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field

from perdure import host
from perdure.agents import Agent, Agents
from perdure.certify.arguments import NotDerived, arguments_of
from perdure.certify.certification import Certification, Scenario
from perdure.errors import SettingsError, ToolError
from perdure.models.protocol import ToolCall
from perdure.tools.registry import Tool

Key = tuple[str, str]
"""An agent's name and a tool's name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is certified: each scenario with its agent, the tools that it has, and why tools are left out."""

    agents: Agents
    scenarios: list[tuple[Agent, Scenario]] = field(default_factory=list)
    tools: dict[Key, Tool] = field(default_factory=dict)
    left_out: dict[Key, str] = field(default_factory=dict)


def load(module: str) -> tuple[Agents, Certification]:
    """The agents of a module and its `Certification`; an empty one, if the module has none.

    Raises:
        SettingsError: the module cannot be imported, has no agent, or has several certifications.
    """
    try:
        agents = host.load_agents(module)
    except SettingsError as error:
        raise SettingsError(str(error).replace("PERDURE_AGENTS is ", "the module is ", 1)) from error
    found = {id(each): each for each in vars(sys.modules[module]).values() if isinstance(each, Certification)}
    if len(found) > 1:
        raise SettingsError(f"the module {module} has {len(found)} certifications; accepted: one")
    return agents, next(iter(found.values()), Certification())


def plan(agents: Agents, certification: Certification, only: Collection[str] = ()) -> Plan:
    """What to certify; `only` names tools to which it is restricted.

    Raises:
        SettingsError: a scenario names an agent or a tool that the module lacks, or `only` names an unknown tool.
    """
    made = Plan(agents)
    for agent in agents:
        _sort(made, agent)
    known = {name for _, name in made.tools}
    if unknown := sorted({*only} - known):
        raise SettingsError(f"there is no tool {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}")
    given = [(_agent_of(made, each), each) for each in certification.scenarios]
    made.scenarios.extend((agent, each) for agent, each in given if not only or each.tools & {*only})
    named = {(agent.name, name) for agent, each in given for name in each.tools}
    for (agent_name, name), tool in list(made.tools.items()):
        if only and name not in only:
            del made.tools[agent_name, name]
        elif (agent_name, name) not in named:
            _derive(made, agent_name, tool)
    return made


def _sort(made: Plan, agent: Agent) -> None:
    """Sort the agent's tools into those that are certified, and those that are left out."""
    if not agent.is_own:
        made.left_out[agent.name, "*"] = "an agent of another library: its tools are called by that library"
        return
    for each in agent.tool_list:
        if isinstance(each, Tool):
            made.tools[agent.name, each.name] = each
        else:
            made.left_out[agent.name, each.name] = f"waits for {_WAITS.get(each.waits_for or '', 'another agent')}"
    for server in agent.servers:
        made.left_out[agent.name, f"{server.name}:*"] = "tools of an MCP server"


_WAITS = {"task": "a Celery task", "timer": "a time", "client": "a client", "user": "the user"}


def _agent_of(made: Plan, scenario: Scenario) -> Agent:
    for agent in made.agents:
        if scenario.agent in {None, agent.name} and all((agent.name, name) in made.tools for name in scenario.tools):
            return agent
    of = "an agent" if scenario.agent is None else f"the agent {scenario.agent!r}"
    raise SettingsError(f"a Scenario calls {', '.join(sorted(scenario.tools))}, but the module lacks {of} with these")


def _derive(made: Plan, agent_name: str, tool: Tool) -> None:
    """Add a scenario that calls the tool alone, or say why the tool is left out."""
    try:
        arguments = arguments_of(tool.parameters)
        tool.parse(arguments)
    except (NotDerived, ToolError) as error:
        reason = error.message.partition(" Expected a JSON object")[0] if isinstance(error, ToolError) else str(error)
        del made.tools[agent_name, tool.name]
        made.left_out[agent_name, tool.name] = f"{reason}; give it a Scenario"
        return
    scenario = Scenario(ToolCall("", tool.name, arguments), agent=agent_name)
    made.scenarios.append((made.agents.get(agent_name), scenario))
