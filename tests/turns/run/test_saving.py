"""A runner saves a turn's snapshot in the store before the reply is visible. The next claim loads the snapshot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from starlette.testclient import TestClient

from perdure import Agent
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.channels.http.app import create_app
from perdure.database.engine import Moment
from perdure.models.protocol import Role
from perdure.sessions.reading import read_messages
from perdure.settings import Settings
from perdure.snapshots.deletion import delete_snapshots
from perdure.snapshots.snapshot import AgentSnapshot, Event
from perdure.snapshots.store import SnapshotUnavailable, Stored, Version
from perdure.turns import pauses
from perdure.turns.cancel import cancel
from perdure.turns.lease.claim import Ran
from tests.snapshots.storages import MemorySnapshots
from tests.turns.counting import (
    AFTER_LEASE_S,
    add,
    ask_to_count,
    committed_snapshot,
    woken_sessions,
)
from tests.turns.harness import Crash, Harness
from tests.turns.scripted import calls, says


class Spy(MemorySnapshots):
    """A third-party store that fails on request and records the versions that it saves."""

    def __init__(self) -> None:
        super().__init__(f"spy://{uuid4()}", Settings(_env_file=None))
        self.trouble: dict[str, Callable[[UUID], BaseException | None]] = {}
        self.saved: list[Version] = []
        self.on_save: Callable[[AgentSnapshot], None] = lambda _: None

    def fail(self, *methods: str, only: UUID | None = None) -> None:
        """Make `methods` fail from now on, for all sessions or for the session `only`."""
        error = SnapshotUnavailable("spy", "it is full", "Make room.")
        self.trouble = {method: lambda agent: error if only in {None, agent} else None for method in methods}

    def save(self, snapshot: AgentSnapshot, token: int) -> None:
        self._fail("save", snapshot.agent_id)
        self.on_save(snapshot)
        super().save(snapshot, token)
        self.saved.append(Version(token, snapshot.tick_index))
        self._fail("saved", snapshot.agent_id)

    def load(self, agent_id: UUID) -> Stored | None:
        self._fail("load", agent_id)
        return super().load(agent_id)

    def set_aside(self, agent_id: UUID, upto: Version, reason: str) -> None:
        self._fail("set_aside", agent_id)
        super().set_aside(agent_id, upto, reason)

    def kept_aside(self, agent_id: UUID) -> bool:
        """Whether a snapshot of the agent was set aside."""
        return agent_id in self._aside

    def _fail(self, method: str, agent_id: UUID) -> None:
        trouble = self.trouble.get(method)
        error = trouble(agent_id) if trouble is not None else None
        if error is not None:
            raise error


@pytest.fixture
def spy(harness: Harness) -> Spy:
    """A `Spy` as the harness's snapshot store."""
    made = Spy()
    harness.snapshots = made
    harness.equip(add)
    return made


def test_the_reply_is_invisible_before_the_snapshot_is_saved(harness: Harness, spy: Spy) -> None:
    """Before the save, the turn's reply, messages and delivery are invisible."""
    seen: list[Any] = []

    def look(_: AgentSnapshot) -> None:
        turn = harness.turn(sent.turn_id)
        contents = [row["content"] for row in read_messages(harness.database, sent.session_id)]
        seen.append((turn["status"], turn["reply"], turn["settled_at"], contents, harness.counts()["deliveries"]))

    spy.on_save = look
    harness.script(says("saved"))
    sent = harness.send(reply_to={"url": "https://a.example"})
    harness.run(sent.session_id)
    assert seen == [("running", None, None, [], 0)]
    assert harness.turn(sent.turn_id)["reply"]["text"] == "saved"
    assert harness.counts()["deliveries"] == len(harness.waker.deliveries) == 1
    assert harness.sql("SELECT 1 FROM turns WHERE unsaved IS NOT NULL OR unsaved_error IS NOT NULL") == []


def test_the_saved_snapshot_equals_the_committed_one(harness: Harness, spy: Spy) -> None:
    """The store's snapshot and PostgreSQL's have the same history, variables, tick and token."""
    session_id = UUID(ask_to_count(harness)["session_id"])
    ask_to_count(harness)
    found, committed = spy.load(session_id), committed_snapshot(harness, session_id)
    assert found is not None
    assert found.version == committed.version == Version(2, 6)
    assert found.snapshot == replace(committed.snapshot, timestamp=found.snapshot.timestamp)
    assert found.snapshot.memory.working_variables == {"n": 2}
    assert [message.role for message in found.snapshot.memory.short_term_history][-2:] == [Role.TOOL, Role.ASSISTANT]


