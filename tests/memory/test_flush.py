"""A flush copies turns from Redis to PostgreSQL if PostgreSQL lacks them.

It writes each turn exactly once, only under the session's current token, and only if the transcript is valid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure import tool
from perdure.database.fencing import Fence
from perdure.errors import Unavailable
from perdure.memory.consolidation.consolidate import read_conversation
from perdure.memory.redis.flush import Blocked, Flushed, FlushOutcome, Stale, flush, transcript_fault
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.working import RememberedMessage
from perdure.models.protocol import Role
from perdure.turns.calls.client import read_additions
from perdure.turns.inbox.accept import Accepted
from perdure.turns.run.remember import remember
from perdure.turns.run.verdict import Verdict
from perdure.turns.transcript import Transcript
from tests.memory.conftest import Remembered, line
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import UNREPORTED, calls, says

TOOL_CALL = {"id": "call_1", "name": "read", "arguments": "{}"}
CALL_MESSAGE = line(Role.ASSISTANT, tool_calls=[TOOL_CALL])
RESULT = line(Role.TOOL, "42", tool_call_id="call_1")
REPLY = line(Role.ASSISTANT, "42")
SETTLED = "SELECT turn_id, seq, agent, channel, status, steps, first_seq, reply_seq, usage FROM turns ORDER BY seq"
SETTLED_BEFORE = Verdict(
    "done", [], replied=True, steps=1, usage={}, error_code=None, error_message=None, variables=None
)
LOSE_TURNS = """
    WITH a AS (DELETE FROM inbox WHERE text <> 'hello'), b AS (DELETE FROM tool_effects),
         c AS (DELETE FROM messages WHERE seq > 2), d AS (DELETE FROM message_words WHERE seq > 2),
         e AS (DELETE FROM unembedded WHERE seq > 2), f AS (DELETE FROM turns WHERE seq > 1)
    UPDATE sessions SET message_count = 2, last_turn_seq = 1, turn_count = 1, tick = 1, token = 1
"""


@tool(effect="pure")
def read() -> str:
    """Read."""
    return "42"


class Session:
    """A session with one settled turn, and its working memory in Redis."""

    def __init__(self, harness: Harness, redis_memory: RedisMemory) -> None:
        self.harness = harness
        self.redis_memory = redis_memory
        self.id = harness.send("hello").session_id
        harness.run(self.id)

    @property
    def token(self) -> int:
        """The session's current token."""
        token: int = self.harness.session(self.id).token
        return token

    def keep(self, *turns: Any) -> None:
        """Store turns in Redis, but not in PostgreSQL."""
        for turn in turns:
            assert self.redis_memory.working.remember_turn(self.id, turn)

    def remember(self, sent: Accepted) -> None:
        """Run the turn of the message `sent`, and add the turn to working memory in Redis."""
        self.harness.run(self.id)
        tenure = self.harness.tenure_of(sent.turn_id)
        transcript = Transcript.load(self.harness.database, tenure.at_hand)
        runtime = replace(self.harness.runtime, redis_memory=self.redis_memory)
        additions = read_additions(self.harness.database, sent.turn_id)
        remember(runtime, replace(tenure.at_hand, additions=additions), transcript, SETTLED_BEFORE, token=tenure.token)

    @property
    def fence(self) -> Fence:
        """The session's current fence."""
        row = self.harness.session(self.id)
        return Fence(row.token, row.nonce)

    def flush(self, fence: Fence | None = None) -> FlushOutcome:
        """Flush, by default under the current fence."""
        return flush(self.harness.database, self.redis_memory.working, self.id, self.fence if fence is None else fence)

    @property
    def transcript(self) -> list[dict[str, Any]]:
        """The messages of the transcript in PostgreSQL."""
        return self.harness.messages(self.id)

    @property
    def said(self) -> list[str]:
        """The texts of the transcript in PostgreSQL."""
        return [content for _, content in self.harness.lines(self.id)]


@pytest.fixture
def session(harness: Harness, redis_memory: RedisMemory) -> Session:
    """A session with one settled turn."""
    return Session(harness, redis_memory)


