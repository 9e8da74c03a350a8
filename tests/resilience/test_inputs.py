"""Errors that a model's input causes: no retry, no failure in the breaker, and no fallback around a content filter."""

from __future__ import annotations

import pytest

from perdure.errors import ContentFiltered, IncompleteReply, InvalidResponse, ProviderError
from perdure.models.endings import ended_properly
from perdure.models.protocol import ModelReply, ToolCall
from tests.resilience.test_models import DOWN, REQUEST, Harness, Line, Scripted, harness

__all__ = ["harness"]


@pytest.mark.parametrize(
    "line",
    [
        ContentFiltered("no"),
        ModelReply("", stop_reason="content_filter"),
        ModelReply("half of it", stop_reason="safety"),
        ModelReply("", stop_reason="refusal"),
        ModelReply("half of it", (ToolCall("a", "f", "{}"),), stop_reason="content_filter"),
        ModelReply("I cannot", (ToolCall("a", "f", "{}"),), stop_reason="refusal"),
    ],
    ids=repr,
)
def test_a_content_filter_is_no_outage(harness: Harness, line: Line) -> None:
    """A filter's refusal is not retried, counted or answered by another model. It withdraws the streamed text."""
    model, other = Scripted("a", line), Scripted("b", "yes")
    for resilient in (harness.resilient(model, other), harness.resilient(Scripted("x", DOWN), model, other)):
        model.requests.clear()
        with pytest.raises(ContentFiltered):
            resilient.respond(REQUEST, harness.call())
        assert (len(model.requests), other.requests) == (1, [])
        assert "".join(harness.streamed).rpartition("<rewind>")[2] == ""
    assert harness.failures("a") == 0


@pytest.mark.parametrize("reason", ["length", "max_tokens", "a reason of next year"])
def test_an_empty_reply_with_a_reason_is_no_failure_of_the_provider(harness: Harness, reason: str) -> None:
    """It is not retried and not counted. The error names the reason without the provider's punctuation."""
    model = Scripted("a", ModelReply(" ", stop_reason=reason))
    with pytest.raises(IncompleteReply, match=r"limit of tokens|areasonofnextyear"):
        harness.guard(model).respond(REQUEST, harness.call())
    assert (len(model.requests), harness.failures("a")) == (1, 0)


@pytest.mark.parametrize("reason", ["stop", "", "error"])
def test_an_empty_reply_without_a_reason_is_a_failure_of_the_provider(harness: Harness, reason: str) -> None:
    """It is retried and counted, as before."""
    model = Scripted("a", ModelReply("", stop_reason=reason))
    with pytest.raises((InvalidResponse, ProviderError)):
        harness.guard(model).respond(REQUEST, harness.call())
    assert len(model.requests) > 1
    assert harness.failures("a") == 1


@pytest.mark.parametrize("reason", ["end", "done", "Completed"])
def test_servers_spell_a_proper_end_in_their_own_way(reason: str) -> None:
    """The calls of such a reply run."""
    assert ended_properly(ModelReply("", (ToolCall("a", "f", "{}"),), stop_reason=reason))


def test_a_reply_without_a_reason_is_complete(harness: Harness) -> None:
    """A third party's model may set its `stop_reason` to `None`, as its provider's field."""
    reply = ModelReply("hello", stop_reason=None)  # type: ignore[arg-type]
    assert harness.guard(Scripted("a", reply)).respond(REQUEST, harness.call()) is reply
    assert ended_properly(reply)
