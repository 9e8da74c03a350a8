"""openai-agents, over one of the routes: an answer, a stream, a tool, a handoff, and a structured output."""

import asyncio
import json
import sys

import agents
import openai
import pydantic


class Place(pydantic.BaseModel):
    """The output."""

    city: str


@agents.function_tool
def weather(note: str) -> str:
    """Look."""
    return f"rain for {note}"


async def main(url: str, kind: str) -> None:
    """Run the agents, each in a conversation of its own."""
    agents.set_tracing_disabled(disabled=True)
    client = openai.AsyncOpenAI(base_url=url, api_key="none")
    of_kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    model = of_kind[kind](model="tester", openai_client=client)
    friend = agents.Agent(name="friend", model=model)
    assistant = agents.Agent(name="assistant", model=model, tools=[weather], handoffs=[friend])
    streamed = agents.Runner.run_streamed(friend, "hello")
    pieces = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    called = await agents.Runner.run(assistant, "weather: a")
    handed = await agents.Runner.run(assistant, "hands off")
    placed = await agents.Runner.run(agents.Agent(name="placer", model=model, output_type=Place), "place")
    found = {
        "whole": (await agents.Runner.run(friend, "hello")).final_output,
        "streamed": pieces,
        "called": called.final_output,
        "handed off": handed.final_output,
        "last": handed.last_agent.name,
        "output": placed.final_output.city,
    }
    json.dump(found, sys.stdout)


asyncio.run(main(*sys.argv[1:]))