def test_missing_turns_are_written_once(harness: Harness, session: Session, remembered: Remembered) -> None:
    """The first flush appends two turns to the session as settled turns. A second flush has nothing to write."""
    first, second = remembered(session.token), remembered(session.token, channel="web")
    session.keep(first, second)
    assert session.flush() == Flushed(2)
    before = harness.session(session.id)
    assert session.flush() == Flushed(0)
    assert harness.session(session.id) == before
    assert session.said == ["hello", "ok", "question 1", "answer to question 1", "question 2", "answer to question 2"]
    assert (before.turn_count, before.message_count, before.last_turn_seq, before.unsettled) == (3, 6, 3, 0)
    assert (before.channels, before.state, before.tick) == (["http", "cli", "web"], "active", 3)
    shown = harness.turn(second.turn_id)
    assert (shown["status"], shown["seq"], shown["steps"]) == ("done", 3, 1)
    assert shown["reply"]["text"] == "answer to question 2"
    assert shown["usage"] == {**UNREPORTED, "input_tokens": 9, "output_tokens": 3}


@pytest.mark.parametrize("left_out", ["the message", "the conversation"])
def test_a_private_turn_is_written_back_as_private(harness: Harness, session: Session, left_out: str) -> None:
    """A lost turn with `remember: false`, or of a conversation that is left out, is neither searched nor remembered."""
    sent = harness.send("I own a secret castle.", remember=left_out != "the message")
    session.remember(sent)
    harness.sql(LOSE_TURNS)
    harness.sql("UPDATE sessions SET remember = %(remember)s", remember=left_out != "the conversation")
    assert session.flush() == Flushed(1)
    assert "I own a secret castle." in session.said
    assert [each.content for each in read_conversation(harness.database, session.id, 99)] == ["hello", "ok"]
    assert [row.seq for row in harness.sql("SELECT seq FROM message_words ORDER BY seq")] == [1, 2]


def test_the_conversation_continues_after_a_flush(harness: Harness, session: Session, remembered: Remembered) -> None:
    """After a flush, the next turn's prompt contains the flushed messages.

    The harness checks that a provider would accept the prompt.
    """
    session.keep(remembered(session.token))
    assert session.flush() == Flushed(1)
    harness.send("and now?")
    harness.run(session.id)
    prompt_texts = [each.content for each in harness.model.requests[-1].messages if each.role is not Role.SYSTEM]
    assert prompt_texts[-3:] == ["question 1", "answer to question 1", "and now?"]


def test_under_a_stale_token_nothing_is_written(harness: Harness, session: Session, remembered: Remembered) -> None:
    """A flush writes nothing if another process has claimed the session."""
    session.keep(remembered(session.token))
    before = (harness.counts(), harness.session(session.id))
    fence = session.fence
    others = (
        replace(fence, token=fence.token - 1),
        replace(fence, token=fence.token + 1),
        replace(fence, nonce=uuid4()),
    )
    for other in others:
        assert session.flush(other) == Stale()
    assert (harness.counts(), harness.session(session.id)) == before
    assert flush(harness.database, session.redis_memory.working, UUID(int=7), fence) == Flushed(0)


def test_a_claim_during_the_flush_stops_it(harness: Harness, session: Session, remembered: Remembered) -> None:
    """A flush compares Redis with PostgreSQL, and then writes the missing turns.

    If another worker claims the session between these two steps, nothing is written.
    """
    session.keep(remembered(session.token))
    before = harness.counts()

    def overtaken(moment: str, name: str) -> None:
        if (moment, name) == ("before", "memory.flush"):
            harness.sql("UPDATE sessions SET token = token + 1 WHERE session_id = %(id)s", id=session.id)

    fence = session.fence
    with harness.hooked(overtaken):
        assert session.flush(fence) == Stale()
    assert harness.counts() == before


def test_an_unsettled_turn_blocks_the_flush(harness: Harness, session: Session, remembered: Remembered) -> None:
    """While a turn is unsettled, a flush writes nothing. Once it is settled, a flush writes the missing turns."""
    session.keep(remembered(session.token))
    sent = False

    def accepted(moment: str, name: str) -> None:
        nonlocal sent
        if (moment, name) == ("before", "memory.flush") and not sent:
            sent = True
            harness.send("another")

    with harness.hooked(accepted):
        assert session.flush() == Blocked(1)
    assert session.said == ["hello", "ok"]
    harness.run(session.id)
    assert session.flush() == Flushed(1)
    assert session.said == ["hello", "ok", "another", "ok", "question 1", "answer to question 1"]


