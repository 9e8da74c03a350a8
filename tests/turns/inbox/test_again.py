"""A failed or cancelled turn is tried again as a new turn of its conversation."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from perdure import Agent, agent_tool, required
from perdure.agents import Agents
from perdure.errors import Conflict, GuardRejected, NotFound, ProviderError
from perdure.hooks import TurnContext
from perdure.sessions.forking import fork
from perdure.turns.additions import Additions
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.again import retry
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.run.verdict import WITHHELD
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

BROKEN = ProviderError("The model is gone.")
FILE = {"type": "file", "data": base64.b64encode(b"a note").decode(), "name": "a.txt"}


def _failed(harness: Harness, **given: Any) -> Any:
    harness.script(BROKEN)
    sent = harness.send(**given)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "failed"
    return sent


def test_it_has_what_the_turn_had(harness: Harness) -> None:
    """Text, files, metadata, receiver and agent; and as often as it is asked for, one new turn."""
    sent = _failed(
        harness,
        parts=[{"type": "text", "text": "read"}, FILE],
        metadata={"order": 7},
        reply_to={"url": "https://a.example/hook"},
        conversation="orders",
        priority=8,
        agent="assistant",
    )
    again = retry(harness.runtime, sent.turn_id)
    assert (again.session_id, again.duplicate) == (sent.session_id, False)
    assert retry(harness.runtime, sent.turn_id).turn_id == again.turn_id
    harness.script(says("it says a note"))
    harness.run(sent.session_id)
    turn = harness.turn(again.turn_id)
    assert (turn["status"], turn["metadata"], turn["reply"]["text"]) == ("done", {"order": 7}, "it says a note")
    (row,) = harness.sql("SELECT priority, reply_to FROM turns WHERE turn_id = %(id)s", id=again.turn_id)
    assert (row.priority, row.reply_to) == (8, {"url": "https://a.example/hook"})
    (asked,) = [each for each in harness.messages(sent.session_id) if each["turn_id"] == str(again.turn_id)][:1]
    assert [part["name"] for part in asked["parts"]] == ["a.txt"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_turn_of_several_messages_after_its_session_has_ended(harness: Harness, *, kept: bool) -> None:
    """The next session of the conversation answers, also when retention has deleted the turn's rows of the inbox."""
    sent = harness.send("one", conversation="a")
    harness.send("two", conversation="a", on_busy="merge")
    harness.script(BROKEN)
    harness.run(sent.session_id)
    if not kept:
        harness.sql("DELETE FROM inbox RETURNING 1")
    harness.sql("UPDATE sessions SET ended_at = now(), state = 'ended', routable = false RETURNING 1")
    again = retry(harness.runtime, sent.turn_id)
    assert again.session_id != sent.session_id
    harness.run(again.session_id)
    assert harness.messages(again.session_id)[0]["content"] == "one\n\ntwo"


def test_what_a_client_added_is_added_again(harness: Harness) -> None:
    """A turn of an OpenAI client has the client's settings, and is not remembered where that was asked for."""
    harness.script(BROKEN)
    added = Additions(settings={"seed": 3}, remember=False)
    message = parse_incoming({"user_id": "ana", "text": "hello"})
    sent = accept(harness.runtime, message, additions=added)
    harness.run(sent.session_id)
    again = retry(harness.runtime, sent.turn_id)
    rows = harness.sql("SELECT additions FROM turns ORDER BY seq")
    assert rows[0].additions == rows[1].additions != {}
    assert again.turn_id != sent.turn_id


def test_only_what_has_failed_can_be_tried_again(harness: Harness) -> None:
    """Not a turn that is done or waits, nor another agent's part of a turn. A cancelled turn can."""
    clerk = Agent("clerk", "You file.")
    harness.agents = Agents([Agent("assistant", "You help.", [agent_tool(clerk, name="ask")]), clerk])
    with pytest.raises(NotFound):
        retry(harness.runtime, uuid4())
    sent = harness.send()
    with pytest.raises(Conflict, match="is accepted"):
        retry(harness.runtime, sent.turn_id)
    cancel(harness.runtime, sent.turn_id)
    assert not retry(harness.runtime, sent.turn_id).duplicate
    harness.script(calls(("ask", {"task": "file"})), BROKEN)
    other = harness.send(user_id="bob")
    harness.run(other.session_id)
    (child,) = harness.sql("SELECT session_id, session_id AS turn_id FROM sessions WHERE depth = 1")
    harness.run(child.session_id)
    with pytest.raises(Conflict, match="another agent"):
        retry(harness.runtime, child.turn_id)


