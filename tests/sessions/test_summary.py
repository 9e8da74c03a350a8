"""The summary of a conversation that the model cannot read or summarise as a whole."""

from __future__ import annotations

import pytest

from perdure.clock import SystemClock
from perdure.errors import ContextTooLong, IncompleteReply
from perdure.models.protocol import Message, ModelCall, ModelReply, Role
from perdure.sessions.summary import summarise
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


def test_half_of_a_json_summary_is_none() -> None:
    """A summary that a token limit cut off within its JSON is refused; a cut text is still a summary."""
    call, said = ModelCall(SystemClock(), 60), [Message(Role.USER, "hello")]
    with pytest.raises(IncompleteReply):
        summarise(Scripted(ModelReply('{"summary": "They gre', stop_reason="length")), call, said)
    assert summarise(Scripted(ModelReply("They gre", stop_reason="length")), call, said).text == "They gre"
