"""Messages of a user with the same key belong to one conversation, over any number of sessions."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.access.tenants import UserKey
from perdure.database.engine import Moment
from perdure.errors import InvalidRequest, NotFound
from perdure.models.protocol import ModelReply
from perdure.sessions.conversations import change_conversation, list_conversations, read_conversation
from perdure.sessions.ending import Ended, request_end
from perdure.sessions.forking import fork
from perdure.sessions.reading import list_sessions, read_session
from perdure.sessions.routing import conversation_of, scope_of
from perdure.settings import Scope
from perdure.text.titles import MAX_CHARS, title_of
from perdure.text.untrusted import is_identifier
from perdure.turns.inbox.incoming import parse_incoming
from tests.sessions.conftest import End
from tests.turns.harness import Harness, side_by_side, until
from tests.turns.scripted import says, system_text

IDLE_S = 1_800.0


def _keys(harness: Harness, user: str = "ana", **given: Any) -> list[str]:
    return [each["conversation"] for each in list_conversations(harness.database, UserKey(user), 100, **given)]


def _title(harness: Harness, key: str = "rome") -> str:
    return str(read_conversation(harness.database, UserKey("ana"), key)["title"])


def _change(
    harness: Harness,
    key: str = "rome",
    *,
    title: str | None = None,
    archived: bool | None = None,
    remember: bool | None = None,
) -> Any:
    return change_conversation(
        harness.database, harness.waker, UserKey("ana"), key, title=title, archived=archived, remember=remember
    )


def _ended(harness: Harness) -> UUID:
    """The session of the conversation `rome`, which has ended."""
    session_id = UUID(harness.ask("To Rome", conversation="rome")["session_id"])
    harness.sql("UPDATE sessions SET routable = false, end_requested_at = perdure_now(), ended_at = perdure_now()")
    return session_id


def _opens(harness: Harness) -> Callable[[], UUID]:
    """Opens the next session of the conversation with a message."""
    _ended(harness)
    return lambda: harness.send("Again", conversation="rome").session_id


def _forks(harness: Harness) -> Callable[[], UUID]:
    """Forks the session of the conversation, in a transaction of the same name as that which accepts a message."""
    source = UUID(harness.ask("To Rome", conversation="rome")["session_id"])

    def forks() -> UUID:
        with harness.database.transaction("turns.accept") as transaction:
            return fork(transaction, harness.clock, source)

    return forks


def _race(harness: Harness, commit: str, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Run `first`, and `second` on another connection from before the commit of `first`; returns their results."""
    found: list[Any] = []
    racing = Thread(target=lambda: found.append(second()))

    def hook(moment: Moment, name: str) -> None:
        if (moment, name) == ("before", commit) and not racing.ident:
            racing.start()
            waits = "SELECT FROM pg_locks WHERE NOT granted"
            until(lambda: harness.sql(waits) or not racing.is_alive(), "the second waits for the first, or has ended")

    with harness.hooked(hook):
        done = first()
    racing.join(60)
    return done, found[0]


def test_each_key_has_its_own_session(harness: Harness) -> None:
    """Each key has its own session, for all channels. Messages without a key go to a separate session."""
    plain = harness.send("hello")
    rome, oslo = harness.send("to Rome", conversation="rome"), harness.send("to Oslo", conversation="oslo")
    assert len({plain.session_id, rome.session_id, oslo.session_id}) == 3
    assert harness.send("and back", conversation="rome", channel="cli").session_id == rome.session_id
    assert harness.send("hello?").session_id == plain.session_id
    assert harness.send("mine", user_id="bea", conversation="rome").session_id != rome.session_id
    assert sorted(_keys(harness)) == ["oslo", "rome"]
    assert _keys(harness, "bea") == ["rome"]


