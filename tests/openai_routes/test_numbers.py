"""The events of a response have the same sequence numbers live and in a replay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseErrorEvent

from perdure.channels.http.openai.answers import AnswerEnded, Called, CommittedAnswer, Part, Text
from perdure.channels.http.openai.chat_completions import Completion
from perdure.channels.http.openai.responses import PIECE_CHARS, Response, pieces, stream
from perdure.turns.calls.client import Exchange

TURN: dict[str, Any] = {
    "turn_id": "01931e6f-5d6a-7c3e-9f64-6f1a3f0f2b11",
    "status": "done",
    "error": None,
    "usage": {"input_tokens": 3, "output_tokens": 2},
    "accepted_at": "2026-05-02T09:30:00+00:00",
}
EXCHANGE = Exchange(UUID(TURN["turn_id"]))
RESPONSE = Response(EXCHANGE, "assistant", None)
WORDS = st.text(alphabet=st.sampled_from(["a", "b", " ", "\n", "한", "😀"]), min_size=1, max_size=200)


CALL = Called('add {"a": 1}\n')


def _events(texts: Sequence[str | Called], after: int | None = None, *, ended: bool = True) -> list[dict[str, Any]]:
    """The events of an answer that consists of `texts`. With `after`, only the events with a higher sequence number."""

    async def parts() -> AsyncIterator[Part]:
        for text in texts:
            yield text if isinstance(text, Called) else Text(text)
        if ended:
            yield AnswerEnded(TURN, used=TURN["usage"])

    async def collect() -> list[bytes]:
        return [each async for each in stream(RESPONSE, TURN, parts(), after)]

    return [json.loads(each.split(b"\ndata: ", 1)[1]) for each in asyncio.run(collect())]


def _cut(text: str, at: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(each % (len(text) + 1) for each in at)})
    return [text[begin:end] for begin, end in pairwise(places)]


def _text(events: Sequence[dict[str, Any]]) -> str:
    return "".join(each["delta"] for each in events if each.get("type") == "response.output_text.delta")


@given(WORDS, st.lists(st.integers(0, 200)))
def test_live_and_replayed_events_are_equal(text: str, at: list[int]) -> None:
    """Live and replayed events are equal, regardless of the pieces in which the text arrives."""
    live, replayed = _events(_cut(text, at)), _events([text])
    assert live == replayed
    assert _text(live) == text
    numbers = [each["sequence_number"] for each in live]
    assert numbers == sorted(set(numbers))
    assert live[-1]["type"] == "response.completed"
    assert max(numbers) < 2**53


@given(WORDS, st.lists(st.integers(0, 200)), st.integers(0, 30))
def test_resuming_continues_after_any_event(text: str, at: list[int], which: int) -> None:
    """Resuming after any event returns exactly the remaining events."""
    everything = _events([text])
    last = everything[which % len(everything)]["sequence_number"]
    assert _events(_cut(text, at), last) == [each for each in everything if each["sequence_number"] > last]


@given(WORDS, WORDS, st.integers(0, 30))
def test_a_number_of_withdrawn_text_is_refused(text: str, other: str, which: int) -> None:
    """If a new text does not begin with the pieces already sent, resuming after the replaced text is an error."""
    withdrawn = [each for each in _events([text]) if each["type"] == "response.output_text.delta"]
    event = withdrawn[which % len(withdrawn)]
    before = text[: _position(withdrawn, event)]
    found = _events([other], event["sequence_number"])
    if before in {other[: len(each)] for each in _boundaries(other)}:
        assert found[-1]["type"] == "response.completed"
    else:
        assert [each["error"]["code"] for each in found] == ["stream_rewound"]


@given(WORDS, WORDS, st.lists(st.integers(0, 200)), st.integers(0, 40))
def test_calls_between_texts_have_numbers_of_their_own(text: str, second: str, at: list[int], which: int) -> None:
    """With tool calls between texts, live and replayed events are equal, and a client can resume after any event."""
    live = _events([*_cut(text, at), CALL, CALL, *_cut(second, at)])
    replayed = _events([text, CALL, CALL, second])
    assert live == replayed
    assert _text(live) == text + second
    numbers = [each["sequence_number"] for each in live]
    assert numbers == sorted(set(numbers))
    last = numbers[which % len(numbers)]
    resumed = _events([text, CALL, CALL, *_cut(second, at)], last)
    assert resumed == [each for each in live if each["sequence_number"] > last]
    assert [each["text"] for each in live if each["type"].endswith("summary_text.done")] == [CALL.line] * 2


def test_a_cut_off_answer_is_incomplete() -> None:
    """The last event and the response say that a limit of tokens cut the answer off, and the text is there."""
    turn = {**TURN, "reply": {"text": "half", "format": "text", "stop_reason": "length"}}

    async def parts() -> AsyncIterator[Part]:
        yield Text("half")
        yield AnswerEnded(turn, used=turn["usage"])

    async def collect() -> list[bytes]:
        return [each async for each in stream(RESPONSE, turn, parts(), None)]

    last = json.loads(asyncio.run(collect())[-1].split(b"\ndata: ", 1)[1])
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["content"][0]["text"] == "half"
    assert last["response"]["usage"]["total_tokens"] == 5


def test_a_completion_says_that_it_was_cut_off_and_what_is_estimated() -> None:
    """`finish_reason` is `length` for a text that was cut off. Usage that no server reported is marked."""
    completion = Completion("1", "assistant", 0)
    turn = {**TURN, "usage": None, "reply": {"text": "half", "format": "text", "stop_reason": "length"}}
    used = {"input_tokens": 5, "output_tokens": 2, "estimated": True}
    whole = completion.whole(turn, "half", used)
    assert whole["choices"][0]["finish_reason"] == "length"
    response = RESPONSE.body(turn, CommittedAnswer(turn, texts=["half"], used=used))
    for each in (whole, completion.usage_chunk(used), response):
        assert (each["usage"]["total_tokens"], each["usage"]["estimated"]) == (7, True)
    assert "estimated" not in completion.usage_chunk(TURN["usage"])["usage"]
    details = [
        completion.usage_chunk({**used, **each})["usage"]["prompt_tokens_details"]
        for each in ({}, {"cached_tokens": 0})
    ]
    assert details == [{"cached_tokens": None}, {"cached_tokens": 0}], "what no server reported is unknown"
    assert completion.whole(TURN, "all", None)["choices"][0]["finish_reason"] == "stop"


def _position(events: Sequence[dict[str, Any]], last: dict[str, Any]) -> int:
    return sum(len(each["delta"]) for each in events[: events.index(last) + 1])


def _boundaries(text: str) -> list[str]:
    found, so_far = [], ""
    for piece in pieces(text, whole=True):
        so_far += piece
        found.append(so_far)
    return found


@given(WORDS, st.integers(0, 200))
def test_pieces_of_a_beginning_are_those_of_the_whole(text: str, length: int) -> None:
    """Appending text does not change the pieces that were already sent."""
    whole, beginning = list(pieces(text, whole=True)), list(pieces(text[:length], whole=False))
    assert whole[: len(beginning)] == beginning
    assert "".join(whole) == text
    assert all(0 < len(piece) <= PIECE_CHARS for piece in whole)


def test_a_gateway_that_stops_ends_with_an_error() -> None:
    """A draining gateway ends the stream with an error, because the answer would otherwise look complete."""
    found = _events(["half an "], ended=False)
    assert found[-1]["error"]["code"] == "gateway_stopping"


@pytest.mark.parametrize(("after", "code"), [(None, "gateway_stopping"), (10**11, "stream_rewound")])
def test_an_error_is_an_event_of_openai(after: int | None, code: str) -> None:
    """It has the next number, also where the client's number is unknown, and the members that typed clients require."""
    *before, found = _events(["half an "], after, ended=False) if after is None else _events(["half an "], after)
    event = ResponseErrorEvent.model_validate(found, strict=True)
    assert (event.code, event.message, event.param) == (code, found["error"]["message"], None)
    assert event.sequence_number == (before[-1]["sequence_number"] if before else after or 0) + 1


@given(WORDS, WORDS)
def test_resuming_after_an_error(text: str, more: str) -> None:
    """A client whose gateway has stopped goes on after the number of the error, as after the event before it."""
    *before, error = _events([text], ended=False)
    resumed = _events([text + more], error["sequence_number"])
    assert resumed == _events([text + more], before[-1]["sequence_number"])
