"""A message is accepted once and into the right session. A refused message writes no row."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from perdure.agents import Agent, Agents
from perdure.errors import Conflict, InvalidRequest, NotFound, PerdureError, TooLarge, Unavailable
from perdure.sessions.ending import request_end
from perdure.settings import Scope
from perdure.turns.inbox.accept import Accepted
from tests.turns.harness import KILL_THE_OTHERS, Harness, side_by_side, until
from tests.turns.scripted import says

WAITING = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def test_a_repeated_message_is_the_same_turn(harness: Harness) -> None:
    """A request that repeats a message id returns the first request's turn and writes no row."""
    first = harness.send("hello", message_id="m1")
    before = harness.counts()
    again = harness.send("hello", message_id="m1")
    assert (again.turn_id, again.session_id, again.seq) == (first.turn_id, first.session_id, first.seq)
    assert (first.duplicate, again.duplicate) == (False, True)
    assert harness.counts() == before


def test_a_repeated_message_reports_its_turns_status(harness: Harness) -> None:
    """A duplicate returns the turn's current status. For a settled turn, no wake-up is published."""
    first = harness.send(message_id="m1")
    harness.run(first.session_id)
    harness.waker.sessions.clear()
    assert harness.send(message_id="m1").status == "done"
    assert harness.waker.sessions == []


def test_the_same_id_with_another_text_is_refused(harness: Harness) -> None:
    """A used message id with another text is a conflict. If it counted as a duplicate, the new text would be lost."""
    harness.send("hello", message_id="m1")
    before = harness.counts()
    with pytest.raises(Conflict, match="m1"):
        harness.send("goodbye", message_id="m1")
    assert harness.counts() == before


def test_an_id_belongs_to_a_user_and_a_channel(harness: Harness) -> None:
    """Message ids are unique per user and channel, because each channel may number its messages from 1."""
    sent = [
        harness.send("a", user_id="ana", channel="http", message_id="1"),
        harness.send("b", user_id="ana", channel="telegram", message_id="1"),
        harness.send("c", user_id="bob", channel="http", message_id="1"),
    ]
    assert len({each.turn_id for each in sent}) == 3
    assert not any(each.duplicate for each in sent)


@pytest.mark.parametrize("on_busy", ["enqueue", "reject", "interrupt", "merge"])
def test_twenty_threads_with_one_message_make_one_turn(harness: Harness, on_busy: str) -> None:
    """Of twenty concurrent requests with one message id, one creates a turn and the others are duplicates."""
    send = [lambda: harness.send("hello", message_id="m1", on_busy=on_busy)] * 20
    found = side_by_side(*send)
    assert {type(each) for each in found} == {Accepted}
    assert len({each.turn_id for each in found}) == 1
    assert [each.duplicate for each in found].count(False) == 1
    assert harness.counts() == {
        "users": 1, "sessions": 1, "turns": 1, "inbox": 1, "messages": 0, "tool_effects": 0, "deliveries": 0,
    }  # fmt: skip


def test_a_repetition_of_a_message_never_interrupts_its_own_turn(harness: Harness) -> None:
    """A repeated message with `interrupt` does not cancel its own turn."""
    first = harness.send("hello", message_id="m1", on_busy="interrupt")
    again = harness.send("hello", message_id="m1", on_busy="interrupt")
    assert again.duplicate
    assert harness.turn(first.turn_id)["status"] == "accepted"


@pytest.mark.long
def test_fifty_concurrent_messages_of_a_new_user_open_one_session(harness: Harness) -> None:
    """Concurrent first messages of a user enter one session and are numbered without gaps."""
    found = side_by_side(*[lambda number=number: harness.send(f"message {number}") for number in range(50)])
    assert {type(each) for each in found} == {Accepted}
    assert len({each.session_id for each in found}) == 1
    assert sorted(each.seq for each in found) == list(range(1, 51))


def test_one_of_many_concurrent_first_messages_with_reject_is_accepted(harness: Harness) -> None:
    """Of eight concurrent first messages with `reject`, one is accepted and the others are conflicts."""
    found = side_by_side(*[lambda number=number: harness.send(f"{number}", on_busy="reject") for number in range(8)])
    accepted = [each for each in found if isinstance(each, Accepted)]
    assert len(accepted) == 1
    assert all(isinstance(each, Conflict) for each in found if each not in accepted)


