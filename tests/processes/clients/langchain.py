"""langchain-openai: an answer, a stream, a bound tool, and a structured output."""

import json
import sys

import pydantic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


class Place(pydantic.BaseModel):
    """The output."""

    city: str


@tool
def weather(note: str) -> str:
    """Look."""
    return f"rain for {note}"


model = ChatOpenAI(model="tester", base_url=sys.argv[1], api_key="none")
history = [HumanMessage("weather: a")]
with_tools = model.bind_tools([weather])
history.append(with_tools.invoke(history))
history += [weather.invoke(each) for each in history[-1].tool_calls]
called = with_tools.invoke(history)  # before other messages, which would wait behind the turn
found = {
    "whole": model.invoke("hello").text,
    "streamed": [each.text for each in model.stream("hello") if each.text],
    "called": called.text,
    "output": model.with_structured_output(Place).invoke("place").city,
}
json.dump(found, sys.stdout)
