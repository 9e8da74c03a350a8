"""Sessions, messages and turns are returned in their documented form."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from uuid import uuid4

import pytest

from perdure import tool
from perdure.access.tenants import UserKey, user_key
from perdure.clock import MovedClock
from perdure.database import paging
from perdure.database.engine import Database
from perdure.errors import NotFound
from perdure.sessions import queries
from perdure.sessions.ending import request_end
from perdure.sessions.reading import list_sessions, message_pages, read_messages, read_session
from perdure.settings import Settings
from tests.conftest import RecordingWaker
from tests.plans import outline, plans, rows_read
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

SESSION_KEYS = {
    "session_id", "tenant", "user_id", "agent", "state", "turn_count", "unsettled", "message_count", "created_at",
    "last_activity_at", "ended_at", "channels", "conversation",
    "title", "summary", "summary_kind", "key_topics", "parent_turn_id", "consolidation",
}  # fmt: skip
MESSAGE_KEYS = {"seq", "turn_id", "role", "content", "channel", "token_count", "created_at"}
_OF_USER = {"message_id"}
TURN_KEYS = {
    "turn_id", "session_id", "seq", "status", "attempts", "resumed", "steps", "reply", "error", "delayed", "usage",
    "pending_approvals", "pending_calls", "decisions", "waiting_for", "accepted_at", "started_at", "settled_at",
}  # fmt: skip


@tool(effect="pure")
def double(number: int) -> int:
    """Double the number."""
    return number * 2


@pytest.fixture
def harness(settings: Settings, clock: MovedClock, database: Database, waker: RecordingWaker) -> Iterator[Harness]:
    """A harness whose agent has the tool `double`."""
    made = Harness(settings, clock, database, waker)
    made.equip(double)
    yield made
    made.check()


def test_a_session_has_the_keys_of_the_contract(harness: Harness) -> None:
    """A session has the documented keys before and after its first reply."""
    sent = harness.send(channel="cli")
    fresh = read_session(harness.database, sent.session_id)
    assert set(fresh) == SESSION_KEYS
    assert (fresh["state"], fresh["turn_count"], fresh["message_count"]) == ("active", 0, 0)
    harness.run(sent.session_id)
    harness.send(channel="telegram")
    later = read_session(harness.database, sent.session_id)
    assert (later["state"], later["turn_count"], later["message_count"]) == ("active", 1, 2)
    assert later["channels"] == ["cli", "telegram"]
    assert (later["ended_at"], later["summary"], later["key_topics"]) == (None, None, [])
    assert later["session_id"] == str(sent.session_id)
    assert datetime.fromisoformat(later["created_at"]).tzinfo is not None


def test_messages_have_the_keys_of_the_contract(harness: Harness) -> None:
    """Optional keys are present only if they have a value."""
    harness.script(calls(("double", {"number": 4}), ("double", "{oops")), says("8"))
    sent = harness.send()
    harness.run(sent.session_id)
    question, calling, first, second, reply = read_messages(harness.database, sent.session_id)
    assert set(question) == MESSAGE_KEYS | _OF_USER
    assert set(calling) == MESSAGE_KEYS | {"tool_calls", "model", "stop_reason"}
    assert set(first) == set(second) == MESSAGE_KEYS | {"tool_call_id"}
    assert set(reply) == MESSAGE_KEYS | {"model", "stop_reason"}
    assert calling["tool_calls"] == [
        {"id": "call_0", "name": "double", "arguments": {"number": 4}},
        {"id": "call_1", "name": "double", "arguments": "{oops"},
    ]
    assert [first["tool_call_id"], second["tool_call_id"]] == ["call_0", "call_1"]
    assert {each["turn_id"] for each in (question, calling, first, second, reply)} == {str(sent.turn_id)}
    assert [each["seq"] for each in (question, calling, first, second, reply)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("", {}), ("{}", {}), ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}), ("[1]", "[1]"), ("null", "null"),
        ("NaN", "NaN"), ('{"a": NaN}', '{"a": NaN}'), ("{", "{"), ('"text"', '"text"'),
    ],
)  # fmt: skip
def test_arguments_are_an_object_or_the_models_text(harness: Harness, written: str, shown: object) -> None:
    """A call's arguments are shown as an object if they are a valid JSON object, else as the model's text."""
    harness.script(calls(("nothing", written)), says("I see"))
    sent = harness.send()
    harness.run(sent.session_id)
    assert read_messages(harness.database, sent.session_id)[1]["tool_calls"][0]["arguments"] == shown


def test_a_transcript_is_read_in_pieces(harness: Harness) -> None:
    """`after` and `limit` select a part of the transcript. Without them the whole transcript is returned."""
    sent = [harness.send(str(number)) for number in range(5)]
    session_id = sent[0].session_id
    assert read_messages(harness.database, session_id) == []
    harness.run(session_id)
    everything = read_messages(harness.database, session_id)
    assert [each["seq"] for each in everything] == list(range(1, 11))
    assert read_messages(harness.database, session_id, after=3, limit=4) == everything[3:7]
    assert read_messages(harness.database, session_id, after=10) == []
    assert read_messages(harness.database, session_id, limit=0) == []
    assert read_messages(harness.database, session_id, after=9, limit=100) == everything[9:]


@pytest.mark.parametrize("limit", ["PAGE_ROWS", "PAGE_BYTES"])
def test_a_transcript_is_read_page_by_page(harness: Harness, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """A page has a bounded number of rows and bytes, and all pages together are the transcript."""
    sent = [harness.send(str(number)) for number in range(5)]
    session_id = sent[0].session_id
    harness.run(session_id)
    everything = read_messages(harness.database, session_id)
    monkeypatch.setattr(paging, limit, 1)
    assert list(message_pages(harness.database, session_id)) == [[message] for message in everything]
    assert read_messages(harness.database, session_id, after=3, limit=4) == everything[3:7]


def test_unknown_ids_are_not_found(harness: Harness) -> None:
    """Reading an unknown session, the messages of an unknown session, or an unknown turn raises `NotFound`."""
    with pytest.raises(NotFound):
        read_session(harness.database, uuid4())
    with pytest.raises(NotFound):
        read_messages(harness.database, uuid4())
    with pytest.raises(NotFound):
        harness.turn(uuid4())


def test_a_user_sees_their_own_sessions_newest_first(harness: Harness) -> None:
    """The list contains no other user's sessions."""
    first = harness.send(user_id="ana").session_id
    request_end(harness.database, first, "by hand")
    harness.move(1)
    second = harness.send(user_id="ana").session_id
    harness.send(user_id="bob")
    harness.run(second)
    assert [each["session_id"] for each in list_sessions(harness.database, UserKey("ana"))] == [str(second), str(first)]
    assert len(list_sessions(harness.database)) == 3
    assert len(list_sessions(harness.database, limit=2)) == 2
    assert list_sessions(harness.database, UserKey("cho")) == []
    harness.run(first)


