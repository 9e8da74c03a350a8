"""litellm: an answer, a stream, a tool, a structured output, and users by metadata and by a header."""

import json
import sys

import litellm
import pydantic


class Place(pydantic.BaseModel):
    """The output."""

    city: str


def complete(messages: list, **more: object) -> object:
    """Ask the agent."""
    return litellm.completion(model="openai/tester", api_base=sys.argv[1], api_key="none", messages=messages, **more)


def ask(text: str, **more: object) -> str:
    """Send one message, and return the answer's text."""
    return complete([{"role": "user", "content": text}], **more).choices[0].message.content


parameters = {"type": "object", "properties": {"note": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "weather", "description": "Look.", "parameters": parameters}}]
messages = [{"role": "user", "content": "weather: a"}]
message = complete(messages, tools=tools).choices[0].message
messages.append(message)
for call in message.tool_calls:
    note = json.loads(call.function.arguments)["note"]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"rain for {note}"})
called = complete(messages, tools=tools)  # before other messages, which would wait behind the turn
chunks = [*complete([{"role": "user", "content": "hello"}], stream=True)]
found = {
    "whole": ask("hello"),
    "streamed": [text for each in chunks if each.choices and (text := each.choices[0].delta.content)],
    "called": called.choices[0].message.content,
    "output": json.loads(ask("place", response_format=Place))["city"],
    "by metadata": ask("hello", extra_body={"metadata": {"user_id": "ann"}}),
    "by header": ask("hello", extra_headers={"X-Perdure-User": "bob"}),
}
json.dump(found, sys.stdout)
