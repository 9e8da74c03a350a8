"""The PERDURE_AGENTS module of the workers of `test_files`: agents whose tools return images.

`drawing` is one of perdure's, `painting` one of pydantic-ai. `everything` has an output, guards, dependencies, computed
instructions, and the tool of `drawing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import BinaryContent

from perdure import Agent, Allow, File, ToolContext, TurnContext, Usage, Verdict, effect, effect_id, guard, tool
from tests.files.contents import png
from tests.processes import agents
from tests.processes.model_server import CHART, GUARD_TOKENS

IMAGE = png(40, 30, padding=2_000)


@tool(effect="idempotent", name=CHART)
def chart(note: str, context: ToolContext[Any]) -> list[str | File]:
    """Draw a chart."""
    return [agents._act(CHART, note, context), File(IMAGE, name="chart.png")]


drawing = Agent("drawing", "You draw.", tools=[chart])

painting = PydanticAgent(name="painting", instructions="You paint.")


@painting.tool_plain(name=CHART, metadata=effect("idempotent"))
def paint(note: str) -> list[Any]:
    """Paint a chart."""
    done = agents._act(CHART, note, SimpleNamespace(effect_id=effect_id()))  # type: ignore[arg-type]
    return [done, BinaryContent(IMAGE, media_type="image/png", identifier="chart.png")]


@dataclass(frozen=True)
class Shop:
    """The dependencies of `everything`."""

    name: str


class Said(BaseModel):
    """The output of `everything`, as `model_server` makes it."""

    said: str


def _open(turn: TurnContext[Any]) -> Shop:
    return Shop(f"the shop of {turn.user_id}")


def _instructions(turn: TurnContext[Shop]) -> str:
    return f"You draw for {turn.deps.name}."


def _judge(text: str, turn: TurnContext[Shop]) -> Verdict:
    return Allow(usage=Usage(GUARD_TOKENS, 1))


@tool(effect="idempotent", name=CHART)
def chart_of_shop(note: str, context: ToolContext[Shop]) -> list[str | File]:
    """Draw a chart of the shop."""
    return [f"{agents._act(CHART, note, context)} for {context.deps.name}", File(IMAGE, name="chart.png")]


everything = Agent(
    "everything",
    _instructions,
    [chart_of_shop],
    output=Said,
    deps=_open,
    input_guards=[guard(_judge, parallel=True)],
    output_guards=[_judge],
)
