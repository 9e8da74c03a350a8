"""An exported snapshot contains the session's pending messages. After an import, each of them is answered once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure.access.tenants import UserKey
from perdure.agents import Agent, Agents
from perdure.clock import MovedClock
from perdure.database.engine import Database, Moment
from perdure.errors import Conflict, InvalidRequest, NotFound
from perdure.sessions.conversations import change_conversation, list_conversations
from perdure.settings import OnBusy, Settings
from perdure.snapshots.codec import dump, parse
from perdure.snapshots.exchange import read
from perdure.snapshots.file import FileSnapshots
from perdure.snapshots.pending import MESSAGE
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.snapshots.redis import RedisSnapshots
from perdure.snapshots.snapshot import AgentSnapshot, Event
from perdure.snapshots.sqlite import SqliteSnapshots
from perdure.snapshots.store import SnapshotStore
from perdure.turns.additions import Additions
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.lease.claim import Ran
from perdure.turns.restore_snapshot import Restored, restore
from tests.conftest import RecordingWaker
from tests.databases import Databases
from tests.turns.harness import Harness
from tests.turns.scripted import says

VARIABLES = {"name": "Ana"}


@pytest.fixture
def other(databases: Databases, clock: MovedClock) -> Iterator[Harness]:
    """Another installation, with its own database and model."""
    with databases.one(warm=False) as (url, _):
        database = Database(url)
        yield Harness(Settings(_env_file=None), clock, database, RecordingWaker())
        database.close()


@pytest.fixture(params=["postgres", "file", "sqlite", "redis"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Harness], SnapshotStore]]:
    """A function that makes the snapshot store of an installation, which is closed after the test."""
    opened = ExitStack()

    def made(harness: Harness) -> SnapshotStore:
        return opened.enter_context(closing(store(harness)))

    def store(harness: Harness) -> SnapshotStore:
        match request.param:
            case "postgres":
                return PostgresSnapshots(harness.database)
            case "file":
                directory = tmp_path / str(id(harness))
                directory.mkdir()
                return FileSnapshots(directory)
            case "sqlite":
                return SqliteSnapshots(tmp_path / f"{id(harness)}.db")
            case _:
                return RedisSnapshots(request.getfixturevalue("redis_url"))

    with opened:
        yield made


def _queued(harness: Harness, *texts: str) -> UUID:
    """A session with one answered turn and the queued messages `texts`."""
    session_id = UUID(harness.ask("first")["session_id"])
    for number, text in enumerate(texts):
        assert harness.send(text, message_id=f"q{number}", session_id=session_id).session_id == session_id
    return session_id


def _exported(harness: Harness, session_id: UUID) -> AgentSnapshot:
    """The session's snapshot, exported and parsed again."""
    return parse(dump(read(harness.database, session_id)))


def _user_texts(harness: Harness, session_id: UUID) -> list[str]:
    return [content for role, content in harness.lines(session_id) if role == "user"]


def test_queued_messages_are_exported_and_answered_once_elsewhere(
    harness: Harness, other: Harness, stores: Callable[[Harness], SnapshotStore]
) -> None:
    """With every store, another installation answers each exported message once, in order."""
    for each in (harness, other):
        each.snapshots = stores(each)
    session_id = _queued(harness, "one", "two", "three")
    snapshot = _exported(harness, session_id)
    assert [event.payload["text"] for event in snapshot.event_queue_backup] == ["one", "two", "three"]
    assert {(event.source, event.type) for event in snapshot.event_queue_backup} == {("http", MESSAGE)}
    harness.snapshots.delete(session_id)  # both installations share one Redis
    snapshot = replace(snapshot, memory=replace(snapshot.memory, working_variables=VARIABLES))
    assert restore(other.runtime, snapshot) == Restored(3, 0)
    assert _exported(other, session_id).event_queue_backup == snapshot.event_queue_backup
    assert restore(other.runtime, snapshot) == Restored(0, 3)
    assert set(other.waker.sessions) == {session_id}
    assert other.run(session_id) == Ran(3)
    assert _user_texts(other, session_id) == ["one", "two", "three"]
    assert _exported(other, session_id).event_queue_backup == ()
    assert _exported(other, session_id).memory.working_variables == VARIABLES
    again = restore(other.runtime, snapshot)
    assert (again.accepted, again.known) == (0, 3)
    assert "tick" in (again.variables_left or "")
    assert other.run(session_id) != Ran(1)
    assert len(other.model.requests) == 3
    other.check()


