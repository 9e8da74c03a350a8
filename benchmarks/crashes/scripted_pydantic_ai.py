"""The scripted model for agents of pydantic-ai."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from benchmarks.crashes import script


async def _respond(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
    parts = [part for message in messages for part in message.parts]
    turn = _turn_of(parts)
    results = [part.model_response_str() for part in parts if isinstance(part, ToolReturnPart)]
    text = script.ask(turn, results[-1] if results else None)
    if text is None:
        return ModelResponse(parts=[ToolCallPart(script.TOOL, {"turn": turn}, tool_call_id=script.CALL_ID)])
    return ModelResponse(parts=[TextPart(text)])


def _turn_of(parts: Sequence[object]) -> str:
    (prompt,) = (part.content for part in parts if isinstance(part, UserPromptPart))
    found = script.turn_in(str(prompt))
    assert found is not None
    return found


MODEL = FunctionModel(_respond)
