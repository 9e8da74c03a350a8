"""What an agent without a model of its own sends to the model of perdure."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import CachePoint, NativeOutput, PromptedOutput, TextContent, ToolReturn, VideoUrl
from pydantic_ai.settings import ToolOrOutput

from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Role
from perdure.settings import Settings
from perdure.testing import Scripted, ask, call
from tests.models.endpoints import model_of
from tests.models.openai_server import Answer, Call, OpenAIServer
from tests.models.server import Status


class Box(BaseModel):
    """An output."""

    width: int


DEFAULTS = {"temperature": 0.2, "max_tokens": 500, "thinking": "high"}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (None, DEFAULTS),
        ({"temperature": 0.1, "thinking": False}, DEFAULTS | {"temperature": 0.1, "thinking": False}),
        ({"seed": 3}, DEFAULTS | {"seed": 3}),
    ],
)
def test_the_settings_of_all_agents(own: Any, expected: dict[str, Any]) -> None:
    """They reach the model, except those that the agent has itself."""
    settings = Settings.model_validate({"model_settings": DEFAULTS})
    model = Scripted("done")
    ask(PydanticAgent(name="adapted", model_settings=own), "go", model=model, settings=settings)
    sent = model.requests[0].settings
    assert {name: sent.get(name) for name in expected} == expected


@pytest.mark.parametrize(("choice", "first"), [("required", "required"), (["look", "other"], ["look"])])
def test_a_choice_of_tools_holds_until_there_are_results(choice: Any, first: Any) -> None:
    """As for perdure's own agents: else the model would call tools endlessly."""
    bare = PydanticAgent(name="adapted")

    @bare.tool_plain
    def look() -> str:
        """Look."""
        return "seen"

    model = Scripted(call("look"), "done")
    settings = Settings.model_validate({"model_settings": {"tool_choice": choice}})
    assert ask(bare, "go", model=model, settings=settings).status == "done"
    assert [each.settings.get("tool_choice") for each in model.requests] == [first, None]
    ask(PydanticAgent(name="adapted"), "go", model=(model := Scripted("done")), settings=settings)
    assert "tool_choice" not in model.requests[0].settings


def test_the_schema_of_a_prompted_output() -> None:
    """It is part of the instructions."""
    model = Scripted('{"width":1}')
    bare = PydanticAgent(name="adapted", instructions="You measure.", output_type=PromptedOutput(Box))
    answer = ask(bare, "go", model=model)
    assert answer.status == "done"
    [system] = [each.content for each in model.requests[0].messages if each.role is Role.SYSTEM][:1]
    assert "You measure." in system
    assert '"width"' in system


def test_a_tool_that_is_loaded_on_demand() -> None:
    """The model receives its schema after a search has found it."""
    bare = PydanticAgent(name="adapted")

    @bare.tool_plain(defer_loading=True)
    def weather(city: str) -> str:
        """Say what the weather of a city is like."""
        return f"rain in {city}"

    model = Scripted(call("search_tools", queries=["weather"]), call("weather", city="Rome"), "done")
    answer = ask(bare, "go", model=model)
    assert [each.result for each in answer.calls][1:] == ["rain in Rome"]
    offered = [{tool.name for tool in each.tools} for each in model.requests]
    assert "weather" not in offered[0]
    assert "weather" in offered[1]


def test_the_content_of_a_prompt_reaches_the_model() -> None:
    """Text with metadata is text, a mark for a provider's cache is nothing, and a URL names what it leads to."""
    bare = PydanticAgent(name="adapted")
    url = "https://unknown.invalid/a.mp4"

    @bare.tool_plain
    def look() -> ToolReturn:
        """Look."""
        said = TextContent("More.", metadata={"page": 3})
        return ToolReturn("seen", content=["This is it.", CachePoint(), said, VideoUrl(url)])

    model = Scripted(call("look"), "done")
    assert ask(bare, "go", model=model).status == "done"
    assert model.requests[1].messages[-1].content == f"This is it.\nMore.\n[video-url: {url}]"