def test_a_summary_titles_no_other_conversation(harness: Harness, end: End) -> None:
    """The conversations of the same key of another user and of other keys keep their titles; a fork gives none."""
    sent = harness.send("Plan my trip", conversation="rome")
    harness.run(sent.session_id)
    forked = fork(harness.database, harness.clock, sent.session_id, None)
    harness.send("To the opera", user_id="bea", conversation="rome")
    harness.send("Feed the cat", conversation="cats")
    for session_id, title in ((forked, "A fork"), (sent.session_id, "A trip")):
        request_end(harness.database, session_id, "enough")
        harness.script(says(json.dumps({"title": title, "summary": "They planned.", "key_topics": []})))
        assert end(session_id) == Ended()
        titles = harness.sql("SELECT title FROM conversations ORDER BY created_at")
        expected = "Plan my trip" if session_id == forked else title
        assert [each.title for each in titles] == [expected, "To the opera", "Feed the cat"]


def test_a_session_names_its_conversation(harness: Harness) -> None:
    """A session shows its conversation's key and title. Sessions can be listed by key."""
    rome, plain = harness.send("To Rome in May.", conversation="rome"), harness.send("hello")
    shown = read_session(harness.database, rome.session_id)
    assert (shown["conversation"], shown["title"]) == ("rome", "To Rome in May.")
    other = read_session(harness.database, plain.session_id)
    assert (other["conversation"], other["title"]) == (None, None)
    found = list_sessions(harness.database, UserKey("ana"), scope="/rome")
    assert [each["session_id"] for each in found] == [str(rome.session_id)]


def test_concurrent_first_messages_open_one_session(harness: Harness) -> None:
    """Eight concurrent messages with a new key are eight turns of one session."""
    sent = side_by_side(*[lambda n=n: harness.send(f"message {n}", conversation="rome") for n in range(8)])
    assert len({each.session_id for each in sent}) == 1
    assert sorted(each.seq for each in sent) == list(range(1, 9))
    assert _keys(harness) == ["rome"]


def test_the_next_session_continues_its_own_conversation(harness: Harness, end: End) -> None:
    """After the idle time, a conversation continues in a new session.

    The new session's prompt has the summary of this conversation, and of no other conversation.
    """
    other = harness.send("My cat is called Tom.", conversation="cats")
    harness.run(other.session_id)
    old = harness.send("I fly to Rome.", conversation="rome")
    harness.run(old.session_id)
    harness.move(IDLE_S + 1)
    new = harness.send("Where do I fly?", conversation="rome")
    assert new.session_id != old.session_id
    assert harness.session(new.session_id).previous_session_id == old.session_id
    harness.script(says(json.dumps({"summary": "The user flies to Rome. They like it.", "key_topics": ["Rome"]})))
    end(old.session_id)
    harness.run(new.session_id)
    prompt = system_text(harness.model.requests[-1])
    assert "The user flies to Rome." in prompt
    assert "Tom" not in prompt
    live = read_conversation(harness.database, UserKey("ana"), "rome")
    assert live["session_id"] == str(new.session_id)


def test_the_title_comes_from_the_first_message_and_then_from_the_summary(harness: Harness, end: End) -> None:
    """A summary's title replaces the title from the first message. It never replaces a title that the user has set."""
    sent = harness.send("  \nPlan my trip to Rome. It is in May.\nThanks", conversation="rome")
    assert _title(harness) == "Plan my trip to Rome"
    harness.run(sent.session_id)
    harness.move(IDLE_S + 1)
    again = harness.send("more", conversation="rome")
    written = {"title": "# A trip to Rome in May", "summary": "The user asked about hotels.", "key_topics": []}
    summary = ModelReply(json.dumps(written))
    harness.script(lambda _request, _call: summary)
    end(sent.session_id)
    assert _title(harness) == "A trip to Rome in May"
    assert _change(harness, title="Roma!")["title"] == "Roma!"
    harness.run(again.session_id)
    harness.move(IDLE_S + 1)
    harness.send("even more", conversation="rome")
    harness.script(lambda _request, _call: summary)
    end(again.session_id)
    assert _title(harness) == "Roma!"


