"""The agents module of a newer deployment than `tests.processes.agents`: one agent is changed, and one is new."""

from __future__ import annotations

from perdure import Agent, tool
from tests.processes.agents import tools

__all__ = ["newer", "tester"]


@tool(effect="pure")
def added() -> str:
    """A tool that only this version has."""
    return "added"


tester = Agent("tester", "You are under test, and have changed.", tools=[*tools, added])
newer = Agent("newer", "You are new, and under test.", tools=tools)
