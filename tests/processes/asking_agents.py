"""The PERDURE_AGENTS module of the workers of `test_joining`: an agent that asks the user, beside others."""

from __future__ import annotations

from typing import Literal

from perdure import Agent, ask_user
from tests.processes.adapted_agents import adapted as adapted  # noqa: PLC0414 (an agent of the module)
from tests.processes.agents import tester as tester  # noqa: PLC0414 (likewise)
from tests.processes.model_server import ASK_SIZE

asking = Agent("asking", "You make coffee.", tools=[ask_user(Literal["S", "M"], name=ASK_SIZE)])
