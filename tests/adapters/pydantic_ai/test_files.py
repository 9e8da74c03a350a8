"""Files reach agents and models of pydantic-ai as `BinaryContent`."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import BinaryContent, ModelMessage, ModelRequest, UserPromptPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from perdure import adapt
from perdure.agents import Agents
from perdure.clock import SystemClock
from perdure.models.adapted import adapt_model
from tests.adapters.pydantic_ai.test_agents import Scripting
from tests.files.contents import pdf, png
from tests.files.test_prompts import Reader
from tests.models.endpoints import model_of
from tests.models.openai_server import Answer, OpenAIServer
from tests.turns.harness import Harness

IMAGE, PDF = png(40, 30), pdf(2)
ARCHIVE = {"type": "file", "data": base64.b64encode(b"\x00\x01").decode(), "name": "x.bin"}
PARTS: list[dict[str, Any]] = [
    {"type": "text", "text": "Look:"},
    {"type": "image", "data": base64.b64encode(IMAGE).decode()},
    {"type": "file", "data": base64.b64encode(PDF).decode(), "name": "bill.pdf"},
]
DESCRIBED = "[file: x.bin, application/octet-stream, 2 bytes; its content is not shown here]"


def told(messages: list[ModelMessage]) -> list[Any]:
    """The contents of the users' messages."""
    parts = [part for each in messages if isinstance(each, ModelRequest) for part in each.parts]
    return [part.content for part in parts if isinstance(part, UserPromptPart)]


def test_an_agent_with_a_model_of_pydantic_ai(harness: Harness) -> None:
    """The present message and the history have their files."""
    model = Scripting("a cat", "still a cat")
    harness.agents = Agents([adapt(PydanticAgent(name="assistant"), name="assistant").with_model(model.model)])
    harness.ask("", parts=[*PARTS, ARCHIVE])
    harness.ask("sure?")
    *_, content = told(model.seen[0])
    assert content[0] == "Look:"
    assert [each.data for each in content if isinstance(each, BinaryContent)] == [IMAGE, PDF]
    assert content[-1] == DESCRIBED
    first, *_, second = told(model.seen[1])
    assert (first, second) == (content, "sure?")


def test_an_agent_with_a_model_of_perdure(harness: Harness) -> None:
    """The model's wire has the files that it reads, and a line about the others."""
    with OpenAIServer(player=lambda _: Answer("ok")) as server:
        model = harness.any_model = model_of(server)
        harness.agents = Agents([adapt(PydanticAgent(name="assistant"), name="assistant")])
        harness.ask("", parts=PARTS)
        model.close()
        content = server.requests[-1]["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "text"]
    assert "bill.pdf" in content[2]["text"]


@pytest.mark.parametrize("refuses", [False, True])
def test_an_adapted_model(harness: Harness, refuses: bool) -> None:
    """An agent of perdure with a model of pydantic-ai. A model that refuses files is asked again without."""
    seen: list[list[Any]] = []

    async def stream(messages: list[ModelMessage], _info: AgentInfo) -> AsyncIterator[str]:
        seen.append(told(messages))
        if refuses and not isinstance(seen[-1][-1], str):
            raise NotImplementedError("Only images are supported for BinaryContent in user prompts")
        yield "ok"

    harness.any_model = adapt_model(FunctionModel(stream_function=stream), SystemClock())
    assert harness.ask("", parts=PARTS)["status"] == "done"
    assert [each.data for each in seen[0][-1] if isinstance(each, BinaryContent)] == [IMAGE, PDF]
    assert len(seen) == 1 + refuses
    if refuses:
        assert str(seen[1][-1]).startswith("Look:\n[image: image/png, 40 by 30 pixels")


def test_a_prompt_that_is_too_long_is_built_without_files(harness: Harness) -> None:
    """The turn goes on with a description."""
    reader = harness.any_model = Reader("application/pdf")
    reader.too_long = 1
    harness.agents = Agents([adapt(PydanticAgent(name="assistant"), name="assistant")])
    assert harness.ask("", parts=[PARTS[2]])["status"] == "done"
    assert [len(request.messages[-1].files) for request in reader.requests] == [1, 0]
