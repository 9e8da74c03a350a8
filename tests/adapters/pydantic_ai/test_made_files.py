"""Files that a model makes, such as images, become files of the user, which the reply names."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import (
    BinaryContent,
    BinaryImage,
    FilePart,
    ModelMessage,
    ModelResponse,
    ModelResponsePart,
    NativeToolCallPart,
    NativeToolReturnPart,
    SpeechPart,
    TextPart,
    ToolCallPart,
)
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.output import PromptedOutput
from pydantic_ai.profiles import ModelProfile

from perdure import Agent, adapt, effect
from perdure.agents import Agents
from perdure.clock import SystemClock
from perdure.database.engine import Moment
from perdure.models.adapted import adapt_model
from perdure.models.adapted.messages import text_of
from perdure.settings import FileSettings, MemorySettings
from tests.adapters.pydantic_ai.test_agents import Box, Scripting, streamed
from tests.files.contents import png
from tests.models.painter import Painter
from tests.turns.harness import Harness
from tests.turns.scripted import Scripted, says

IMAGE = png(40, 30)
ENCODED = base64.b64encode(IMAGE).decode()
MADE = FilePart(BinaryImage(IMAGE, media_type="image/png"))


def _use(harness: Harness, model: Scripting, output_type: Any = str) -> PydanticAgent[None, Any]:
    bare: PydanticAgent[None, Any] = PydanticAgent(name="assistant", output_type=output_type)
    painter = FunctionModel(model.answer, profile=ModelProfile(supports_image_output=True))
    harness.agents = Agents([adapt(bare, name="assistant", memory=False).with_model(painter)])
    return bare


def _look() -> str:
    """Look."""
    return "seen"


def _rows(harness: Harness) -> str:
    """All that is stored of the conversation."""
    rows = harness.sql("SELECT t::text AS row FROM turns AS t UNION ALL SELECT m::text FROM messages AS m")
    return "\n".join(row.row for row in rows)


def _line(harness: Harness) -> str:
    """The line about the only file."""
    [file] = harness.sql("SELECT * FROM files")
    assert file.used_at is not None, "it is kept although no message has it"
    return f"[image: image/png, 40 by 30 pixels, {len(IMAGE)} bytes; file {file.file_id}]"


def _parts(messages: Sequence[ModelMessage], number: int = 0) -> list[ModelResponsePart]:
    """The parts of a reply that the model receives."""
    return list([each for each in messages if isinstance(each, ModelResponse)][number].parts)


def test_an_image_beside_a_text(harness: Harness) -> None:
    """The reply names it, its bytes are in no row of the conversation, and the model gets it again while it fits."""
    model = Scripting([TextPart("a cat"), MADE], "still a cat", "indeed")
    _use(harness, model)
    turn = harness.ask("paint")
    line = _line(harness)
    assert (turn["status"], turn["reply"]["text"]) == ("done", f"a cat\n{line}")
    assert ENCODED[:40] not in _rows(harness)
    assert harness.ask("sure?")["reply"]["text"] == "still a cat", "it is the first turn's"
    text, made = _parts(model.seen[1])
    assert isinstance(text, TextPart)
    assert text.content == "a cat"
    assert isinstance(made, FilePart)
    assert made.content.data == IMAGE
    harness.settings = harness.settings.model_copy(update={"memory": MemorySettings(budget_files=1)})
    harness.ask("really?")
    assert [each.content for each in _parts(model.seen[2]) if isinstance(each, TextPart)] == ["a cat", line]


def test_an_image_is_the_output(harness: Harness) -> None:
    """`reply.data` refers to the file, and `reply.text` is its line."""
    _use(harness, Scripting([MADE]), BinaryImage)
    turn = harness.ask("paint")
    line = _line(harness)
    assert turn["reply"]["text"] == line
    [file] = harness.sql("SELECT file_id FROM files")
    data = turn["reply"]["data"]
    assert (data["file_id"], data["media_type"], data["description"]) == (str(file.file_id), "image/png", line)
    assert "data" not in data


def test_an_output_function_returns_an_image(harness: Harness) -> None:
    """It is a file, too."""

    def paint(what: str) -> BinaryContent:
        del what
        return BinaryContent(IMAGE, media_type="image/png")

    _use(harness, Scripting([ToolCallPart("final_result", {"what": "cat"})]), paint)
    turn = harness.ask("paint")
    assert (turn["reply"]["text"], turn["reply"]["data"]["kind"]) == (_line(harness), "perdure-file")
    assert ENCODED[:40] not in _rows(harness)


SEARCH = [
    NativeToolCallPart("image_generation", {}, tool_call_id="n1", provider_name="openai"),
    NativeToolReturnPart("image_generation", {"status": "done"}, tool_call_id="n1", provider_name="openai"),
]


@pytest.mark.parametrize(
    "lines",
    [
        ([MADE], "a cat"),
        ([MADE, ToolCallPart("look", {}, tool_call_id="c1")], "a cat"),
        ([TextPart("I paint."), *SEARCH, MADE, TextPart("a cat")],),
        ([TextPart("a"), MADE, TextPart(" cat")],),
    ],
)
def test_each_image_of_a_turn_is_named_by_its_reply(harness: Harness, lines: tuple[Any, ...]) -> None:
    """Also one before calls, one without a text, for which pydantic-ai asks, and one that a provider's tool makes."""
    model = Scripting(*lines, "indeed")
    bare = _use(harness, model)
    bare.tool_plain(name="look")(_look)
    turn = harness.ask("paint")
    assert (turn["status"], turn["reply"]["text"]) == ("done", f"a cat\n{_line(harness)}")
    assert harness.ask("sure?")["reply"]["text"] == "indeed"
    assert any(isinstance(each, FilePart) and each.content.data == IMAGE for each in _parts(model.seen[-1]))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("place", ["files.store", "turns.step", "turns.settle"])