def test_an_import_into_the_original_accepts_nothing_twice(harness: Harness) -> None:
    """The original installation recognizes the exported messages by id, before and after it has answered them."""
    session_id = _queued(harness, "one", "two")
    snapshot = _exported(harness, session_id)
    assert restore(harness.runtime, snapshot) == Restored(0, 2)
    assert harness.run(session_id) == Ran(2)
    assert restore(harness.runtime, snapshot).known == 2
    assert _user_texts(harness, session_id) == ["first", "one", "two"]


def test_begun_and_cancelled_messages_are_not_exported(harness: Harness) -> None:
    """The original installation continues a begun turn. A cancelled message must not be answered after an import."""
    session_id = UUID(harness.ask("first")["session_id"])
    harness.send("begun", session_id=session_id)
    harness.claimed(session_id)
    cancelled = harness.send("cancelled", session_id=session_id)
    harness.send("queued", session_id=session_id)
    cancel(harness.runtime, cancelled.turn_id)
    assert [each.payload["text"] for each in _exported(harness, session_id).event_queue_backup] == ["queued"]


@pytest.mark.long
def test_an_export_holds_every_queued_message(harness: Harness, other: Harness) -> None:
    """An export contains every queued message. The snapshots that turns save contain a limited number."""
    session_id = _queued(harness, *(f"message {number}" for number in range(130)))
    assert restore(other.runtime, _exported(harness, session_id)) == Restored(130, 0)


def test_a_message_is_imported_as_it_was_sent(harness: Harness, other: Harness) -> None:
    """An imported message keeps its fields, and merged messages stay merged. The default `on_busy` does not apply."""
    for each in (harness, other):
        each.equip()
    session_id = _queued(harness)
    given: dict[str, Any] = {
        "session_id": session_id,
        "channel": "cli",
        "reply_to": {"url": "https://example.org/hook"},
    }
    harness.send(
        "one", message_id="a", priority=8, metadata={"language": "de", "n": [1.5, None]}, agent="other", **given
    )
    harness.send("and more", message_id="b", on_busy=OnBusy.MERGE, agent="other", **given)
    other.set(on_busy=OnBusy.REJECT)
    restore(other.runtime, _exported(harness, session_id))
    columns = "seq, user_id, agent, channel, priority, reply_to, metadata"
    rows = f"SELECT {columns} FROM turns WHERE settled_at IS NULL"  # noqa: S608 (constants)
    assert [tuple(row)[1:] for row in other.sql(rows)] == [tuple(row)[1:] for row in harness.sql(rows)]
    messages = "SELECT message_id, position, text FROM inbox WHERE message_id IN ('a', 'b') ORDER BY position"
    assert other.sql(messages) == harness.sql(messages)


def test_an_imported_message_keeps_what_its_client_added(harness: Harness, other: Harness) -> None:
    """What may not be remembered, or an OpenAI client added, holds in the other installation, too."""
    session_id = _queued(harness)
    added = Additions(instructions="Answer in JSON only.", settings={"temperature": 0.1})
    fields = {"channel": "http", "user_id": "ana", "session_id": str(session_id)}
    accept(harness.runtime, parse_incoming({**fields, "text": "My code word is Tulip.", "remember": False}))
    accept(harness.runtime, parse_incoming({**fields, "text": "Weather in Rome?"}), additions=added)
    restore(other.runtime, _exported(harness, session_id))
    rows = "SELECT additions FROM turns WHERE settled_at IS NULL ORDER BY seq"
    assert [row.additions for row in other.sql(rows)] == [{"remember": False}, added.to_dict()]
    assert other.sql(rows) == harness.sql(rows)


