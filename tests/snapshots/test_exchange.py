"""Export and import of a session's snapshot. Only a snapshot of the session's last commit can be imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from perdure import tool
from perdure.errors import Conflict, NotFound
from perdure.models.protocol import Message, Role
from perdure.sessions.ending import request_end
from perdure.snapshots.codec import dump, parse
from perdure.snapshots.exchange import read, restore
from perdure.snapshots.file import FileSnapshots
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.snapshots.snapshot import AgentSnapshot, Event, Status
from perdure.snapshots.store import SnapshotStore, SnapshotUnavailable
from perdure.turns.lease.claim import Ran
from tests.turns.conftest import harness
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

__all__ = ["harness"]

LEASE_S = 30.0
VARIABLES = {"name": "Ana", "seen": [1, 2.5, None]}
EVENTS = (Event("mail", "arrived", {"from": "bob"}),)


class Interrupting:
    """A store whose `save` calls `happens` and saves nothing."""

    name = "meanwhile"

    def __init__(self, happens: object) -> None:
        self._happens = happens

    def save(self, snapshot: AgentSnapshot, token: int) -> None:
        assert callable(self._happens)
        self._happens()

    def load(self, agent_id: UUID) -> None:
        """Return `None`: nothing is stored."""

    def set_aside(self, agent_id: UUID, upto: object, reason: str) -> None:
        """Do nothing."""

    def delete(self, agent_id: UUID) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@tool(effect="pure")
def stop() -> str:
    """Do nothing."""
    return "done"


@pytest.fixture
def session_id(harness: Harness) -> UUID:
    """The id of a session with two turns. The session is at tick 2 and has no variables."""
    harness.script(says("one"), says("two"))
    for text in ("first", "second"):
        found = harness.ask(text)["session_id"]
    return UUID(found)


@pytest.fixture
def store(harness: Harness) -> SnapshotStore:
    """The default store, PostgreSQL."""
    return PostgresSnapshots(harness.database)


def _changed(harness: Harness, session_id: UUID) -> AgentSnapshot:
    """The session's snapshot with variables, events and a forged history."""
    snapshot = read(harness.database, session_id)
    memory = replace(snapshot.memory, short_term_history=(Message(Role.USER, "forged"),), working_variables=VARIABLES)
    return replace(snapshot, memory=memory, event_queue_backup=EVENTS)


def _restore(harness: Harness, store: SnapshotStore, snapshot: AgentSnapshot) -> None:
    restore(harness.database, store, snapshot, LEASE_S)


def test_the_exported_snapshot_is_the_last_commits(harness: Harness, session_id: UUID) -> None:
    """`read` returns the session's state after the last commit. `parse` restores the snapshot from its JSON text."""
    snapshot = read(harness.database, session_id)
    assert (snapshot.agent_id, snapshot.tick_index, snapshot.status) == (session_id, 2, Status.WAITING_FOR_EVENT)
    assert [each.content for each in snapshot.memory.short_term_history] == ["first", "one", "second", "two"]
    assert (snapshot.memory.working_variables, snapshot.event_queue_backup) == ({}, ())
    assert parse(dump(snapshot, indent=2), session_id) == snapshot
    with pytest.raises(NotFound):
        read(harness.database, uuid4())


def test_an_import_replaces_the_variables_but_not_the_conversation(
    harness: Harness, session_id: UUID, store: SnapshotStore
) -> None:
    """An import ignores a forged transcript in the snapshot. The session's next turn keeps the imported variables."""
    before = harness.messages(session_id)
    _restore(harness, store, _changed(harness, session_id))
    snapshot = read(harness.database, session_id)
    assert (snapshot.memory.working_variables, snapshot.event_queue_backup) == (VARIABLES, ())
    assert (snapshot.tick_index, harness.messages(session_id)) == (2, before)
    assert harness.session(session_id).lease_until is None
    loaded = store.load(session_id)
    assert loaded is not None
    assert loaded.snapshot == snapshot
    harness.send("third")
    assert harness.run(session_id) == Ran(1)
    assert read(harness.database, session_id).memory.working_variables == VARIABLES


