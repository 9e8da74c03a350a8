"""The PERDURE_AGENTS module of the workers of `boundaries`: the agents of `agents`, and one of pydantic-ai.

`adapted` has the tools of every effect class of `agents`, with the same faults, and one that defers its calls.
"""

from __future__ import annotations

from types import SimpleNamespace

from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import CallDeferred

from perdure import effect, effect_id
from tests.processes import agents
from tests.processes.agents import tester as tester  # noqa: PLC0414 (the module's first agent)
from tests.processes.model_server import OUTSIDE

adapted = PydanticAgent(name="adapted", instructions="You are under test.")

for each in (agents.pure, agents.idempotent, agents.unsafe, agents.probed):

    def act(note: str, name: str = each.name) -> str:
        """Take effect."""
        return agents._act(name, note, SimpleNamespace(effect_id=effect_id()))  # type: ignore[arg-type]

    adapted.tool_plain(name=each.name, metadata=effect(each.effect, probe=each.probe))(act)


@adapted.tool_plain(name="guarded", requires_approval=True)
def guarded(note: str) -> str:
    """Take effect after an approval."""
    return agents._act("guarded", note, SimpleNamespace(effect_id=effect_id()))  # type: ignore[arg-type]


@adapted.tool_plain(name=OUTSIDE)
def defer(note: str) -> str:
    """Begin work that a client ends."""
    agents._act(OUTSIDE, note, SimpleNamespace(effect_id=effect_id()))  # type: ignore[arg-type]
    raise CallDeferred
