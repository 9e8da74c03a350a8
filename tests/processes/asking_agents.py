"""The PERDURE_AGENTS module of the workers of `test_joining`: an agent that asks the user, beside others.

`rewriting` has a hook that changes what the user said, and a guard of the answer. `impatient` waits for an answer for
`PATIENCE_S` seconds only. `cautious` has a guard of what the user says that uses tokens. `serving` asks `asking`.
"""

from __future__ import annotations

from typing import Any, Literal

from perdure import Agent, Allow, Refuse, TurnContext, TurnStarted, Usage, Verdict, agent_tool, ask_user, required
from tests.processes.adapted_agents import adapted as adapted  # noqa: PLC0414 (an agent of the module)
from tests.processes.agents import tester as tester  # noqa: PLC0414 (likewise)
from tests.processes.model_server import ASK_BARISTA, ASK_SIZE, GUARD_TOKENS, REFUSED, SECRET

PATIENCE_S = 2.0

asking = Agent("asking", "You make coffee.", tools=[ask_user(Literal["S", "M"], name=ASK_SIZE)])
serving = Agent("serving", "You serve breakfast.", tools=[agent_tool(asking, name=ASK_BARISTA)])
impatient = Agent(
    "impatient", "You make coffee.", tools=[ask_user(Literal["S", "M"], name=ASK_SIZE, timeout_s=PATIENCE_S)]
)


def _mask(turn: TurnStarted) -> TurnStarted:
    return turn.replace(text=turn.text.replace(SECRET, "[card]"))


def _allow(text: str, turn: TurnContext[Any]) -> Verdict:
    del text, turn
    return Allow()


rewriting = Agent("rewriting", "You repeat.", before_turn=[required(_mask)], output_guards=[_allow])


def _judge(text: str, turn: TurnContext[Any]) -> Verdict:
    del turn
    used = Usage(GUARD_TOKENS, 1)
    return Refuse("No.", usage=used) if REFUSED in text else Allow(usage=used)


cautious = Agent("cautious", "You make coffee.", tools=asking.tools, input_guards=[_judge])