def test_queued_messages_are_in_a_turns_snapshot(harness: Harness, spy: Spy) -> None:
    """A turn's snapshot contains the messages that are queued behind the turn, as pending events."""
    saved: list[AgentSnapshot] = []
    spy.on_save = saved.append
    harness.send("one")
    sent = harness.send("two", message_id="m2")
    assert harness.run(sent.session_id) == Ran(2)
    payload = {"user_id": "ana", "message_id": "m2", "text": "two", "agent": "assistant", "priority": 5}
    assert saved[0].event_queue_backup == (Event("http", "message", payload),)
    assert saved[1].event_queue_backup == ()


def test_only_the_turn_that_cannot_be_saved_waits(harness: Harness, spy: Spy) -> None:
    """A failed save parks only its own turn. Saving is retried with growing pauses and without a second model call."""
    harness.script(says("at last"))
    sent = harness.send()
    spy.fail("save", only=sent.session_id)
    harness.waker.sessions.clear()
    assert harness.run(sent.session_id) == Ran(0)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["reply"], turn["attempts"], turn["error"]) == ("parked", None, 1, None)
    assert harness.ask(user_id="bob")["status"] == "done"
    requests_before = len(harness.model.requests)
    for pause_s in (5, 10, 20, 40, 40):
        harness.move(pause_s - 1)
        assert sent.session_id not in woken_sessions(harness)
        harness.move(2)
        assert sent.session_id in woken_sessions(harness)
        assert harness.run(sent.session_id) == Ran(0)
        row = harness.session(sent.session_id)
        assert (row.state, row.strikes, row.claims, row.lease_until) == ("active", 0, 0, None)
    assert harness.turn(sent.turn_id)["attempts"] == 1
    assert harness.sql("SELECT unsaved_error FROM turns WHERE unsaved IS NOT NULL")[0].unsaved_error.startswith(
        "The snapshot store spy cannot be used: it is full. Make room."
    )
    spy.trouble = {}
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "at last"
    assert harness.turn(sent.turn_id)["attempts"] == 1
    assert len(harness.model.requests) == requests_before


def test_a_failed_save_is_logged(harness: Harness, spy: Spy, caplog: pytest.LogCaptureFixture) -> None:
    """The log states why the turn is not answered and what the operator can do."""
    spy.fail("save")
    sent = harness.send()
    with caplog.at_level(logging.ERROR):
        harness.run(sent.session_id)
    assert f"turn {sent.turn_id} is not answered: its snapshot is not saved" in caplog.text
    assert "Make room. Retry in 5 s." in caplog.text


def test_a_held_turn_is_settled_under_a_pause_and_without_its_agent(harness: Harness, spy: Spy) -> None:
    """The turn has ended, and needs no agent. Any worker saves its snapshot, and the user is answered."""
    harness.script(says("at last"))
    spy.fail("save")
    sent = harness.send()
    assert harness.run(sent.session_id) == Ran(0)
    pauses.pause(harness.database, tenant=None, user=UserKey("ana"), agent=None)
    harness.agents = Agents([Agent("clerk", "You file.")])
    spy.trouble = {}
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "at last"


def test_turns_behind_a_held_one_wait_for_it(harness: Harness, spy: Spy) -> None:
    """While a turn's snapshot cannot be saved, the later turns of the session wait."""
    spy.fail("save")
    first = harness.send("one")
    harness.run(first.session_id)
    second = harness.send("two")
    assert harness.run(first.session_id) == Ran(0)
    spy.trouble = {}
    assert harness.run(first.session_id) == Ran(2)
    assert [content for _, content in harness.lines(first.session_id)] == ["one", "ok", "two", "ok"]
    assert harness.turn(second.turn_id)["status"] == "done"


BOUNDARIES: list[tuple[Moment, str]] = [
    ("before", "turns.keep_unsaved"), ("after", "turns.keep_unsaved"),
    ("before", "turns.settle"), ("after", "turns.settle"),
]  # fmt: skip


@pytest.mark.parametrize(("moment", "name"), BOUNDARIES)
def test_a_crash_around_saving(harness: Harness, spy: Spy, moment: Moment, name: str) -> None:
    """After a crash, the model is called again only if its reply was not committed. The store's snapshot is current."""
    harness.script(calls(("add", {})), says("once"))
    sent = harness.send()
    with harness.crashing(moment, name):
        harness.run(sent.session_id)
    settled = (moment, name) == ("after", "turns.settle")
    assert harness.turn(sent.turn_id)["status"] == ("done" if settled else "running")
    harness.move(AFTER_LEASE_S)
    if (moment, name) == ("before", "turns.keep_unsaved"):
        harness.script(says("once"))
    if not settled:
        assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "once"
    assert len(harness.model.requests) == (3 if (moment, name) == ("before", "turns.keep_unsaved") else 2)
    assert not spy.kept_aside(sent.session_id)
    found = spy.load(sent.session_id)
    assert found is not None
    assert found.version == committed_snapshot(harness, sent.session_id).version
    ask_to_count(harness)
    assert harness.results() == ["1", "2"]
    assert not spy.kept_aside(sent.session_id)