def test_concurrent_flushes_write_once(harness: Harness, session: Session, remembered: Remembered) -> None:
    """If several processes flush a session concurrently, only one of them writes the turns."""
    session.keep(remembered(session.token), remembered(session.token))
    fence = session.fence
    found = side_by_side(*[lambda: session.flush(fence)] * 4)
    assert sorted(each.written for each in found) == [0, 0, 0, 2]
    assert len(session.said) == 6


def test_an_outdated_entry_is_refused(
    harness: Harness, session: Session, remembered: Remembered, caplog: pytest.LogCaptureFixture
) -> None:
    """A turn that a paused worker remembered is refused if PostgreSQL has a turn with a higher token."""
    (known,) = harness.sql("SELECT turn_id FROM turns WHERE session_id = %(id)s", id=session.id)
    stale, good = remembered(1), remembered(2)
    session.keep(stale, remembered(2, turn_id=known.turn_id), good)
    assert session.flush() == Flushed(1, refused=1)
    assert session.said == ["hello", "ok", "question 2", "answer to question 2"]
    assert str(stale.turn_id) in caplog.text


def test_a_message_that_was_sent_again_is_not_answered_twice(
    harness: Harness, session: Session, remembered: Remembered
) -> None:
    """If PostgreSQL lost a message's turn in a failover, the message can be sent and answered again.

    After the second answer, a flush refuses the lost turn, which Redis still has.
    """
    again = harness.send("question 1", message_id="message 1", channel="cli")
    harness.run(again.session_id)
    session.keep(remembered(session.token))
    assert session.flush() == Flushed(0, refused=1)
    assert session.said == ["hello", "ok", "question 1", "ok"]


def test_a_repeated_message_of_a_flushed_turn_is_a_duplicate(
    harness: Harness, session: Session, remembered: Remembered
) -> None:
    """A message that is sent again after its turn was flushed is reported as a duplicate."""
    turn = remembered(session.token)
    session.keep(turn)
    session.flush()
    again = harness.send("question 1", message_id="message 1", channel="cli")
    assert (again.duplicate, again.turn_id) == (True, turn.turn_id)


def test_nothing_is_written_to_an_ended_session(harness: Harness, session: Session, remembered: Remembered) -> None:
    """A flush writes nothing to an ended session, which is already summarised and waits for consolidation."""
    session.keep(remembered(session.token))
    harness.sql(
        "UPDATE sessions SET state = 'ended', ended_at = now(), routable = false WHERE session_id = %(id)s",
        id=session.id,
    )
    assert session.flush() == Stale()
    assert session.said == ["hello", "ok"]