REFUSED: dict[str, tuple[dict[str, Any], type[PerdureError]]] = {
    "unknown agent": ({"agent": "nobody"}, InvalidRequest),
    "unknown session": ({"session_id": uuid4()}, NotFound),
    "text too long": ({"text": "x" * 10_001}, TooLarge),
    "task that is not allowed": ({"reply_to": {"task": "os.remove"}}, InvalidRequest),
    "address that is not public": ({"reply_to": {"url": "http://127.0.0.1:6379/"}}, InvalidRequest),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_rejected_message_leaves_no_row(harness: Harness, case: str) -> None:
    """If a message is refused, no row is written."""
    given, error = REFUSED[case]
    before = harness.counts()
    with pytest.raises(error):
        harness.send(**given)
    assert harness.counts() == before
    assert harness.waker.sessions == []


def test_a_text_of_the_maximum_length_is_accepted(harness: Harness) -> None:
    """A text of exactly the maximum length is accepted."""
    assert harness.ask("x" * 10_000)["status"] == "done"


def test_another_users_session_does_not_exist(harness: Harness) -> None:
    """A session id of another user causes the same error as an unknown id, so the error does not reveal the session."""
    theirs = harness.send(user_id="bob")
    before = harness.counts()
    with pytest.raises(NotFound) as foreign:
        harness.send(user_id="ana", session_id=theirs.session_id)
    with pytest.raises(NotFound) as unknown:
        harness.send(user_id="ana", session_id=uuid4())
    assert foreign.value.message == unknown.value.message
    assert harness.counts() == before


@pytest.mark.parametrize("state", ["summarizing", "ending", "ended"])
def test_an_ended_session_accepts_no_message(harness: Harness, state: str) -> None:
    """A message to an ended session is a conflict. A message without a session id opens a new session."""
    ended = harness.send("hello")
    harness.run(ended.session_id)
    harness.sql(
        "UPDATE sessions SET state = %(state)s, routable = false, end_requested_at = perdure_now()"
        " WHERE session_id = %(id)s",
        state=state, id=ended.session_id,
    )  # fmt: skip
    before = harness.counts()
    with pytest.raises(Conflict, match="ended"):
        harness.send(session_id=ended.session_id)
    assert harness.counts() == before
    assert harness.send("hello again").session_id != ended.session_id


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_message_that_waits_for_a_request_to_end_its_session_opens_the_next(
    harness: Harness, *, is_idle: bool
) -> None:
    """The message has found the session before the request is committed, whether it was idle or in use."""
    first = harness.send("hello")
    if is_idle:
        harness.run(first.session_id)
    with ThreadPoolExecutor() as threads, harness.database.transaction("test.end") as transaction:
        request_end(transaction, first.session_id, "enough")
        sending = threads.submit(harness.send, "hello again")
        until(lambda: sending.done() or bool(harness.sql(WAITING)), "the message waits")
        assert not sending.done()
    assert sending.result().session_id != first.session_id
    assert harness.session(first.session_id).last_turn_seq == 1


def test_a_duplicate_of_a_message_in_an_ended_session_opens_no_session(harness: Harness) -> None:
    """A repeated message whose session has ended returns the old turn and writes no row."""
    old = harness.send("hello", message_id="m1")
    harness.run(old.session_id)
    harness.sql("UPDATE sessions SET state = 'ended', routable = false, end_requested_at = perdure_now()")
    before = harness.counts()
    assert harness.send("hello", message_id="m1").turn_id == old.turn_id
    assert harness.counts() == before


def test_the_fields_of_a_message_are_stored(harness: Harness) -> None:
    """The turn stores the message's priority, metadata, channel and agent."""
    harness.equip()
    sent = harness.send(priority=8, metadata={"a": [1, "ü"]}, channel="telegram", agent="other", message_id="m1")
    row = harness.sql("SELECT * FROM turns WHERE turn_id = %(id)s", id=sent.turn_id)[0]
    assert (row.priority, row.metadata, row.channel, row.agent) == (8, {"a": [1, "ü"]}, "telegram", "other")
    assert harness.send("next").seq == 2
    row = harness.sql("SELECT agent FROM turns WHERE seq = 2")[0]
    assert row.agent == "other", "the session's own agent answers when the message names none"


def test_one_session_spans_the_channels_or_each_has_its_own(harness: Harness) -> None:
    """With the scope `user`, a CLI session continues in Telegram. With `channel`, each channel has its own session."""
    cli, telegram = harness.send(channel="cli"), harness.send(channel="telegram")
    assert cli.session_id == telegram.session_id
    assert harness.session(cli.session_id).channels == ["cli", "telegram"]
    harness.settings = harness.settings.model_copy(
        update={"session": harness.settings.session.model_copy(update={"scope": Scope.CHANNEL})}
    )
    apart = [harness.send(channel="cli"), harness.send(channel="telegram"), harness.send(channel="cli")]
    assert apart[0].session_id == apart[2].session_id
    assert len({each.session_id for each in [cli, *apart]}) == 3


def test_accept_succeeds_while_redis_is_unavailable(harness: Harness) -> None:
    """A message is accepted even if its wake-up cannot be published. The sweeper publishes the wake-up later."""
    harness.waker.away = True
    sent = harness.send()
    assert sent.status == "accepted"
    assert harness.waker.sessions == []
    assert harness.counts()["turns"] == 1


def test_a_leased_session_is_not_woken(harness: Harness) -> None:
    """A message to a leased session publishes no wake-up, because the session's runner will find the new turn."""
    first = harness.send("first")
    assert harness.waker.sessions == [first.session_id]
    harness.claimed(first.session_id)
    harness.send("second")
    assert harness.waker.sessions == [first.session_id]


def test_a_message_replaces_a_wake_up_that_no_worker_has_taken_in_time(harness: Harness) -> None:
    """A wake-up of the last seconds suffices. The time doubles with the sweeper's wake-ups, to four times at most."""
    pause_s = harness.settings.turn.sweep_s
    for wakes, recent_s in ((0, pause_s), (1, 2 * pause_s), (2, 4 * pause_s), (9, 4 * pause_s)):
        user_id = f"user {wakes}"
        session_id = harness.send(user_id=user_id).session_id
        harness.sql("UPDATE sessions SET wakes = %(n)s WHERE session_id = %(id)s", n=wakes, id=session_id)
        harness.waker.sessions.clear()
        harness.move(recent_s - 1)
        harness.send(user_id=user_id)
        assert harness.waker.sessions == []
        harness.move(2)
        harness.send(user_id=user_id)
        assert harness.waker.sessions == [session_id]


@pytest.mark.parametrize(
    "row",
    [
        "woken_at = perdure_now() + interval '1 hour'",
        "woken_at = perdure_now() - interval '1 hour', strikes = 1, lease_until = perdure_now() - interval '1 second'",
        "woken_at = NULL, strikes = 1",
    ],
    ids=["woken by a clock that was ahead", "its worker died", "due in the next round"],
)
def test_a_message_wakes_a_session_that_no_worker_will_find(harness: Harness, row: str) -> None:
    """Its turn would otherwise wait for the sweeper."""
    session_id = harness.send().session_id
    harness.sql(f"UPDATE sessions SET {row}")  # noqa: S608 (constants)
    harness.waker.sessions.clear()
    harness.send()
    assert harness.waker.sessions == [session_id]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_commit_in_doubt_is_looked_up_and_not_repeated(harness: Harness, moment: str) -> None:
    """If the connection breaks just before or after the commit, `accept` looks up whether the commit succeeded."""
    opened = harness.send("first")
    died: list[str] = []

    def kill_once(at: str, name: str) -> None:
        if at == moment and name == "turns.enqueue" and not died:
            died.append(at)
            if at == "after":
                raise Unavailable("The connection broke after the commit.")
            harness.sql(KILL_THE_OTHERS)

    with harness.hooked(kill_once):
        second = harness.send("second", message_id="m2")
    assert died == [moment]
    assert not second.duplicate, "this call accepted it"
    assert (second.session_id, second.seq) == (opened.session_id, 2)


def test_a_session_whose_agent_was_removed_continues_with_the_default_one(harness: Harness) -> None:
    """If a session's agent no longer exists, the default agent answers the session's messages."""
    harness.script(says("one"))
    harness.ask("hello")
    harness.agents = Agents([Agent("successor", "You go on.")])
    harness.script(says("two"))
    turn = harness.ask("and now?")
    assert (turn["status"], turn["reply"]["text"]) == ("done", "two")