def test_a_process_that_dies_in_the_middle_of_save(harness: Harness, spy: Spy) -> None:
    """After a crash before or after the store's write, the save is repeated and the model call is not."""
    harness.script(says("once"))
    sent = harness.send()
    for method in ("save", "saved"):
        spy.trouble = {method: lambda _: Crash()}
        with pytest.raises(Crash):
            harness.run(sent.session_id, alone=True)
        harness.move(AFTER_LEASE_S)
    spy.trouble = {}
    assert harness.run(sent.session_id, alone=True) == Ran(1)
    assert spy.saved == [Version(2, 1), Version(3, 1)]
    assert len(harness.model.requests) == 1
    assert harness.turn(sent.turn_id)["attempts"] == 1


def test_an_unexpected_error_of_the_store_holds_the_turn(
    harness: Harness, spy: Spy, caplog: pytest.LogCaptureFixture
) -> None:
    """If a third-party store raises any exception, the turn waits. The exception's text appears only in the log."""
    spy.trouble = {"save": lambda _: RuntimeError("password")}
    sent = harness.send()
    assert harness.run(sent.session_id) == Ran(0)
    assert harness.turn(sent.turn_id)["status"] == "parked"
    assert "password" not in harness.sql("SELECT unsaved_error FROM turns")[0].unsaved_error
    assert "RuntimeError: password" in caplog.text
    spy.trouble = {}
    assert harness.run(sent.session_id) == Ran(1)


def test_a_held_turn_cannot_be_cancelled(harness: Harness, spy: Spy) -> None:
    """A turn that waits for its snapshot's save cannot be cancelled, because its reply is already committed."""
    spy.fail("save")
    sent = harness.send()
    harness.run(sent.session_id)
    cancel(harness.runtime, sent.turn_id)
    spy.trouble = {}
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["status"] == "done"


def test_an_interrupt_cancels_a_held_turn(harness: Harness, spy: Spy) -> None:
    """An interrupting message does not wait for the turn's save. The turn is cancelled and its reply is discarded."""
    spy.fail("saved")
    sent = harness.send("one")
    harness.run(sent.session_id)
    other = harness.send("two", on_busy="interrupt")
    assert harness.turn(sent.turn_id)["status"] == "cancelled"
    spy.trouble = {}
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(other.turn_id)["status"] == "done"
    assert [content for _, content in harness.lines(sent.session_id)] == ["one", "two", "ok"]
    assert spy.kept_aside(sent.session_id), "the snapshot of the discarded reply belongs to no commit"


def test_variables_come_from_the_store_if_its_snapshot_is_current(harness: Harness, spy: Spy) -> None:
    """If the store's snapshot is of the last commit, it takes precedence over the variables in PostgreSQL."""
    session_id = UUID(ask_to_count(harness)["session_id"])
    found = spy.load(session_id)
    assert found is not None
    spy.save(replace(found.snapshot, memory=replace(found.snapshot.memory, working_variables={"n": 40})), found.token)
    ask_to_count(harness)
    assert harness.results()[-1] == "41"


@pytest.mark.parametrize("version", [Version(1, 2), Version(1, 4), Version(9, 9)])
def test_a_snapshot_of_another_commit_is_set_aside_and_reported(
    harness: Harness, spy: Spy, version: Version, caplog: pytest.LogCaptureFixture
) -> None:
    """If the store's snapshot is not of the last commit, the runner sets it aside and uses PostgreSQL's variables."""
    session_id = UUID(ask_to_count(harness)["session_id"])
    found = spy.load(session_id)
    assert found is not None
    spy.delete(session_id)
    memory = replace(found.snapshot.memory, working_variables={"n": 70})
    spy.save(replace(found.snapshot, tick_index=version.tick, memory=memory), version.token)
    assert ask_to_count(harness)["status"] == "done"
    assert harness.results()[-1] == "2"
    assert spy.kept_aside(session_id)
    assert f"it is of {version}; the committed one is of token 1, tick 3" in caplog.text
    assert spy.saved[-1] == committed_snapshot(harness, session_id).version


def test_a_missing_snapshot_is_rebuilt(harness: Harness, spy: Spy, caplog: pytest.LogCaptureFixture) -> None:
    """If the store has lost a snapshot, the runner logs a warning and uses PostgreSQL's variables."""
    session_id = UUID(ask_to_count(harness)["session_id"])
    spy.delete(session_id)
    ask_to_count(harness)
    assert harness.results()[-1] == "2"
    assert "has no snapshot in spy://" in caplog.text


