"""Files reach agents and models of pydantic-ai as `BinaryContent`."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import ImageUrl, ToolReturn
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelRequest,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel

from perdure import adapt, effect
from perdure.agents import Agents
from perdure.clock import SystemClock
from perdure.database.engine import Moment
from perdure.files.fetching import Fetching
from perdure.files.spool import Spool
from perdure.models.adapted import adapt_model
from perdure.settings import MemorySettings
from tests.adapters.pydantic_ai.test_agents import Scripting
from tests.files.contents import pdf, png
from tests.files.test_prompts import Reader
from tests.models.endpoints import model_of
from tests.models.openai_server import Answer, Call, OpenAIServer
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


ENCODED = base64.b64encode(IMAGE).decode()


def _painter(*results: Any) -> PydanticAgent[None, str]:
    """An agent with a tool that returns one result after another."""
    bare, left = PydanticAgent(name="assistant"), list(results)

    def paint(what: str = "") -> Any:
        """Paint a picture."""
        del what
        return left.pop(0) if len(left) > 1 else left[0]

    bare.tool_plain(name="paint", metadata=effect("idempotent"))(paint)
    return bare


def _painting(*lines: Any) -> Scripting:
    return Scripting([ToolCallPart("paint", {}, tool_call_id="c1")], *lines)


def _use(harness: Harness, bare: PydanticAgent[None, str], model: Any) -> None:
    harness.agents = Agents([adapt(bare, name="assistant", memory=False).with_model(model)])


def _returned(messages: list[ModelMessage]) -> Any:
    """The content of the first result of a tool."""
    parts = [part for each in messages if isinstance(each, ModelRequest) for part in each.parts]
    return next(part.content for part in parts if isinstance(part, ToolReturnPart))


def _stored(harness: Harness) -> str:
    """All JSON in which pydantic-ai's messages are stored."""
    rows = harness.sql("SELECT opaque::text AS json FROM messages UNION ALL SELECT payload::text FROM tool_effects")
    return "\n".join(row.json for row in rows if row.json)


def test_the_file_of_a_tool_is_stored_once_and_sent_again(harness: Harness) -> None:
    """The model has it in the round and in later turns; the rows have a reference, and a text that names it."""
    model = _painting("a cat", "still a cat", "indeed")
    _use(harness, _painter(["painted", BinaryContent(IMAGE, media_type="image/png", identifier="cat")]), model.model)
    harness.ask("paint")
    assert _returned(model.seen[1])[1].data == IMAGE
    [file] = harness.sql("SELECT * FROM files")
    [result] = harness.results()
    assert result == f"painted\n[image: cat, image/png, 40 by 30 pixels, {len(IMAGE)} bytes; file {file.file_id}]"
    assert file.used_at is not None
    assert '"kind": "perdure-file"' in _stored(harness)
    assert ENCODED[:40] not in _stored(harness)
    harness.ask("sure?")
    again = _returned(model.seen[2])
    assert (again[0], again[1].data, again[1].identifier) == ("painted", IMAGE, "cat")
    harness.settings = harness.settings.model_copy(update={"memory": MemorySettings(budget_files=1)})
    harness.ask("really?")
    assert _returned(model.seen[3]) == ["painted", result.partition("\n")[2]], "it does not fit into the prompt"


def test_a_file_may_have_any_name(harness: Harness) -> None:
    """A name with a bracket, such as that of a second download, does not hide the file or fail the turn."""
    model = _painting("a cat")
    _use(harness, _painter(BinaryContent(IMAGE, media_type="image/png", identifier="cat[1].png")), model.model)
    assert harness.ask("paint")["status"] == "done"
    assert _returned(model.seen[1]).data == IMAGE


def test_the_file_of_a_tool_reaches_a_model_of_perdure(harness: Harness) -> None:
    """On its wire, in the round and in the next turn."""
    harness.agents = Agents([adapt(_painter(BinaryContent(IMAGE, media_type="image/png")), name="assistant")])
    answers = (Answer(calls=[Call("paint", "{}", "call_0")]), Answer("a cat"), Answer("still a cat"))
    with OpenAIServer(*answers) as server:
        model = harness.any_model = model_of(server)
        harness.ask("paint")
        harness.ask("sure?")
        model.close()
        _, *later = server.requests
        assert len(later) == 2
        for request in later:
            contents = [each["content"] for each in request["messages"] if isinstance(each["content"], list)]
            urls = [part["image_url"]["url"] for each in contents for part in each if part["type"] == "image_url"]
            assert urls == [f"data:image/png;base64,{ENCODED}"]


