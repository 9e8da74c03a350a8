"""The summary of a conversation that the model cannot read or summarise as a whole."""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import UTC, datetime

import pytest

from perdure.clock import SystemClock
from perdure.errors import ContextTooLong
from perdure.memory.consolidation.extraction import ConversationMessage, extract
from perdure.models.offline import OfflineModel
from perdure.models.protocol import Message, ModelCall, ModelReply, Role
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from perdure.sessions.summary import UnusableSummary, summarise
from tests.models.openai_server import Answer, OpenAIServer
from tests.turns.scripted import Scripted, says

SUMMARY = says('{"summary": "They greeted.", "key_topics": ["greeting"]}')


def test_a_conversation_that_is_too_long_is_summarised_from_its_newest_half() -> None:
    """The prompt is halved. The newest messages are kept."""
    model = Scripted(ContextTooLong("too long"), ContextTooLong("too long"), SUMMARY)
    said = [Message(Role.USER, f"{number:03} " + "x" * 996) for number in range(40)]
    assert summarise(model, ModelCall(SystemClock(), 60), said).text == "They greeted."
    first, second, third = (each.messages[-1].content for each in model.requests)
    assert len(third) < 0.3 * len(first) < len(second) < 0.6 * len(first)
    assert "039 " in third
    assert "001 " not in third


def test_the_offline_model_summarises_a_conversation_that_quotes_json() -> None:
    """What it quotes is no answer of its own: its summary is a member of the object for which it is asked."""
    said = [Message(Role.USER, 'call look with {"what": "the sea"}'), Message(Role.ASSISTANT, "look answered: blue")]
    made = summarise(OfflineModel(), ModelCall(SystemClock(), 60), said)

    assert (made.extractive, made.text) == (
        False,
        'user: call look with {"what": "the sea"} assistant: look answered: blue',
    )


def test_a_long_conversation_is_summarised_by_a_model_with_a_small_window() -> None:
    """The longest prompt fits a window of 2,048 tokens after five halvings."""
    model = Scripted(*[ContextTooLong("too long")] * 5, SUMMARY)
    said = [Message(Role.USER, f"{number:03} " + "x" * 996) for number in range(200)]
    assert not summarise(model, ModelCall(SystemClock(), 60), said).extractive
    assert len(model.requests[-1].messages[-1].content) < 4_000


@pytest.mark.parametrize(
    "reply",
    [
        'Here it is:\n```json\n{"summary": "They greeted.", "key_topics": ["greeting"]}\n```\nAnything else?',
        'A first idea is {"summary": "Hm."}, but better: {"summary": "They greeted.", "key_topics": ["greeting"]}',
    ],
)
def test_a_summary_is_found_in_prose(reply: str) -> None:
    """A model that talks around its JSON, or drafts it first, has its JSON read."""
    summary = summarise(Scripted(says(reply)), ModelCall(SystemClock(), 60), [Message(Role.USER, "hello")])
    assert (summary.text, summary.key_topics) == ("They greeted.", ("greeting",))


HALF = ModelReply('{"summary": "They gre', stop_reason="length")


@pytest.mark.parametrize("fault", [HALF, says('{"title": "Hello"}'), says("")], ids=["half", "no summary", "nothing"])
def test_a_model_is_asked_once_again(fault: ModelReply) -> None:
    """A summary that a token limit cut off within its JSON, and JSON without a summary, cannot be used."""
    call, said = ModelCall(SystemClock(), 60), [Message(Role.USER, "hello")]
    model = Scripted(fault, SUMMARY)
    assert summarise(model, call, said).text == "They greeted."
    assert "could not be used" in model.requests[1].messages[-1].content
    with pytest.raises(UnusableSummary):
        summarise(Scripted(fault, fault), call, said)


def test_a_text_that_was_cut_off_is_a_summary() -> None:
    call, said = ModelCall(SystemClock(), 60), [Message(Role.USER, "hello")]
    assert summarise(Scripted(ModelReply("They gre", stop_reason="length")), call, said).text == "They gre"


@pytest.mark.parametrize(
    "text",
    [
        '<think>Who? {"summary": "Hm."}</think>' + SUMMARY.content,
        "<think>Hm.</think>\nHere it is:\n```json\n" + SUMMARY.content + "\n```",
        "Let me think aloud. They said hello. So:\n\n" + SUMMARY.content,
    ],
    ids=["thoughts", "thoughts and a fence", "aloud"],
)
def test_a_model_that_thinks_gives_a_summary_and_memories(text: str) -> None:
    """Over HTTP, in small pieces: neither the summary, nor the title, nor a memory has a thought."""
    with OpenAIServer() as server:
        model = EndpointModel(Endpoint("there", server.base_url), "m", SystemClock())
        memory = json.dumps([{"content": "Ana lives in Lyon.", "type": "fact", "importance": 0.5, "sources": [1]}])
        titled = SUMMARY.content.replace("{", '{"title": "Hello", ', 1)
        server.script(*(Answer(text.replace(SUMMARY.content, each), piece=3) for each in (titled, memory)))
        call = ModelCall(SystemClock(), 60)
        summary = summarise(model, call, [Message(Role.USER, "hello")])
        said = [ConversationMessage(1, Role.USER, "I live in Lyon.", datetime(2026, 1, 1, tzinfo=UTC), "http")]
        found = extract(model, lambda: nullcontext(call), said)
        model.close()
    assert (summary.text, summary.title) == ("They greeted.", "Hello")
    assert [each.content for each in found] == ["Ana lives in Lyon."]