def test_an_imported_session_stays_in_its_conversation(harness: Harness, other: Harness) -> None:
    """The conversation's next message goes to the imported session, and other messages of the user do not."""
    sent = harness.send("Plan my trip to Rome.", conversation="trip", message_id="a")
    restore(other.runtime, _exported(harness, sent.session_id))
    assert other.send("And then?", conversation="trip").session_id == sent.session_id
    assert other.send("Hello.").session_id != sent.session_id
    [listed] = list_conversations(other.database, UserKey("ana"), 10)
    assert (listed["conversation"], listed["title"]) == ("trip", "Plan my trip to Rome.")


@pytest.mark.parametrize("where", ["source", "target"])
def test_an_imported_conversation_stays_left_out_of_memory(harness: Harness, other: Harness, where: str) -> None:
    """A conversation that is left out of memory before or after it is moved is left out of it there."""
    left_out = harness if where == "source" else other
    sent = harness.send("Hello.", conversation="private")
    if left_out is other:
        other.send("Hello.", conversation="private")
    change_conversation(
        left_out.database, left_out.runtime.wake, UserKey("ana"), "private", title=None, archived=None, remember=False
    )
    harness.send("My code word is Tulip.", conversation="private")
    restore(other.runtime, _exported(harness, sent.session_id))
    assert [row.remember for row in other.sql("SELECT remember FROM sessions WHERE scope = '/private'")] == (
        [False] if left_out is harness else [False, False]
    )
    other.send("And again.", session_id=sent.session_id)
    [row] = other.sql(
        "SELECT additions FROM turns WHERE session_id = %(s)s ORDER BY seq DESC LIMIT 1", s=sent.session_id
    )
    assert row.additions == {"remember": False}


def test_an_unknown_agent_is_replaced_by_the_default(harness: Harness, other: Harness) -> None:
    """If the importing installation lacks a message's agent, the default agent answers."""
    session_id = _queued(harness, "one")
    other.agents = Agents([Agent("another", "You help.")])
    assert restore(other.runtime, _exported(harness, session_id)).accepted == 1
    assert other.run(session_id) == Ran(1)


def test_an_imported_session_is_routable_only_if_the_user_has_no_other(harness: Harness, other: Harness) -> None:
    """The user's next message enters the imported session only if the user has no other session in the installation."""
    session_id = _queued(harness, "one")
    assert restore(other.runtime, _exported(harness, session_id)).accepted == 1
    assert other.send("next").session_id == session_id
    theirs = UUID(harness.ask("first", user_id="bob")["session_id"])
    harness.send("one", user_id="bob", session_id=theirs)
    live = other.send("hello", user_id="bob").session_id
    assert restore(other.runtime, _exported(harness, theirs)).accepted == 1
    assert other.send("next", user_id="bob").session_id == live
    assert other.run(theirs) == Ran(1)


@pytest.mark.parametrize(
    ("name", "nth"),
    [("sessions.open_restored", 1), ("snapshots.restore", 1), ("turns.enqueue", 1), ("turns.enqueue", 2)],
)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_import_can_be_repeated_after_a_crash(
    harness: Harness, other: Harness, moment: Moment, name: str, nth: int
) -> None:
    """If an import crashes at a commit and is then repeated, each message is accepted and answered once."""
    session_id = _queued(harness, "one", "two")
    snapshot = _exported(harness, session_id)
    with other.crashing(moment, name, nth):
        restore(other.runtime, snapshot)
    other.move(other.settings.turn.lease_s + 10)
    other.run(session_id)
    restore(other.runtime, snapshot)
    other.run(session_id)
    assert _user_texts(other, session_id) == ["one", "two"]
    other.check()