def test_an_output_by_the_schema_of_the_reply() -> None:
    """The model of perdure enforces the schema, as it does for perdure's own agents with an output."""
    bare = PydanticAgent(name="adapted", output_type=NativeOutput(Box))

    @bare.tool_plain
    def look() -> str:
        """Look."""
        return "seen"

    model = Scripted(call("look"), '{"width": 3}')
    answer = ask(bare, "go", model=model)
    assert (answer.status, answer.data) == ("done", {"width": 3})
    assert [each.requires_output for each in model.requests] == [True, True]
    assert (model.requests[0].output or {})["required"] == ["width"]


@pytest.mark.parametrize("refuses", [False, True])
def test_an_output_of_a_server(*, refuses: bool) -> None:
    """A server that has no structured output gets the schema as a tool."""
    refusal = [Status(400, message="response_format is not supported")] if refuses else []
    with OpenAIServer(*refusal) as server:
        server.script(Answer(calls=[Call("final_answer", '{"width": 3}')]) if refuses else Answer('{"width": 3}'))
        answer = ask(PydanticAgent(name="adapted", output_type=NativeOutput(Box)), "go", model=model_of(server))
        assert (answer.status, answer.data) == ("done", {"width": 3})
        form = server.requests[0]["response_format"]["json_schema"]
        assert (form["strict"], form["schema"]["required"]) == (True, ["width"])
        assert len(server.requests) == 1 + refuses


@pytest.mark.parametrize(
    ("output", "settings", "expected"),
    [
        pytest.param(Box, {}, ("required", ["look", "other", "final_result"]), id="a call is the answer"),
        pytest.param(Box, {"tool_choice": "auto"}, ("required", ["look", "other", "final_result"]), id="auto"),
        pytest.param(Box, {"tool_choice": "none"}, ("required", ["final_result"]), id="no function tool"),
        pytest.param(Box, {"thinking": "high"}, (None, ["look", "other", "final_result"]), id="thoughts"),
        pytest.param([str, Box], {}, (None, ["look", "other", "final_result"]), id="a text may be the answer"),
        pytest.param([str, Box], {"tool_choice": "none"}, ("auto", ["final_result"]), id="a text or the output"),
        pytest.param(Box, {"tool_choice": ToolOrOutput(["look"])}, ("required", ["look", "final_result"]), id="one"),
        pytest.param(str, {"tool_choice": ToolOrOutput(["look"])}, ("auto", ["look"]), id="one or a text"),
        pytest.param(str, {"tool_choice": ToolOrOutput([])}, (None, []), id="none or a text"),
    ],
)
def test_the_choice_of_tools_of_an_agent(output: Any, settings: Any, expected: tuple[Any, list[str]]) -> None:
    """It is that of pydantic-ai's own models: if only a call can be the output, the model must make one."""
    bare = PydanticAgent(name="adapted", output_type=output, model_settings=settings)

    @bare.tool_plain
    def look() -> str:
        """Look."""
        return "seen"

    @bare.tool_plain
    def other() -> str:
        """Do something else."""
        return "done"

    first = [call("look")] if "look" in expected[1] else []
    model = Scripted(*first, call("final_result", width=3) if output is Box else "done")
    assert ask(bare, "go", model=model).status == "done"
    for each in model.requests:
        assert (each.settings.get("tool_choice"), [tool.name for tool in each.tools]) == expected


@pytest.mark.parametrize("timeout", [5, httpx.Timeout(5.0, connect=1.0), httpx.Timeout(None), None])
def test_a_timeout_may_have_the_forms_that_clients_take(timeout: Any) -> None:
    """The setting of perdure is a number of seconds."""
    model = Scripted("done")
    bare = PydanticAgent(name="adapted", model_settings={"timeout": timeout})
    assert ask(bare, "go", model=model).status == "done"
    assert model.requests[0].settings.get("timeout") == (5 if getattr(timeout, "read", timeout) else None)


def test_a_deadline_of_the_agent_ends_the_call() -> None:
    """The turn does not wait for what the model would have answered later."""

    class Slow:
        name = "slow"

        def respond(self, _: ModelRequest, call: ModelCall) -> ModelReply:
            while call.remaining() > 0:  # raises when the call is over
                time.sleep(0.01)
            return ModelReply("late")

    began = time.monotonic()
    answer = ask(PydanticAgent(name="adapted", model_settings={"request_timeout": 0.2}), "go", model=Slow())
    assert answer.status == "failed"
    assert time.monotonic() - began < 10