@pytest.mark.parametrize("summary", ["user: Plan it. assistant: Noted.", '{"summary": "Rome.", "key_topics": []}'])
def test_a_summary_without_a_title_leaves_the_users_sentence(harness: Harness, end: End, summary: str) -> None:
    """The text of a summary, such as an extract with its speakers, is never a title."""
    sent = harness.send("Plan my trip to Rome. It is in May.", conversation="rome")
    harness.run(sent.session_id)
    harness.move(IDLE_S + 1)
    harness.send("more", conversation="rome")
    harness.script(lambda _request, _call: ModelReply(summary))
    end(sent.session_id)
    assert _title(harness) == "Plan my trip to Rome"


def test_an_archived_conversation_ends_and_returns_with_the_next_message(harness: Harness) -> None:
    """Archiving ends the conversation's live session. The next message restores the conversation."""
    sent = harness.send("To Rome", conversation="rome")
    harness.run(sent.session_id)
    harness.send("To Oslo", conversation="oslo")
    archived = _change(harness, archived=True)
    assert (archived["archived"], archived["session_id"]) == (True, None)
    assert harness.session(sent.session_id).end_requested_at is not None
    assert sent.session_id in harness.waker.endings
    assert (_keys(harness, archived=True), _keys(harness, archived=False)) == (["rome"], ["oslo"])
    assert _change(harness, archived=True)["archived"] is True  # archiving again is not a conflict
    back = harness.send("Again", conversation="rome")
    assert back.session_id != sent.session_id
    assert _keys(harness, archived=False) == ["rome", "oslo"]


@pytest.mark.parametrize("is_first", [True, False], ids=["changed first", "changed last"])
@pytest.mark.parametrize("make", [_opens, _forks])
def test_a_session_that_begins_while_its_conversation_is_left_out(
    harness: Harness, make: Callable[[Harness], Callable[[], UUID]], is_first: bool
) -> None:
    """Whichever commits first, nothing of the new session is remembered, neither what it has nor what follows."""
    begin = make(harness)
    change = partial(_change, harness, remember=False)
    if is_first:
        session_id = _race(harness, "conversations.change", change, begin)[1]
    else:
        session_id = _race(harness, "turns.accept", begin, change)[0]
    assert harness.session(session_id).remember is False
    harness.run(session_id)
    harness.ask("And back", session_id=session_id)
    told = harness.sql("SELECT additions -> 'remember' AS told FROM turns WHERE session_id = %(id)s", id=session_id)
    assert [row.told for row in told] == [False] * len(told)
    assert len(told) == 2
    assert harness.sql("SELECT FROM message_words WHERE session_id = %(id)s", id=session_id) == []


@pytest.mark.parametrize("is_first", [True, False], ids=["changed first", "changed last"])
@pytest.mark.parametrize("make", [_opens, _forks])
def test_a_session_that_begins_while_its_conversation_is_remembered_again(
    harness: Harness, make: Callable[[Harness], Callable[[], UUID]], is_first: bool
) -> None:
    """What follows in the new session is remembered."""
    begin = make(harness)
    _change(harness, remember=False)
    change = partial(_change, harness, remember=True)
    if is_first:
        session_id = _race(harness, "conversations.change", change, begin)[1]
    else:
        session_id = _race(harness, "turns.accept", begin, change)[0]
    assert harness.session(session_id).remember is True


@pytest.mark.parametrize("is_first", [True, False], ids=["archived first", "archived last"])
def test_a_session_that_opens_while_its_conversation_is_archived(harness: Harness, is_first: bool) -> None:
    """A message after the archiving restores the conversation. The session of one before it ends."""
    begin, archive = _opens(harness), partial(_change, harness, archived=True)
    if is_first:
        session_id = _race(harness, "conversations.change", archive, begin)[1]
    else:
        session_id, archived = _race(harness, "turns.accept", begin, archive)
        assert (archived["archived"], archived["session_id"]) == (True, None)
    shown = read_conversation(harness.database, UserKey("ana"), "rome")
    assert shown["archived"] is not is_first
    assert (harness.session(session_id).end_requested_at is None) is is_first


