"""`remember` writes a settled turn to working memory. It adds a change of channel to the user's event stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perdure.access.tenants import UserKey
from perdure.ids import new_id
from perdure.memory.redis.memory import RedisMemory
from perdure.models.protocol import Role
from perdure.turns.lease.tenure import Before, TurnRow
from perdure.turns.run.remember import remember
from perdure.turns.run.verdict import Verdict
from perdure.turns.transcript import Entry, Transcript
from tests.turns.harness import Harness


def _settled(
    harness: Harness, redis_memory: RedisMemory | None, *, before: Before | None = None, **verdict: Any
) -> TurnRow:
    """Call `remember` for a turn with one committed question and a reply; returns the turn.

    `verdict` overrides fields of the verdict "done".
    """
    turn_id = new_id(harness.clock)
    ref = TurnRow(turn_id, turn_id, 4, UserKey("ana"), "assistant", "web", 9, None, before or Before())
    question = Entry(ref.turn_id, Role.USER, "hello", message_id="m", created_at=harness.clock.now(), seq=9)
    reply = Entry(ref.turn_id, Role.ASSISTANT, "hi", model="scripted").to_dict(1)
    done = Verdict(
        "done", [reply], replied=True, steps=1, usage={}, error_code=None, error_message=None, variables=None
    )
    remember(
        replace(harness.runtime, redis_memory=redis_memory),
        ref,
        Transcript(ref.turn_id, [question]),
        replace(done, **verdict),
        token=7,
    )
    return ref


@pytest.mark.parametrize(
    ("verdict", "lines"),
    [
        ({}, ["hello", "hi"]),
        ({"status": "failed", "error_code": "TIMEOUT", "error_message": "too late"}, ["hello", "hi"]),
        ({"status": "cancelled", "messages": [], "replied": False}, ["hello"]),
    ],
    ids=["done", "failed", "cancelled"],
)
def test_a_turn_is_remembered_as_it_was_settled(
    verdict: dict[str, Any], lines: list[str], harness: Harness, redis_memory: RedisMemory
) -> None:
    """Working memory contains the turn's messages, its status and the fencing token of its commit."""
    ref = _settled(harness, redis_memory, **verdict)
    (turn,) = redis_memory.working.read(ref.turn_id)
    assert (turn.turn_id, turn.seq, turn.token, turn.channel) == (ref.turn_id, 4, 7, "web")
    assert (turn.status, turn.error_code) == (verdict.get("status", "done"), verdict.get("error_code"))
    assert [line.content for line in turn.messages] == lines
    assert turn.messages[0].message_id == "m"
    assert redis_memory.stream.recent(UserKey("ana"), 5) == []


def test_a_switch_of_the_channel_is_on_the_stream(harness: Harness, redis_memory: RedisMemory) -> None:
    """If a turn's channel differs from the previous turn's, one `channel_switch` event is added to the stream."""
    _settled(harness, redis_memory, before=Before(channel="web"))
    _settled(harness, redis_memory, before=Before(channel="cli"))
    (event,) = redis_memory.stream.recent(UserKey("ana"), 5)
    assert (event.kind, event.channel) == ("channel_switch", "web")


def test_nothing_to_remember_and_no_redis_are_no_errors(
    harness: Harness, redis_memory: RedisMemory, unreachable: RedisMemory, client: Any
) -> None:
    """`remember` does not raise if the turn has no messages, or if Redis is unavailable or not configured."""
    _settled(harness, None)
    _settled(harness, unreachable)
    ref = TurnRow(new_id(harness.clock), new_id(harness.clock), 4, UserKey("ana"), "assistant", "web", 9, None)
    silent = Verdict(
        "cancelled", [], replied=False, steps=0, usage={}, error_code=None, error_message=None, variables=None
    )
    runtime = replace(harness.runtime, redis_memory=redis_memory)
    remember(runtime, ref, Transcript(ref.turn_id, []), silent, token=1)
    assert client.keys() == []