def test_a_turn_has_the_keys_of_the_contract(harness: Harness) -> None:
    """A turn has the documented keys before it begins and after it is settled. `steps` counts the committed steps."""
    harness.script(calls(("double", {"number": 4})), says("8"))
    sent = harness.send()
    fresh = harness.turn(sent.turn_id)
    assert set(fresh) == TURN_KEYS
    assert (fresh["status"], fresh["attempts"], fresh["steps"]) == ("accepted", 0, 0)
    assert (fresh["reply"], fresh["error"], fresh["started_at"], fresh["settled_at"]) == (None, None, None, None)
    assert fresh["pending_approvals"] == []
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    running = harness.turn(sent.turn_id)
    assert (running["status"], running["attempts"], running["steps"]) == ("running", 1, 1)
    assert running["resumed"] is None
    harness.move(31)
    harness.run(sent.session_id)
    done = harness.turn(sent.turn_id)
    assert set(done) == TURN_KEYS
    assert (done["status"], done["attempts"], done["steps"], done["resumed"]) == ("done", 2, 2, "worker_lost")
    assert done["reply"] == {"text": "8", "format": "text", "stop_reason": "stop"}


@pytest.mark.exhaustive
def test_a_tenants_sessions_are_found_by_an_index(harness: Harness) -> None:
    """Listing a tenant's sessions reads none of the other tenants' sessions."""
    harness.sql(
        "INSERT INTO users (user_id, created_at) SELECT 'bolt' || chr(31) || n, now() FROM generate_series(1, 500) AS n"
    )
    harness.sql(
        "INSERT INTO sessions"
        " (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, channels)"
        " SELECT gen_random_uuid(), user_id, '', false, 'assistant', 'active', now(), now(), '{}'"
        " FROM users, generate_series(1, 10)"
    )
    sent = [harness.send(user_id=user_key("acme", name)).session_id for name in ("ana", "bob")]
    harness.sql("ANALYZE sessions")
    listed = list_sessions(harness.database, tenant="acme")
    assert {each["session_id"] for each in listed} == {str(each) for each in sent}
    for nodes in plans(harness.database, queries.LIST_OF_TENANT, {"tenant": "acme", "limit": 100}):
        assert "sessions_of_tenant_idx" in {node.get("Index Name") for node in nodes}, outline(nodes)
        assert rows_read(nodes) <= 2 * len(sent), outline(nodes)