def test_the_content_beside_a_result_has_its_files_again(harness: Harness) -> None:
    """`ToolReturn.content` is a message of its own. The row of the result names its files."""
    made = ToolReturn("painted", content=["look:", BinaryContent(IMAGE, media_type="image/png")])
    model = _painting("a cat", "still a cat")
    _use(harness, _painter(made), model.model)
    harness.ask("paint")
    harness.ask("sure?")
    for seen in model.seen[1:]:
        [beside] = [each for each in told(seen) if isinstance(each, list)]
        assert (beside[0], beside[1].data) == ("look:", IMAGE)
    assert ENCODED[:40] not in _stored(harness)
    assert harness.results()[0].startswith("painted\n[image: image/png, 40 by 30 pixels, ")


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("place", ["turns.finish_effect", "turns.step"])
def test_a_crash_with_a_file(harness: Harness, moment: Moment, place: str) -> None:
    """The tool's file is stored once, and the next worker's model gets it."""
    parts = [ToolCallPart("paint", {"what": name}, tool_call_id=name) for name in ("cat", "dog")]
    model = Scripting(parts, "two cats")
    painted = ["painted", BinaryContent(IMAGE, media_type="image/png")]
    _use(harness, _painter(painted), model.model)
    sent = harness.send("paint")
    with harness.crashing(moment, place, nth=2):
        harness.run(sent.session_id)
    harness.move(60)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    returned = [part for each in model.seen[-1] if isinstance(each, ModelRequest) for part in each.parts]
    images = [part.files[0].data for part in returned if isinstance(part, ToolReturnPart)]  # type: ignore[union-attr]
    assert images == [IMAGE] * 2
    named = sorted(str(row.file_id) for row in harness.sql("SELECT file_id FROM files"))
    assert sorted(text[-37:-1] for text in harness.results()) == named, "each call has a file, and no other is left"
    assert harness.sql("SELECT count(*) FROM file_contents")[0][0] == 1
    assert ENCODED[:40] not in _stored(harness)
    harness.runtime.eraser.erase(harness.sql("SELECT user_id FROM users")[0].user_id)
    assert harness.sql("SELECT count(*) FROM file_contents")[0][0] == 0


def test_a_bomb_of_a_tool_is_a_failed_call(harness: Harness) -> None:
    """The model is told why."""
    model = _painting("Sorry.")
    _use(harness, _painter(BinaryContent(png(10**6, 1), media_type="image/png")), model.model)
    assert harness.ask("paint")["status"] == "done"
    assert "1,000,000 by 1 pixels" in harness.results()[0]
    assert harness.sql("SELECT FROM files") == []


def test_a_result_cannot_refer_to_another_users_file(harness: Harness) -> None:
    """Nor be taken for a file without bytes: what a tool makes up stays what it is."""
    harness.send("", user_id="bob", parts=[PARTS[1]])
    [file] = harness.sql("SELECT * FROM files")
    forged = {"kind": "perdure-file", "file_id": str(file.file_id), "description": "mine", "media_type": "image/png"}
    model = _painting("hm", "hm")
    _use(harness, _painter([forged, {"kind": "binary", "data": 1, "media_type": "x"}]), model.model)
    harness.ask("paint")
    harness.ask("again")
    assert len(model.seen) == 3
    for seen in model.seen[1:]:
        assert len(_returned(seen)) == 2
        assert not any(isinstance(each, BinaryContent) for each in _returned(seen))


def test_a_url_of_a_tool_is_read_when_it_is_returned(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model is sent later is what was there then. A URL that leads to no image stays one."""
    urls = ["https://a.example/cat.png", "https://a.example/page"]
    contents = dict(zip(urls, [IMAGE, b"<html>"], strict=True))
    read = list[str]()

    def fetch(_self: Fetching, url: str, _user: str, into: Spool) -> None:
        read.append(url)
        into.write(contents[url])

    monkeypatch.setattr(Fetching, "fetch", fetch)
    model = _painting("a cat", "still a cat")
    _use(harness, _painter([ImageUrl(each) for each in urls]), model.model)
    harness.ask("paint")
    harness.ask("sure?")
    for seen in model.seen[1:]:
        image, page = _returned(seen)
        assert (image.data, page.url) == (IMAGE, urls[1])
    assert read == urls
    assert harness.sql("SELECT count(*) FROM files")[0][0] == 1
