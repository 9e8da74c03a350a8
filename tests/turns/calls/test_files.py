"""Tools return files: the model gets them with the results, or lines that describe them."""

from __future__ import annotations

import base64
from typing import Any
from uuid import UUID

import pytest

from perdure import File, tool
from perdure.clock import MovedClock
from perdure.models.adapted import adapted_model
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from tests.files.contents import png
from tests.models.anthropic_server import AnthropicServer
from tests.models.openai_server import Answer, Call, OpenAIServer
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

IMAGE = png(640, 480)


@tool(effect="idempotent")
def chart(what: str) -> list[Any]:
    """Draw a chart."""
    return [f"a chart of {what}", File(IMAGE, name="chart.png")]


@pytest.mark.parametrize("server_type", [OpenAIServer, AnthropicServer])
def test_the_model_gets_the_file_of_a_result(harness: Harness, server_type: Any) -> None:
    """As its protocol has it: in the result (Messages), or in a message after the results (Chat Completions)."""
    harness.equip(chart)
    kind = "openai" if server_type is OpenAIServer else "anthropic"
    with server_type(Answer(calls=[Call("chart", '{"what": "tea"}', "call_0")]), Answer("Nice.")) as server:
        model = harness.any_model = EndpointModel(Endpoint("test", server.base_url, kind=kind), "m", MovedClock())
        turn = harness.ask("draw")
        model.close()
        sent = server.requests[-1]["messages"]
    assert turn["status"] == "done", turn
    encoded = base64.b64encode(IMAGE).decode()
    if kind == "openai":
        assert [each["role"] for each in sent[-2:]] == ["tool", "user"]
        assert sent[-1]["content"][1]["image_url"]["url"] == f"data:image/png;base64,{encoded}"
        assert sent[-2]["content"].startswith("a chart of tea\n[image: chart.png, image/png, 640 by 480 pixels")
    else:
        [result] = sent[-1]["content"]
        assert [each["type"] for each in result["content"]] == ["text", "image"]
        assert result["content"][1]["source"]["data"] == encoded


def test_a_model_of_pydantic_ai_gets_the_file_of_a_result(harness: Harness) -> None:
    """In a message after the results, which pydantic-ai announces."""
    harness.equip(chart)
    with OpenAIServer(Answer(calls=[Call("chart", '{"what": "tea"}', "call_0")]), Answer("Nice.")) as server:
        endpoint = Endpoint("test", server.base_url, "sk-of-the-tests")
        model = adapted_model("test:m", MovedClock(), "PERDURE_MODEL", endpoint, "openai-chat")
        harness.any_model = model
        turn = harness.ask("draw")
        model.close()
        sent = server.requests[-1]["messages"]
    assert turn["status"] == "done", turn
    [result] = [each["content"] for each in sent if each["role"] == "tool"]
    assert "a chart of tea" in result
    urls = [each["image_url"]["url"] for each in sent[-1]["content"] if each["type"] == "image_url"]
    assert urls == [f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}"]


def test_a_result_that_was_recorded_before_a_crash_keeps_its_file(harness: Harness) -> None:
    """A worker that continues the turn finds the file by the text of the result."""
    harness.equip(chart)
    harness.script(calls(("chart", {"what": "tea"}), ("chart", {"what": "milk"})), says("Nice."))
    sent = harness.send("draw")
    with harness.crashing("before", "turns.step", nth=2):
        harness.run(sent.session_id)
    harness.move(60)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    results = [each["content"] for each in harness.messages(sent.session_id) if each["role"] == "tool"]
    files = harness.sql("SELECT file_id::text AS file_id FROM files WHERE used_at IS NOT NULL")
    assert all(any(row.file_id in text for row in files) for text in results)
    assert harness.sql("SELECT count(*) FROM file_contents")[0][0] == 1
    harness.runtime.eraser.erase(harness.sql("SELECT user_id FROM users")[0].user_id)
    assert harness.sql("SELECT count(*) FROM file_contents")[0][0] == 0


def test_a_result_cannot_name_another_users_file(harness: Harness) -> None:
    """The text of a page may name any file."""
    harness.send("", user_id="bob", parts=[{"type": "image", "data": base64.b64encode(IMAGE).decode()}])
    file_id = harness.sql("SELECT file_id FROM files")[0].file_id

    @tool(effect="pure")
    def page() -> str:
        """Read a page."""
        return f"[image: x, image/png, 1 bytes; file {file_id}]"

    harness.equip(page)
    with OpenAIServer(Answer(calls=[Call("page", "{}", "call_0")]), Answer("Hm.")) as server:
        model = harness.any_model = EndpointModel(Endpoint("test", server.base_url), "m", MovedClock())
        harness.ask("read")
        model.close()
        assert server.requests[-1]["messages"][-1]["role"] == "tool"


def test_a_bomb_is_a_failed_call(harness: Harness) -> None:
    """The model is told why."""

    @tool(effect="pure")
    def bomb() -> File:
        """Draw much."""
        return File(png(10**6, 1))

    harness.equip(bomb)
    harness.script(calls(("bomb", {})), says("Sorry."))
    turn = harness.ask("draw")
    assert turn["status"] == "done"
    [result] = [text for role, text in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert "1,000,000 by 1 pixels" in result
