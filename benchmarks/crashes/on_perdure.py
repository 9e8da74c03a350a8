"""perdure: agents with the same tool, declared `unsafe`, `unsafe` with a probe, and `idempotent`; and their model.

`docs/agents-and-tools.md` describes the declarations.
"""

from __future__ import annotations

from benchmarks.crashes import script
from perdure.agents import Agent
from perdure.clock import Clock
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Role, ToolCall, Usage
from perdure.settings import Settings
from perdure.tools.registry import DidNotHappen, Happened, ToolContext, tool


class ScriptedModel:
    """The scripted model, in the worker's process."""

    name = "crashes:scripted"

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Call the tool, or answer with its result."""
        last = request.messages[-1]
        turn = next(found for each in reversed(request.messages) if (found := script.turn_in(each.content)))
        text = script.ask(turn, last.content if last.role is Role.TOOL else None)
        if text is None:
            arguments = f'{{"turn": "{turn}"}}'
            return ModelReply("", (ToolCall(script.CALL_ID, script.TOOL, arguments),), Usage(120, 12), "scripted")
        call.delta(text)
        return ModelReply(text, usage=Usage(150, 20), model="scripted")


def model(_name: str, _settings: Settings, _clock: Clock) -> ScriptedModel:
    """Make the model `crashes:scripted`. perdure calls this function as an entry point of `perdure.models`."""
    return ScriptedModel()


def _order(turn: str, context: ToolContext) -> str:
    """Order pencils."""
    return script.order(turn, str(context.effect_id))


def _was_ordered(context: ToolContext) -> Happened | DidNotHappen:
    return Happened(script.RESULT) if script.was_ordered(str(context.effect_id)) else DidNotHappen()


unsafe = Agent("unsafe", script.INSTRUCTIONS, tools=[tool(effect="unsafe", name=script.TOOL)(_order)])
probed = Agent("probed", script.INSTRUCTIONS, tools=[tool(probe=_was_ordered, name=script.TOOL)(_order)])
idempotent = Agent("idempotent", script.INSTRUCTIONS, tools=[tool(effect="idempotent", name=script.TOOL)(_order)])