def test_an_import_can_be_repeated(harness: Harness, session_id: UUID, store: SnapshotStore) -> None:
    """A second import of the same tick replaces the first."""
    _restore(harness, store, _changed(harness, session_id))
    once = read(harness.database, session_id)
    emptied = replace(once, memory=replace(once.memory, working_variables={}), event_queue_backup=())
    for _ in range(2):
        _restore(harness, store, emptied)
    assert read(harness.database, session_id).memory.working_variables == {}


def test_an_external_store_has_the_import(harness: Harness, session_id: UUID, tmp_path: Path) -> None:
    """The store saves the imported snapshot. The session's row records the token and tick of the saved snapshot."""
    store = FileSnapshots(tmp_path)
    _restore(harness, store, _changed(harness, session_id))
    stored = store.load(session_id)
    row = harness.session(session_id)
    assert stored is not None
    assert (stored.token, stored.snapshot.tick_index) == (row.saved_token, row.saved_tick) == (row.token, 2)
    assert stored.snapshot.memory == read(harness.database, session_id).memory
    assert stored.snapshot.event_queue_backup == EVENTS


def test_an_unavailable_store_changes_nothing(harness: Harness, session_id: UUID) -> None:
    """`restore` raises the store's error, changes nothing and releases the session's lease."""

    def fail() -> None:
        raise SnapshotUnavailable("meanwhile", "it is down", "Wait.")

    before = read(harness.database, session_id)
    with pytest.raises(SnapshotUnavailable, match="it is down"):
        _restore(harness, Interrupting(fail), _changed(harness, session_id))
    assert read(harness.database, session_id) == before
    assert harness.session(session_id).lease_until is None


def test_a_message_sent_during_an_import_finds_its_variables(harness: Harness, session_id: UUID) -> None:
    """A turn does not begin during an import. After the import, the turn runs with the imported variables."""

    def send_a_message() -> None:
        harness.send("meanwhile")
        assert harness.run(session_id) != Ran(1)

    _restore(harness, Interrupting(send_a_message), _changed(harness, session_id))
    assert harness.session(session_id).woken_at is None
    assert harness.run(session_id) == Ran(1)
    assert read(harness.database, session_id).memory.working_variables == VARIABLES


def test_an_import_that_lost_its_lease_writes_nothing(harness: Harness, session_id: UUID) -> None:
    """If a turn runs after the import's lease has expired, the import raises `Conflict` and writes nothing."""

    def run_a_turn() -> None:
        harness.move(LEASE_S + 10)
        harness.ask("meanwhile")

    with pytest.raises(Conflict, match="Another process claimed"):
        _restore(harness, Interrupting(run_a_turn), _changed(harness, session_id))
    snapshot = read(harness.database, session_id)
    assert (snapshot.tick_index, snapshot.memory.working_variables) == (3, {})


@pytest.mark.parametrize("case", ["unknown", "older", "newer", "ended", "begun", "held"])
def test_an_import_that_does_not_fit_the_session_is_refused(
    harness: Harness, session_id: UUID, store: SnapshotStore, case: str
) -> None:
    """`restore` raises an error that states the reason, and changes nothing."""
    snapshot = _changed(harness, session_id)
    refusal: type[Exception] = Conflict
    match case:
        case "unknown":
            snapshot, refusal, message = replace(snapshot, agent_id=uuid4()), NotFound, "no session"
        case "older":
            snapshot, message = replace(snapshot, tick_index=1), "tick 1, and the session is at tick 2"
        case "newer":
            snapshot, message = replace(snapshot, tick_index=3), "tick 3, and the session is at tick 2"
        case "ended":
            request_end(harness.database, session_id, "enough")
            message = "ended"
        case "begun":
            harness.equip(stop)
            harness.script(calls(("stop", {})))
            with harness.crashing("after", "turns.step"):
                harness.ask("third")
            harness.move(LEASE_S + 10)
            snapshot, message = replace(snapshot, tick_index=3), "busy"
        case _:
            harness.send("third")
            harness.claimed(session_id)
            message = "busy"
    before = harness.session(session_id)
    with pytest.raises(refusal, match=message):
        _restore(harness, store, snapshot)
    assert harness.session(session_id) == before
    assert store.load(session_id) is None
