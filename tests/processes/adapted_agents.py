"""The PERDURE_AGENTS module of the workers of `boundaries`: the agents of `agents`, and one of pydantic-ai.

`adapted` has the tools of every effect class of `agents`, with the same faults.
"""

from __future__ import annotations

from types import SimpleNamespace

from pydantic_ai import Agent as PydanticAgent

from perdure import effect, effect_id
from tests.processes import agents
from tests.processes.agents import tester as tester  # noqa: PLC0414 (the module's first agent)

adapted = PydanticAgent(name="adapted", instructions="You are under test.")

for each in (agents.pure, agents.idempotent, agents.unsafe, agents.probed):

    def act(note: str, name: str = each.name) -> str:
        """Take effect."""
        return agents._act(name, note, SimpleNamespace(effect_id=effect_id()))  # type: ignore[arg-type]

    adapted.tool_plain(name=each.name, metadata=effect(each.effect, probe=each.probe))(act)
