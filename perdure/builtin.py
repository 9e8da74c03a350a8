"""The built-in agent, used if `PERDURE_AGENTS` is not set."""

from __future__ import annotations

from perdure.agents import Agent
from perdure.tools.builtin import calculator, clock
from perdure.tools.memory import forget, recall, remember
from perdure.tools.reminders import remind_me, schedules, unschedule

assistant = Agent(
    "assistant",
    instructions=(
        "You are a helpful assistant. Answer briefly, in the language of the person who asks. "
        "Use the calculator for arithmetic and the clock for dates and times; do not guess either. "
        "What you know of the person is told below; recall more when you need it, remember what they ask you to, "
        "and forget it when they ask for that. When you do not know something, say so."
    ),
    tools=[calculator, clock, remember, recall, forget, remind_me, schedules, unschedule],
)