def test_a_conversation_of_another_user_does_not_exist(harness: Harness) -> None:
    """A user can neither change nor list the conversations of another user."""
    harness.send("To Rome", user_id="bea", conversation="rome")
    with pytest.raises(NotFound):
        _change(harness, title="mine")
    assert _keys(harness) == []


def test_the_scope_channel_does_not_apply_to_keys(harness: Harness) -> None:
    """Even with the scope `channel`, a conversation has one live session for all channels."""
    session = harness.settings.session.model_copy(update={"scope": Scope.CHANNEL})
    harness.settings = harness.settings.model_copy(update={"session": session})
    first = harness.send("hello", conversation="rome", channel="cli")
    assert harness.send("hello", conversation="rome", channel="web").session_id == first.session_id
    assert harness.send("hello", channel="cli").session_id != first.session_id


@pytest.mark.parametrize("key", ["", " \t", "a" * 201, "a\x00b", chr(0xD800), 7])
def test_an_invalid_key_is_refused(key: object) -> None:
    """An invalid key is refused with an error that names the field."""
    with pytest.raises(InvalidRequest, match="conversation"):
        parse_incoming({"user_id": "ana", "text": "hello", "conversation": key})


def test_a_message_names_a_session_or_a_conversation(harness: Harness) -> None:
    """A message with both a session id and a key is refused, because they may contradict each other."""
    sent = harness.send("hello")
    with pytest.raises(InvalidRequest, match="not both"):
        parse_incoming({"user_id": "ana", "text": "x", "session_id": str(sent.session_id), "conversation": "rome"})


@pytest.mark.parametrize("key", ["/", "../x", "a/b", "http", "\u202eevil", "😀", "%00", "'; DROP TABLE users; --"])
def test_any_storable_key_works(harness: Harness, key: str) -> None:
    """A key may look like a channel's name, a path or SQL."""
    plain = harness.send("hello", channel="http")
    sent = harness.send("hello", conversation=key)
    assert sent.session_id != plain.session_id
    assert harness.send("again", conversation=key).session_id == sent.session_id
    assert read_conversation(harness.database, UserKey("ana"), key)["conversation"] == key


@given(st.text(min_size=1), st.text(min_size=1))
def test_different_keys_have_different_scopes(one: str, other: str) -> None:
    """Different keys have different scopes. A key's scope is never empty and never equals a channel's scope."""
    for setting in Scope:
        scope = scope_of(setting, "http", one)
        assert conversation_of(scope) == one
        assert not is_identifier(scope)
        assert scope != ""
        assert (scope == scope_of(setting, "cli", other)) == (one == other)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("user: What did I say? tool: 2026-05-02", "What did I say?"),
        ("assistant: user: Hello there", "Hello there"),
        ("## Plan my trip to Rome. It is in May.", "Plan my trip to Rome"),
        ("> **Quoted**\nand more", "Quoted**"),
        ("1. Buy milk. 2. Sleep.", "1. Buy milk"),
        ("Hi. Can you help me? I am lost.", "Hi. Can you help me?"),
        ("로마 여행을 계획해 주세요。다음 주입니다.", "로마 여행을 계획해 주세요。"),
        ("---", "---"),
        ("### Task:\nUse it.\n<context>\nA page.\n</context>\nWhat is the fee?", "What is the fee?"),
        ("### Task: write a poem", "Task: write a poem"),
    ],
)
def test_a_title_is_the_users_first_sentence(text: str, title: str) -> None:
    """A title has neither the name of a speaker, nor marks of Markdown, nor what a front end puts before the words."""
    assert title_of(text) == title


@given(st.text())
def test_a_title_is_one_short_line(text: str) -> None:
    """A title has one line of bounded length, whatever the message contains."""
    title = title_of(text)
    assert len(title) <= MAX_CHARS
    assert len(title.splitlines()) <= 1