def test_malformed_entries_do_not_stop_valid_ones(
    harness: Harness, session: Session, remembered: Remembered, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A malformed turn, or a turn that a provider would refuse, does not keep a flush from writing a valid turn."""
    client.rpush(f"perdure:working:{session.id}", '{"turn_id"')
    session.keep(
        remembered(session.token, messages=(line(Role.USER, "?"), line(Role.ASSISTANT, tool_calls=[TOOL_CALL]))),
        remembered(session.token, text="whole"),
    )
    assert session.flush() == Flushed(1, refused=1)
    assert session.said == ["hello", "ok", "whole", "answer to whole"]
    assert len([each for each in caplog.records if each.levelname == "ERROR"]) == 2


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_flush_continues_after_a_crash(
    moment: str, harness: Harness, session: Session, remembered: Remembered
) -> None:
    """If a flush crashes before or after its write, the next flush writes the turn only if it is missing."""
    session.keep(remembered(session.token))
    with harness.crashing("before" if moment == "before" else "after", "memory.flush"):
        session.flush()
    assert session.flush() == Flushed(1 if moment == "before" else 0)
    assert len(session.said) == 4


def test_turns_lost_in_a_failover_are_written_back(harness: Harness, session: Session) -> None:
    """A flush restores the turns and messages that PostgreSQL lost in a failover, without changing them."""
    harness.equip(read)
    harness.script(calls(("read", {})), says("it says 42"), says("good bye"))
    for text in ("look it up", "thanks"):
        session.remember(harness.send(text))
    before, messages = harness.session(session.id), session.transcript
    turns = harness.sql(SETTLED)
    harness.sql(LOSE_TURNS)
    assert session.flush() == Flushed(2)
    assert session.transcript == messages
    assert harness.sql(SETTLED) == turns
    after = harness.session(session.id)
    assert (after.turn_count, after.message_count, after.last_turn_seq) == (
        before.turn_count,
        before.message_count,
        before.last_turn_seq,
    )


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "begin"),
        ([line(Role.ASSISTANT, "hello")], "begin"),
        ([line(Role.USER, "?")], "reply"),
        ([line(Role.USER, "?"), line(Role.SYSTEM, "obey"), line(Role.ASSISTANT, "!")], "role"),
        ([line(Role.USER, "?", tool_calls=[TOOL_CALL]), line(Role.TOOL, tool_call_id="call_1"), REPLY], "role"),
        ([line(Role.USER, "?"), CALL_MESSAGE], "do not match"),
        ([line(Role.USER, "?"), CALL_MESSAGE, REPLY], "do not match"),
        ([line(Role.USER, "?"), CALL_MESSAGE, line(Role.TOOL, tool_call_id="call_2"), REPLY], "do not match"),
        ([line(Role.USER, "?"), line(Role.TOOL, tool_call_id="call_1"), REPLY], "do not match"),
        ([line(Role.USER, "?"), CALL_MESSAGE, RESULT, RESULT, REPLY], "do not match"),
        ([line(Role.USER, "?"), CALL_MESSAGE, line(Role.USER, "well?"), RESULT, REPLY], "do not match"),
        (
            [line(Role.USER, "?"), line(Role.ASSISTANT, tool_calls=[TOOL_CALL, TOOL_CALL]), RESULT, RESULT, REPLY],
            "do not match",
        ),
        ([line(Role.USER, "?"), CALL_MESSAGE, RESULT], "reply"),
    ],
)
def test_turns_that_a_provider_would_refuse_are_not_written(messages: list[RememberedMessage], why: str) -> None:
    """A turn that a provider would refuse is not written, because it would make every later prompt invalid."""
    found = transcript_fault(messages, replied=True)
    assert found is not None
    assert why in found


@pytest.mark.parametrize(
    ("messages", "replied"),
    [
        ([line(Role.USER, "?"), REPLY], True),
        ([line(Role.USER, "?"), line(Role.USER, "and?"), CALL_MESSAGE, RESULT, CALL_MESSAGE, RESULT, REPLY], True),
        ([line(Role.USER, "?")], False),
        ([line(Role.USER, "?"), CALL_MESSAGE, RESULT], False),
    ],
)
def test_turns_that_a_provider_accepts_are_written(messages: list[RememberedMessage], *, replied: bool) -> None:
    """`transcript_fault` accepts each transcript that a provider accepts. A cancelled turn needs no reply."""
    assert transcript_fault(messages, replied=replied) is None


def test_without_redis_a_flush_raises(harness: Harness, unreachable: RedisMemory) -> None:
    """If Redis cannot be reached, a flush raises `Unavailable`."""
    sent = harness.send()
    harness.run(sent.session_id)
    with pytest.raises(Unavailable, match="PERDURE_REDIS_URL"):
        flush(harness.database, unreachable.working, sent.session_id, Fence(1, uuid4()))


def test_a_shutdown_flush_returns_the_number_of_turns(
    harness: Harness, session: Session, remembered: Remembered, caplog: pytest.LogCaptureFixture
) -> None:
    """`RedisMemory.flush` returns the number of written turns.

    It returns `None` if the fence is stale or a turn is unsettled.
    """
    session.keep(remembered(session.token))
    assert session.redis_memory.flush(harness.database, session.id, Fence(session.token, uuid4())) is None
    harness.send("parked")
    assert session.redis_memory.flush(harness.database, session.id, session.fence) is None
    assert "once its unsettled turn is settled" in caplog.text
    harness.run(session.id)
    assert session.redis_memory.flush(harness.database, session.id, session.fence) == 1
