"""Which agent goes on with the turn after a round of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perdure.agents import Agent
from perdure.tools.delegation import HandoffTool
from perdure.turns.calls.result_values import Result
from perdure.turns.transcript import Entry

_SECOND = "Error: not handed over: an earlier call of the same reply handed the conversation over."


def handed_over(agent: Agent, open_reply: Entry, results: Sequence[Result]) -> tuple[str | None, Sequence[Result]]:
    """The agent that goes on if a call of `open_reply` hands the conversation over, and the results of its calls.

    Only the first handoff of a reply takes effect; the others fail. `None`: `agent` goes on itself.
    """
    tools = [agent.find_tool(call.name) for call in open_reply.tool_calls]
    taking = [
        number
        for number, (tool, result) in enumerate(zip(tools, results, strict=True))
        if isinstance(tool, HandoffTool) and result.status == "done"
    ]
    if not taking:
        return None, results
    first, *others = taking
    kept = [
        replace(each, status="failed", text=_SECOND) if number in others else each
        for number, each in enumerate(results)
    ]
    tool = tools[first]
    return (tool.agent_name if isinstance(tool, HandoffTool) else None), kept
