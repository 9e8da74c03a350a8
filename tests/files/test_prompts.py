"""A file reaches a model that reads it as its protocol has it, and is described to one that does not."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from perdure.clock import MovedClock
from perdure.errors import ContextTooLong
from perdure.files.kinds import PDF as PDF_TYPE
from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Role
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from perdure.settings import FileSettings, MemorySettings
from tests.files.contents import pdf, png
from tests.models.anthropic_server import AnthropicServer
from tests.models.openai_server import Answer, OpenAIServer, Status
from tests.turns.harness import Harness
from tests.turns.scripted import spoken

IMAGE, PDF = png(640, 480), pdf(3)
ENCODED = {name: base64.b64encode(content).decode() for name, content in {"png": IMAGE, "pdf": PDF}.items()}
PARTS: tuple[dict[str, Any], ...] = (
    {"type": "text", "text": "Look:"},
    {"type": "image", "data": ENCODED["png"], "name": "cat.png"},
    {"type": "text", "text": "and:"},
    {"type": "file", "data": ENCODED["pdf"], "name": "bill.pdf"},
)
CAT = f"[image: cat.png, image/png, 640 by 480 pixels, {len(IMAGE)} bytes]"
BILL = f"[file: bill.pdf, application/pdf, 3 pages, {len(PDF)} bytes]"


@pytest.fixture
def file_settings() -> FileSettings:
    """Contents in rows."""
    return FileSettings()


@pytest.fixture
def openai_server() -> Iterator[OpenAIServer]:
    """A server of Chat Completions."""
    with OpenAIServer(player=lambda _: Answer("ok")) as server:
        yield server


@pytest.fixture
def endpoint() -> Iterator[Callable[..., EndpointModel]]:
    """Makes models of a server, which are closed after the test."""
    made: list[EndpointModel] = []

    def make(server: Any, kind: str = "openai", **given: Any) -> EndpointModel:
        made.append(EndpointModel(Endpoint("test", server.base_url, kind=kind, **given), "m", MovedClock()))
        return made[-1]

    yield make
    for each in made:
        each.close()


def asked(server: Any) -> Any:
    """The content of the last request's last message."""
    return server.requests[-1]["messages"][-1]["content"]


Making = Callable[..., EndpointModel]


class Reader:
    """A model that reads files of these types, and records what it gets."""

    name = "reader"

    def __init__(self, *media_types: str) -> None:
        self.reads = frozenset(media_types)
        self.requests: list[ModelRequest] = []
        self.too_long = 0

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply `ok`, or that the prompt is too long."""
        self.requests.append(request)
        if self.too_long:
            self.too_long -= 1
            raise ContextTooLong("too long")
        return ModelReply("ok")

    @property
    def last(self) -> Message:
        """The last message of the last prompt."""
        return self.requests[-1].messages[-1]


def test_chat_completions(harness: Harness, openai_server: OpenAIServer, endpoint: Making) -> None:
    """Images and PDFs are parts of the message, in the order of the user's parts."""
    harness.any_model = endpoint(openai_server, reads=("images", "pdf"))
    harness.ask("", parts=PARTS)
    assert asked(openai_server) == [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ENCODED['png']}"}},
        {"type": "text", "text": "and:"},
        {
            "type": "file",
            "file": {"filename": "bill.pdf", "file_data": f"data:{PDF_TYPE};base64,{ENCODED['pdf']}"},
        },
    ]


def test_messages(harness: Harness, endpoint: Making) -> None:
    """The same of Anthropic's protocol."""
    with AnthropicServer(player=lambda _: Answer("ok")) as server:
        harness.any_model = endpoint(server, "anthropic")
        harness.ask("", parts=PARTS)
        found = asked(server)
    assert [each["type"] for each in found] == ["text", "image", "text", "document"]
    assert found[1]["source"] == {"type": "base64", "media_type": "image/png", "data": ENCODED["png"]}
    assert (found[3]["source"]["data"], found[3]["title"]) == (ENCODED["pdf"], "bill.pdf")


@pytest.mark.exhaustive
def test_a_pdf_of_20_mb_reaches_a_model_that_reads_it(
    harness: Harness, openai_server: OpenAIServer, endpoint: Making
) -> None:
    """Each protocol has it whole."""
    large = base64.b64encode(pdf(3, size=20_000_000)).decode()
    parts = ({"type": "file", "data": large, "name": "book.pdf"},)
    harness.any_model = endpoint(openai_server, reads=("images", "pdf"))
    harness.ask("", parts=parts)
    assert [each["type"] for each in asked(openai_server)] == ["file"]
    assert asked(openai_server)[0]["file"]["file_data"] == f"data:{PDF_TYPE};base64,{large}"
    with AnthropicServer(player=lambda _: Answer("ok")) as server:
        harness.any_model = endpoint(server, "anthropic")
        harness.ask("", parts=parts)
        assert asked(server)[-1]["source"]["data"] == large


