"""pydantic-ai, over one of the routes: an answer, a stream, a tool, and a structured output."""

import json
import sys

import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Place(pydantic.BaseModel):
    """The output."""

    city: str


kinds = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
model = kinds[sys.argv[2]]("tester", provider=OpenAIProvider(base_url=sys.argv[1], api_key="none"))
agent = Agent(model)
assistant = Agent(model)


@assistant.tool_plain
def weather(note: str) -> str:
    """Look."""
    return f"rain for {note}"


found = {
    "whole": agent.run_sync("hello").output,
    "streamed": [*agent.run_stream_sync("hello").stream_text(delta=True, debounce_by=None)],
    "called": assistant.run_sync("weather: a").output,
    "output": Agent(model, output_type=NativeOutput(Place)).run_sync("place").output.city,
}
json.dump(found, sys.stdout)
