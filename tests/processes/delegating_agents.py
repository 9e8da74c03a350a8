"""The PERDURE_AGENTS module of the workers of `test_delegating`: an agent that asks two others, native and adapted."""

from __future__ import annotations

from pydantic_ai import Agent as PydanticAgent

from perdure import Agent, agent_tool, handoff
from tests.processes.agents import tester as tester  # noqa: PLC0414 (the module's first agent)
from tests.processes.model_server import ASK, ASK_ADAPTED, HAND_OVER

_native = Agent("searcher", "You search.")
_adapted = PydanticAgent(name="adapted searcher", instructions="You search.")

delegating = Agent(
    "delegating",
    "You delegate.",
    tools=[
        agent_tool(_native, name=ASK, timeout_s=60),
        agent_tool(_adapted, name=ASK_ADAPTED, timeout_s=60),
        handoff(_native, name=HAND_OVER),
    ],
)