def test_a_server_of_unknown_models_gets_images_but_no_pdf(
    harness: Harness, openai_server: OpenAIServer, endpoint: Making
) -> None:
    """The PDF is described in its place."""
    harness.any_model = endpoint(openai_server)
    harness.ask("", parts=PARTS)
    assert asked(openai_server)[2] == {"type": "text", "text": f"and:\n{BILL[:-1]}; its content is not shown here]"}


def test_a_server_that_refuses_images_is_asked_without(
    harness: Harness, openai_server: OpenAIServer, endpoint: Making
) -> None:
    """The next request is made without them at once."""
    harness.any_model = endpoint(openai_server)
    openai_server.script(Status(400, message="image input is not supported - you may need to provide the mmproj"))
    turn = harness.ask("", parts=PARTS[:2])
    assert turn["status"] == "done"
    assert asked(openai_server) == f"Look:\n{CAT}"
    sent = len(openai_server.requests)
    harness.ask("", parts=PARTS[:2])
    assert len(openai_server.requests) == sent + 1


def test_a_server_that_refuses_one_image_gets_the_next(
    harness: Harness, openai_server: OpenAIServer, endpoint: Making
) -> None:
    """A refusal that concerns an image itself does not concern all images."""
    harness.any_model = endpoint(openai_server)
    openai_server.script(Status(400, message="the image exceeds 5 MB"))
    harness.ask("", parts=PARTS[:2])
    assert asked(openai_server) == f"Look:\n{CAT}"
    harness.ask("", parts=PARTS[:2])
    assert isinstance(asked(openai_server), list)


def test_a_model_that_reads_no_files_reads_text(harness: Harness) -> None:
    """A text file is text for every model. Other files are described: name, type, size."""
    note = {"type": "file", "data": base64.b64encode(b"milk\neggs").decode(), "name": "list.txt"}
    harness.ask("", parts=[PARTS[1], note])
    content = harness.model.requests[-1].messages[-1].content
    assert content == (
        f"{CAT[:-1]}; its content is not shown here]\n"
        "[file: list.txt, text/plain, 9 bytes]\nmilk\neggs\n[end of the file]"
    )


def test_a_later_turn_still_has_the_files(harness: Harness) -> None:
    """As far as they fit the budget of files; the newest first."""
    reader = harness.any_model = Reader("image/png")
    harness.ask("", parts=[PARTS[1]])
    harness.ask("and now?")
    [first] = [each for each in reader.requests[-1].messages if each.files]
    assert (first.role, first.files[0].data) == (Role.USER, IMAGE)
    harness.settings = harness.settings.model_copy(update={"memory": MemorySettings(budget_files=1)})
    harness.ask("and now?")
    assert not any(each.files for each in reader.requests[-1].messages)
    harness.ask("", parts=[PARTS[1]])
    assert reader.last.files, "the present turn's files are sent, whatever the budget"


def test_a_prompt_that_is_too_long_is_built_without_files(harness: Harness) -> None:
    """A PDF of many pages may not fit a model. Then it is described."""
    reader = harness.any_model = Reader("application/pdf")
    reader.too_long = 1
    turn = harness.ask("", parts=[PARTS[3]])
    assert turn["status"] == "done"
    assert [len(request.messages[-1].files) for request in reader.requests] == [1, 0]


def test_a_prompt_has_a_limited_number_of_bytes(harness: Harness) -> None:
    """The files that do not fit are described, the older ones first."""
    reader = harness.any_model = Reader("image/png")
    small = harness.settings.files.model_copy(update={"prompt_bytes": len(IMAGE) + 10})
    harness.settings = harness.settings.model_copy(update={"files": small})
    other = {"type": "image", "data": base64.b64encode(png(641, 480)).decode()}
    harness.ask("", parts=[other, PARTS[1]])
    assert [each.data for each in reader.last.files] == [IMAGE]


def test_tokens_are_estimated(harness: Harness) -> None:
    """The transcript counts 40 tokens a file, one for 750 pixels, and 2,000 a page."""
    turn = harness.ask("", parts=PARTS)
    counted = harness.sql("SELECT token_count FROM messages WHERE role = 'user'")[0].token_count
    assert turn["status"] == "done"
    assert counted == len("Look:\nand:") // 3 + 4 + 2 * 40 + 640 * 480 // 750 + 3 * 2_000


def test_a_file_that_was_erased_is_described(harness: Harness) -> None:
    harness.ask("", parts=[PARTS[1]])
    harness.sql("DELETE FROM files")
    harness.ask("and now?")
    assert spoken(harness.model.requests[-1])[0].content == f"{CAT[:-1]}; it is no longer stored]"
