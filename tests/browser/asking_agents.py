"""The PERDURE_AGENTS module of `test_waiting`: an agent that asks the user, and whose tool reports its progress.

It may also ask another agent, which asks the user.
"""

from __future__ import annotations

import time
from typing import Literal

from perdure import Agent, ToolContext, agent_tool, ask_user, tool
from tests.processes.model_server import ASK_BARISTA, ASK_SIZE

REPORTED_S = 3.0
"""Seconds for which the tool goes on after its report."""


@tool(effect="pure", timeout_s=30)
def slow(note: str, context: ToolContext) -> str:
    """Work for a while."""
    context.progress("3 of 9")
    time.sleep(REPORTED_S)
    return f"done with {note}"


_ask_size = ask_user(Literal["S", "M"], name=ASK_SIZE)
tester = Agent(
    "tester",
    "You make coffee.",
    tools=[_ask_size, slow, agent_tool(Agent("barista", "You make coffee.", tools=[_ask_size]), name=ASK_BARISTA)],
)
