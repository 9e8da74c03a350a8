"""A provider accepts the prompt of any transcript."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.files.store import Files
from perdure.models.protocol import Message, ModelReply, ModelRequest, Opaque, Role, ToolCall, Usage
from perdure.models.providers.chat_wire import request_body
from perdure.settings import FileSettings
from perdure.text.untrusted import storable
from perdure.turns.prompt.build import Prompt, fitting_entries
from perdure.turns.prompt.files import FileLimits
from perdure.turns.prompt.window import shortened
from perdure.turns.run.verdict import result_entries
from perdure.turns.transcript import Entry, Transcript, reply_entry, result_of
from tests.models.openai_server import validate_transcript

WORKING_BUDGET_TOKENS = 40_000

texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="\x00\ud800\udc00a😀", max_size=6),
    st.integers(0, WORKING_BUDGET_TOKENS).map(lambda tokens: "x" * 3 * tokens),
)
ids = st.sampled_from(["a", "a", "call_1", "", "a_2", "\x00", "é" * 60, "x" * 100])
tool_calls = st.builds(
    ToolCall,
    id=ids,
    name=st.one_of(st.sampled_from(["double", "", "no such tool", "ü" * 80]), st.text(max_size=5)),
    arguments=st.one_of(st.sampled_from(["", "{}", '{"a": 1}', "{", "[1]", "NaN", '{"a": NaN}', "null"]), texts),
)
replies = st.builds(
    ModelReply,
    content=texts,
    tool_calls=st.lists(tool_calls, max_size=5).map(tuple),
    usage=st.builds(Usage, st.integers(0, 9), st.integers(0, 9)),
    model=st.text(max_size=3),
)


@st.composite
def turns(draw: st.DrawFn, turn_id: UUID) -> list[Entry]:
    """Generate the entries of a turn: one to three user messages, up to three steps, and an ending."""
    entries = [Entry(turn_id, Role.USER, storable(draw(texts))) for _ in range(draw(st.integers(1, 3)))]
    for reply in draw(st.lists(replies.filter(lambda each: bool(each.tool_calls)), max_size=3)):
        open_reply = reply_entry(turn_id, reply)
        entries.append(open_reply)
        entries += [result_of(turn_id, call, draw(texts)) for call in open_reply.tool_calls]
    ending = draw(st.sampled_from(["replied", "cancelled", "closed"]))
    if ending == "replied":
        entries.append(reply_entry(turn_id, ModelReply(draw(texts))))
    if ending == "closed":
        open_reply = reply_entry(turn_id, draw(replies))
        entries.append(open_reply)
        entries += result_entries(open_reply, ["unknown"] * len(open_reply.tool_calls))
    return entries


UNUSED = Files(Database("postgresql://"), FileSettings(), MovedClock())


@st.composite
def transcripts(draw: st.DrawFn) -> list[list[Entry]]:
    """Generate the entries of one to six turns, with sequence numbers."""
    made = [draw(turns(UUID(int=number))) for number in range(1, draw(st.integers(1, 6)) + 1)]
    return _numbered(made)


def _numbered(made: Sequence[Sequence[Entry]]) -> list[list[Entry]]:
    number = 0
    numbered: list[list[Entry]] = []
    for turn in made:
        fresh = Transcript(turn[0].turn_id, [])
        fresh.committed(turn, number)
        number += len(turn)
        numbered.append(fresh.present)
    return numbered


def _prompt(made: Sequence[Sequence[Entry]]) -> tuple[Message, ...]:
    transcript = Transcript(made[-1][0].turn_id, [entry for turn in made for entry in turn])
    return Prompt(("You help.",), "It is noon.", (), WORKING_BUDGET_TOKENS, "the code").messages(
        fitting_entries(transcript, WORKING_BUDGET_TOKENS), UNUSED, FileLimits((), 0, 0), UserKey("ana")
    )


@pytest.mark.exhaustive
@given(transcripts())
def test_every_prompt_is_one_that_a_provider_accepts(made: list[list[Entry]]) -> None:
    """A provider accepts each prompt, whatever the model wrote and whatever was cut to fit the token budget."""
    assert validate_transcript(request_body("m", ModelRequest(_prompt(made)))["messages"]) == []


@given(transcripts())
def test_a_prompt_consists_of_the_newest_turns(made: list[list[Entry]]) -> None:
    """A prompt has complete, consecutive turns. They fit the token budget, unless the newest turn alone exceeds it.

    The note stands before the newest turn.
    """
    system, *said = _prompt(made)
    assert system == Message(Role.SYSTEM, "You help.")
    assert said.index(Message(Role.SYSTEM, "It is noon.")) == len(said) - len(made[-1]) - 1
    kept = [each for each in said if each.role is not Role.SYSTEM]
    made = [*made[:-1], shortened(made[-1], WORKING_BUDGET_TOKENS // 2)]
    suffixes = [[entry for turn in made[start:] for entry in turn] for start in range(len(made))]
    matching = [each for each in suffixes if [entry.message for entry in each] == kept]
    assert matching, "a prompt is the end of the transcript, from the beginning of a turn"
    spent = sum(entry.token_count for entry in matching[0])
    assert spent <= WORKING_BUDGET_TOKENS or matching[0] == made[-1]


@given(transcripts())
def test_no_turn_that_fits_is_left_out(made: list[list[Entry]]) -> None:
    """The prompt contains as many turns as the token budget allows."""
    kept = len(_prompt(made)) - 2
    fitting = 0
    spent = 0
    made = [*made[:-1], shortened(made[-1], WORKING_BUDGET_TOKENS // 2)]
    for turn in reversed(made):
        spent += sum(entry.token_count for entry in turn)
        if fitting and spent > WORKING_BUDGET_TOKENS:
            break
        fitting += len(turn)
    assert kept == fitting


@given(replies)
def test_a_models_reply_can_be_stored_and_has_unique_call_ids(reply: ModelReply) -> None:
    """Each call has an id that is unique within the reply. PostgreSQL can store every text of the reply."""
    entry = reply_entry(UUID(int=1), reply)
    call_ids = [call.id for call in entry.tool_calls]
    assert len(set(call_ids)) == len(call_ids) == len(reply.tool_calls)
    assert all(call_ids)
    parts = [part for call in entry.tool_calls for part in (call.id, call.name, call.arguments)]
    assert all(storable(text) == text for text in [entry.content, entry.model or "", *parts])


@given(st.lists(replies, min_size=1, max_size=4))
def test_steps_and_usage_are_those_of_the_present_turn(given_replies: list[ModelReply]) -> None:
    """A transcript's `steps` and `usage` do not include earlier turns."""
    earlier, present = UUID(int=1), UUID(int=2)
    entries = [Entry(earlier, Role.USER, "x"), reply_entry(earlier, given_replies[0])]
    entries += [reply_entry(present, each) for each in given_replies]
    transcript = Transcript(present, entries)
    assert transcript.steps == len(given_replies)
    assert transcript.usage == sum((each.usage or Usage() for each in given_replies), Usage())


def test_what_a_provider_gets_back_counts_as_tokens() -> None:
    """Thoughts that are sent back take room in the prompt, although nobody sees them."""
    bare = reply_entry(UUID(int=1), ModelReply("Yes."))
    thought = reply_entry(
        UUID(int=1), ModelReply("Yes.", opaque=Opaque("x", "y", {"reasoning_content": "hm " * 1_000}))
    )
    assert thought.token_count > bare.token_count + 900
