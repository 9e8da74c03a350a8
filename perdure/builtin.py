"""The built-in agent: what answers when `PERDURE_AGENTS` is not set."""

from __future__ import annotations

from perdure.agents import Agent
from perdure.tools.builtin import calculator, clock

assistant = Agent(
    "assistant",
    instructions=(
        "You are a helpful assistant. Answer briefly, in the language of the person who asks. "
        "Use the calculator for arithmetic and the clock for dates and times; do not guess either. "
        "When you do not know something, say so."
    ),
    tools=[calculator, clock],
)
