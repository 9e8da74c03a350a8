"""The PERDURE_AGENTS module of `test_waiting`: an agent that asks the user, and whose tool reports its progress."""

from __future__ import annotations

import time
from typing import Literal

from perdure import Agent, ToolContext, ask_user, tool
from tests.processes.model_server import ASK_SIZE

REPORTED_S = 3.0
"""Seconds for which the tool goes on after its report."""


@tool(effect="pure", timeout_s=30)
def slow(note: str, context: ToolContext) -> str:
    """Work for a while."""
    context.progress("3 of 9")
    time.sleep(REPORTED_S)
    return f"done with {note}"


tester = Agent("tester", "You make coffee.", tools=[ask_user(Literal["S", "M"], name=ASK_SIZE), slow])