@pytest.mark.parametrize("files", [[], [FILE]])
def test_the_text_is_what_a_hook_made_of_it(harness: Harness, files: list[dict[str, Any]]) -> None:
    """The inbox no longer has the text that a hook has changed."""

    def redact(turn: TurnContext[Any]) -> TurnContext[Any]:
        return replace(turn, text=turn.text.replace("4711", "****"))

    harness.agents = Agents([Agent("assistant", "You help.", before_turn=[redact])])
    sent = _failed(harness, parts=[{"type": "text", "text": "my pin is 4711"}, *files])
    again = retry(harness.runtime, sent.turn_id)
    harness.run(sent.session_id)
    (asked,) = [each for each in harness.messages(sent.session_id) if each["turn_id"] == str(again.turn_id)][:1]
    assert (asked["content"], len(asked.get("parts") or ())) == ("my pin is ****", len(files))


def test_a_text_that_was_withheld_is_sent_again(harness: Harness) -> None:
    """A guard let nothing of it into the transcript, but the inbox has it until retention deletes it."""
    seen = list[str]()

    def check(turn: TurnContext[Any]) -> TurnContext[Any]:
        seen.append(turn.text)
        if len(seen) == 1:
            raise GuardRejected("Not now.")
        return turn

    harness.agents = Agents([Agent("assistant", "You help.", before_turn=[required(check)])])
    sent = harness.send("my secret")
    harness.run(sent.session_id)
    assert harness.lines(sent.session_id)[0] == ("user", WITHHELD)
    retry(harness.runtime, sent.turn_id)
    harness.run(sent.session_id)
    assert seen == ["my secret"] * 2
    harness.sql("DELETE FROM inbox RETURNING 1")
    with pytest.raises(Conflict, match="has no messages"):
        retry(harness.runtime, sent.turn_id)


def test_a_turn_of_a_fork_stays_in_the_fork(harness: Harness) -> None:
    """Messages are routed to the source, but the new turn is in the session of the turn."""
    first = harness.send("plan a trip", conversation="trip")
    harness.run(first.session_id)
    forked = fork(harness.database, harness.clock, first.session_id)
    sent = _failed(harness, session_id=forked)
    assert retry(harness.runtime, sent.turn_id).session_id == forked


def test_it_waits_behind_the_turn_that_runs(harness: Harness) -> None:
    """Also where a user's next message interrupts: an operator who tries a turn again interrupts nothing."""
    harness.set(on_busy="interrupt")
    old = _failed(harness)
    new = harness.send("a new question")
    harness.claimed(new.session_id)
    again = retry(harness.runtime, old.turn_id)
    assert (harness.turn(new.turn_id)["status"], again.seq) == ("running", new.seq + 1)


@pytest.mark.parametrize("files", [[], [FILE]])
def test_merged_messages_of_the_greatest_length(harness: Harness, files: list[dict[str, Any]]) -> None:
    """Messages were merged up to the limit of one, so what joins them must not exceed it."""
    half = harness.settings.guard.max_chars // 2
    harness.script(BROKEN)
    sent = harness.send(parts=[{"type": "text", "text": "a" * half}, *files])
    assert harness.send("b" * half, on_busy="merge").joined
    harness.run(sent.session_id)
    retry(harness.runtime, sent.turn_id)
    rows = harness.sql("SELECT text, parts FROM inbox ORDER BY accepted_at DESC, position LIMIT 1")
    assert (rows[0].text, len(rows[0].parts or ())) == ("a" * half + "b" * half, len(files))