def test_messages_are_imported_into_a_session_that_has_continued(harness: Harness, other: Harness) -> None:
    """If the session's variables are newer than the exported ones, the import keeps them and sets `variables_left`."""
    session_id = _queued(harness, "one")
    snapshot = _exported(harness, session_id)
    other.script(says("hi"))
    assert restore(other.runtime, snapshot).accepted == 1
    other.run(session_id)
    later = replace(snapshot, event_queue_backup=_with(snapshot, message_id="another", text="later"))
    done = restore(other.runtime, later)
    assert (done.accepted, done.known) == (1, 0)
    assert done.variables_left is not None
    assert other.run(session_id) == Ran(1)


def _with(snapshot: AgentSnapshot, **changed: object) -> tuple[Event, ...]:
    """A queue whose only event is the snapshot's first pending message, with the given fields replaced."""
    event = snapshot.event_queue_backup[0]
    return (replace(event, payload={**event.payload, **changed}),)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": " "}, "text: is empty"),
        ({"text": None}, "text"),
        ({"user_id": 3}, "user_id"),
        ({"message_id": None}, "not a pending message"),
        ({"priority": 10}, "priority"),
        ({"reply_to": {"url": "ftp://a"}}, "reply_to"),
        ({"reply_to": {"task": "not.allowed"}}, "PERDURE_REPLY_TASKS"),
        ({"conversation": " "}, "conversation: is empty"),
        ({"additions": ["remember"]}, "additions"),
        ({"additions": {"tools": [{"name": "a b"}]}}, "additions"),
    ],
)
def test_a_malformed_message_is_refused_and_nothing_is_changed(
    harness: Harness, other: Harness, changed: dict[str, object], message: str
) -> None:
    """The import raises `InvalidRequest` and opens no session."""
    snapshot = _exported(harness, _queued(harness, "one"))
    for event in (_with(snapshot, **changed)[0], Event("mcp", "task", {"id": 7}), Event("mcp", MESSAGE, "text")):
        bad = replace(snapshot, event_queue_backup=(*snapshot.event_queue_backup, event))
        with pytest.raises(InvalidRequest, match=f"(Event 2 .*|reply_to.*)({message}|not a pending message)"):
            restore(other.runtime, bad)
    two = replace(snapshot, event_queue_backup=(*snapshot.event_queue_backup, *_with(snapshot, user_id="bob")))
    with pytest.raises(InvalidRequest, match="several users"):
        restore(other.runtime, two)
    assert other.sql("SELECT 1 FROM sessions") == []


def test_an_unknown_member_of_a_message_is_ignored(harness: Harness, other: Harness) -> None:
    """A later release may add members to a message."""
    snapshot = _exported(harness, _queued(harness, "one"))
    assert restore(other.runtime, replace(snapshot, event_queue_backup=_with(snapshot, mood="good"))).accepted == 1


def test_an_import_into_an_ended_or_another_users_session_is_refused(harness: Harness, other: Harness) -> None:
    """The import raises `Conflict` for an ended session and `NotFound` for another user's session."""
    snapshot = _exported(harness, _queued(harness, "one"))
    theirs = replace(snapshot, event_queue_backup=_with(snapshot, user_id="bob", message_id="b"))
    mine = replace(theirs, memory=replace(snapshot.memory, working_variables={"name": "Bob"}))
    with pytest.raises(NotFound):
        restore(harness.runtime, mine)
    assert read(harness.database, snapshot.agent_id).memory.working_variables == snapshot.memory.working_variables
    with pytest.raises(NotFound):
        restore(other.runtime, replace(snapshot, agent_id=uuid4(), event_queue_backup=()))
    assert other.sql("SELECT 1 FROM sessions") == []
    harness.run(snapshot.agent_id)
    harness.sql("UPDATE sessions SET end_requested_at = perdure_now(), routable = false")
    new = replace(snapshot, event_queue_backup=_with(snapshot, message_id="new"))
    with pytest.raises(Conflict, match="ended"):
        restore(harness.runtime, new)
