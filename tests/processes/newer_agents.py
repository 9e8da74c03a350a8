"""The agents module of a newer deployment than `tests.processes.agents`: it has one more agent, with the same tools."""

from __future__ import annotations

from perdure import Agent
from tests.processes.agents import tester, tools

__all__ = ["newer", "tester"]

newer = Agent("newer", "You are new, and under test.", tools=tools)