def test_a_crash_with_an_image(harness: Harness, moment: Moment, place: str) -> None:
    """The file is stored once, named once, and erased with the user."""
    made = [MADE, ToolCallPart("look", {}, tool_call_id="c1")]
    model = Scripting(*([made, made] if place == "files.store" or moment == "before" else [made]), "a cat", "a cat")
    bare = _use(harness, model)
    bare.tool_plain(name="look", metadata=effect("pure"))(_look)
    if place == "turns.settle":
        model.lines = [made, "a cat", "a cat"]
    sent = harness.send("paint")
    with harness.crashing(moment, place):
        harness.run(sent.session_id)
    harness.move(60)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["text"] == f"a cat\n{_line(harness)}"
    assert harness.sql("SELECT count(*) FROM file_contents")[0][0] == 1
    harness.runtime.eraser.erase(harness.sql("SELECT user_id FROM users")[0].user_id)
    assert harness.sql("SELECT count(*) FROM file_contents")[0][0] == 0


@pytest.mark.parametrize("output_type", [str, BinaryImage])
def test_an_image_that_is_refused(harness: Harness, output_type: Any) -> None:
    """A line says why, for the user and for the model; the reply is not lost."""
    harness.settings = harness.settings.model_copy(update={"files": FileSettings(user_bytes=10)})
    model = Scripting([TextPart("a cat"), MADE], [TextPart("a cat"), MADE])
    _use(harness, model, output_type)
    turn = harness.ask("paint")
    assert turn["status"] == "done"
    assert turn["reply"]["text"].startswith(
        f"a cat\n[image: image/png, {len(IMAGE)} bytes; it was not stored: The user"
    )
    assert harness.sql("SELECT FROM files") == []
    harness.ask("sure?")
    assert [each.content for each in _parts(model.seen[1]) if isinstance(each, TextPart)] == (
        turn["reply"]["text"].split("\n")
    )
    assert ENCODED[:40] not in _rows(harness)


def test_another_agent_reads_the_line(harness: Harness) -> None:
    """An agent of perdure that takes the session over is told of the image."""
    _use(harness, Scripting([TextPart("a cat"), MADE]))
    harness.ask("paint")
    line = _line(harness)
    harness.agents = Agents([Agent("assistant", "You help.")])
    harness.model = Scripted(says("indeed"))
    harness.ask("sure?")
    assert f"a cat\n{line}" in [each.content for each in harness.model.requests[-1].messages]


def test_the_line_is_streamed(harness: Harness) -> None:
    """What is streamed is the reply, also with images of an earlier reply of the turn."""
    painter = Painter([MADE, ToolCallPart("look", {}, tool_call_id="c1")], [TextPart("a cat")])
    bare: PydanticAgent[None, str] = PydanticAgent(name="assistant")
    bare.tool_plain(name="look")(_look)
    harness.agents = Agents([adapt(bare, name="assistant", memory=False).with_model(painter)])
    seen = streamed(harness)
    text = harness.ask("paint")["reply"]["text"]
    assert text == f"a cat\n{_line(harness)}"
    assert "".join(seen) == _line(harness) + text, "the first reply is committed, so clients discard it"


def test_an_agent_of_perdure_is_told_what_is_left_out(harness: Harness) -> None:
    """Its model's image is not stored. The reply says so, for the user and in later turns, in place of its bytes."""
    painter = Painter([TextPart("a cat"), MADE], [MADE], [TextPart("indeed")])
    harness.agents = Agents([Agent("assistant", "You help.")])
    harness.any_model = adapt_model(painter, SystemClock())
    line = (
        f"[image: image/png, {len(IMAGE)} bytes; it was not stored: only an agent of pydantic-ai keeps the files that "
        "its model makes]"
    )
    seen = streamed(harness)
    assert harness.ask("paint")["reply"]["text"] == "".join(seen) == f"a cat\n{line}"
    assert harness.ask("again")["reply"]["text"] == line
    assert harness.ask("sure?")["reply"]["text"] == "indeed"
    assert [text_of(_parts(painter.seen[-1], number)) for number in (0, 1)] == [f"a cat\n{line}", line]
    assert ENCODED[:40] not in _rows(harness)


@pytest.mark.parametrize("transcript", ["hello", None])
def test_speech_is_a_file(harness: Harness, transcript: str | None) -> None:
    """Its sound neither takes the room of the conversation, nor is it lost; the model gets what it said."""
    sound = BinaryContent(b"\x00\xff" * 150_000, media_type="audio/wav")
    spoken = SpeechPart(speaker="assistant", transcript=transcript, audio=sound)
    model = Scripting(*([[spoken]] if transcript else [[spoken], "hello"]), "indeed")
    _use(harness, model)
    reply = harness.ask("speak")["reply"]["text"]
    [file] = harness.sql("SELECT file_id FROM files")
    line = f"[file: application/octet-stream, 300.0 kB; file {file.file_id}]"
    assert reply == f"hello\n{line}"
    harness.ask("sure?")
    [part] = _parts(model.seen[-1])
    assert part == TextPart(transcript or line)


def test_an_image_beside_a_structured_output(harness: Harness) -> None:
    """The text is JSON, and the agent's history has the line."""
    model = Scripting([TextPart('{"width": 3}'), MADE], [TextPart('{"width": 4}')])
    _use(harness, model, PromptedOutput(Box))
    turn = harness.ask("paint")
    assert (turn["reply"]["text"], turn["reply"]["data"]) == ('{"width": 3}', {"width": 3})
    harness.ask("again")
    assert text_of(_parts(model.seen[1])) == '{"width": 3}' + _line(harness)