def test_a_crashed_turn_continues_from_its_own_steps(harness: Harness, spy: Spy) -> None:
    """After a crash within a turn, the store's snapshot of the previous turn is still current and is not set aside."""
    session_id = UUID(ask_to_count(harness)["session_id"])
    harness.script(calls(("add", {})), says("never"), calls(("add", {})), says("done"))
    harness.send()
    with harness.crashing("before", "turns.keep_unsaved"):
        harness.run(session_id)
    harness.move(AFTER_LEASE_S)
    assert harness.run(session_id) == Ran(1)
    assert harness.results() == ["1", "2", "3"]
    assert not spy.kept_aside(session_id)


@pytest.mark.parametrize("error", [SnapshotUnavailable("spy", "it is down", "Start it."), RuntimeError("a bug")])
def test_a_store_that_cannot_be_read_stops_no_turn(harness: Harness, spy: Spy, error: Exception) -> None:
    """If the store cannot be read, the runner uses PostgreSQL's variables."""
    ask_to_count(harness)
    spy.trouble = {"load": lambda _: error}
    assert ask_to_count(harness)["status"] == "done"
    assert harness.results() == ["1", "2"]


def test_a_database_older_than_its_snapshots_recovers(harness: Harness, spy: Spy) -> None:
    """After a restore of the database, a snapshot with a token above the database's is set aside."""
    session_id = UUID(ask_to_count(harness)["session_id"])
    found = spy.load(session_id)
    assert found is not None
    spy.save(replace(found.snapshot, tick_index=99), 99)
    spy.trouble = {"load": lambda _: SnapshotUnavailable("spy", "it is down", "Start it.")}
    assert ask_to_count(harness)["status"] == "done"
    assert spy.kept_aside(session_id)
    assert spy.saved[-1] == Version(2, 6)


def test_a_stale_runner_does_not_overwrite_a_newer_snapshot(harness: Harness, spy: Spy) -> None:
    """If another runner settles the turn during a stale runner's save, the store rejects the stale snapshot."""
    spy.on_save = lambda _: _taken_over(harness, spy, sent.session_id)
    sent = harness.send()
    assert harness.run(sent.session_id) == Ran(0)
    assert spy.saved == [Version(2, 1)]
    assert not spy.kept_aside(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    harness.ask()
    assert not spy.kept_aside(sent.session_id)


def _taken_over(harness: Harness, spy: Spy, session_id: UUID) -> None:
    spy.on_save = lambda _: None
    harness.move(AFTER_LEASE_S)
    assert harness.run(session_id) == Ran(1)


def test_a_held_turn_over_http(harness: Harness, spy: Spy) -> None:
    """While a turn waits for its save, the API shows it as parked, without its reply and without the store's error."""
    spy.fail("save")
    harness.script(says("at last"))
    sent = harness.send()
    harness.run(sent.session_id)
    with TestClient(create_app(harness.runtime, lambda: True), base_url="http://127.0.0.1:8080") as client:
        turn = client.get(f"/v1/turns/{sent.turn_id}", params={"wait": "0.1"}).json()
        assert (turn["status"], turn["reply"], turn["error"], turn["settled_at"]) == ("parked", None, None, None)
        session = client.get(f"/v1/sessions/{sent.session_id}").json()
        assert (session["state"], session["turn_count"]) == ("active", 0)
        assert client.get(f"/v1/sessions/{sent.session_id}/messages").json() == []
        for path in (f"turns/{sent.turn_id}", f"sessions/{sent.session_id}"):
            assert "Make room" not in client.get(f"/v1/{path}").text
        spy.trouble = {}
        harness.run(sent.session_id)
        turn = client.get(f"/v1/turns/{sent.turn_id}").json()
        assert (turn["status"], turn["reply"]["text"]) == ("done", "at last")
        contents = [each["content"] for each in client.get(f"/v1/sessions/{sent.session_id}/messages").json()]
        assert contents == ["hello", "at last"]


def test_snapshots_are_deleted_in_both_places(harness: Harness, spy: Spy) -> None:
    """`delete_snapshots` deletes a session's snapshots in PostgreSQL and in the store. A second call is safe."""
    session_id = UUID(ask_to_count(harness)["session_id"])
    delete_snapshots(harness.database, spy, session_id)
    delete_snapshots(harness.database, spy, session_id)
    assert spy.load(session_id) is None
    assert harness.sql("SELECT count(*) FROM snapshots")[0][0] == 0
    ask_to_count(harness)
    assert harness.results()[-1] == "1"
