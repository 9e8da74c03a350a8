"""An ended session leaves no data outside PostgreSQL, even after crashes and outages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.stream import StreamEvent, StreamEventKind
from perdure.sessions.ending import Ended, EndNotDue, EndOutcome, EndPostponed, endings_due, request_end
from perdure.sessions.forking import fork
from perdure.snapshots.file import FileSnapshots
from perdure.snapshots.store import SnapshotStore
from perdure.tasks.process import Process
from perdure.tasks.sessions import ender
from perdure.testing.suites.snapshots import snapshot_of
from perdure.turns.run.loop import Runner
from tests.memory.conftest import Remembered, client, redis_memory, remembered, unreachable
from tests.turns.harness import Harness

__all__ = ["client", "redis_memory", "remembered", "unreachable"]

LEASE_S = 31.0


@dataclass(frozen=True)
class EndingSession:
    """A session whose end was requested, and a process that ends it."""

    harness: Harness
    redis_memory: RedisMemory
    client: Any
    session_id: UUID
    snapshots: SnapshotStore

    def end(self, redis_memory: RedisMemory | None = None) -> EndOutcome:
        """End the session as the task `sessions.end` does. `redis_memory` replaces the default Redis."""
        runtime = replace(
            self.harness.runtime, redis_memory=redis_memory or self.redis_memory, snapshots=self.snapshots
        )
        return ender(Process(runtime, Runner(runtime, "tests"), {}, lambda _: None)).end(self.session_id)

    @property
    def row(self) -> Row[Any]:
        """The session's row."""
        return self.harness.session(self.session_id)

    @property
    def keys(self) -> list[str]:
        """The keys in Redis."""
        return sorted(self.client.keys())


@pytest.fixture
def ending_session(
    harness: Harness, redis_memory: RedisMemory, client: Any, remembered: Remembered, tmp_path: Path
) -> EndingSession:
    """A session with a requested end, a snapshot, an event in Redis, and a turn that is only in Redis."""
    sent = harness.send("hello")
    harness.run(sent.session_id)
    redis_memory.working.remember_turn(sent.session_id, remembered(harness.session(sent.session_id).token))
    redis_memory.stream.append(UserKey("ana"), StreamEvent(StreamEventKind.TYPING, "cli", harness.clock.now()))
    harness.move(1)
    request_end(harness.database, sent.session_id, "enough")
    (tmp_path / "snapshots").mkdir()
    snapshots = FileSnapshots(tmp_path / "snapshots")
    snapshots.save(snapshot_of(sent.session_id), 1)
    return EndingSession(harness, redis_memory, client, sent.session_id, snapshots)


def test_an_ending_flushes_and_leaves_nothing_behind(ending_session: EndingSession) -> None:
    """Before a session ends, its turns in Redis move to PostgreSQL, and its snapshot and Redis keys are removed."""
    seen: list[Any] = []

    def watch(moment: str, name: str) -> None:
        if (moment, name) == ("before", "sessions.finish_ending"):
            seen.append(
                (
                    ending_session.row.state,
                    ending_session.keys,
                    ending_session.snapshots.load(ending_session.session_id),
                )
            )

    with ending_session.harness.hooked(watch):
        assert ending_session.end() == Ended()
    assert seen == [("ending", [], None)]
    contents = [content for _, content in ending_session.harness.lines(ending_session.session_id)]
    assert contents == ["hello", "ok", "question 1", "answer to question 1"]
    assert (ending_session.row.state, ending_session.row.turn_count, ending_session.row.lease_until) == (
        "ended",
        2,
        None,
    )
    assert ending_session.row.ended_at is not None


def test_data_of_other_sessions_stays(ending_session: EndingSession, remembered: Remembered) -> None:
    """The end of a session removes no data of the user's next session or of another user."""
    later = StreamEvent(StreamEventKind.PRESENCE, "web", ending_session.harness.clock.now() + timedelta(seconds=1))
    ending_session.redis_memory.stream.append(UserKey("ana"), later)
    ending_session.redis_memory.stream.append(UserKey("ben"), later)
    next_one = ending_session.harness.send("again").session_id
    ending_session.redis_memory.working.remember_turn(next_one, remembered())
    assert ending_session.end() == Ended()
    assert ending_session.keys == ["perdure:stream:ana", "perdure:stream:ben", f"perdure:working:{next_one}"]
    assert len(ending_session.redis_memory.stream.recent(UserKey("ana"), 10)) == 1


def test_a_fork_that_ends_leaves_its_users_stream_alone(ending_session: EndingSession) -> None:
    """Only the end of the original session removes the user's event stream, not the end of a fork."""
    forked = fork(ending_session.harness.database, ending_session.harness.clock, ending_session.session_id)
    request_end(ending_session.harness.database, forked, "enough")
    assert isinstance(replace(ending_session, session_id=forked).end(), Ended)
    assert "perdure:stream:ana" in ending_session.keys
    assert isinstance(ending_session.end(), Ended)
    assert ending_session.keys == []


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("commit", ["memory.flush", "sessions.finish_ending"])
def test_an_ending_resumes_after_a_crash_while_cleaning(
    moment: str, commit: str, ending_session: EndingSession
) -> None:
    """A crash does not prevent the session's end, and causes neither a second model call nor duplicate turns."""
    with ending_session.harness.crashing("before" if moment == "before" else "after", commit):
        ending_session.end()
    ending_session.harness.move(LEASE_S)
    requests_before = len(ending_session.harness.model.requests)
    expected = EndNotDue() if (moment, commit) == ("after", "sessions.finish_ending") else Ended()
    assert ending_session.end() == expected
    assert len(ending_session.harness.model.requests) == requests_before
    assert (ending_session.row.state, ending_session.row.turn_count, ending_session.keys) == ("ended", 2, [])


def test_an_ending_waits_for_redis_and_continues(ending_session: EndingSession, unreachable: RedisMemory) -> None:
    """While Redis is unavailable, the session does not end. The attempts become rarer, and write no second summary."""
    assert ending_session.end(unreachable) == EndPostponed()
    assert (ending_session.row.state, ending_session.row.lease_until, ending_session.row.summary) == (
        "ending",
        None,
        "ok",
    )
    requests_before = len(ending_session.harness.model.requests)
    for wait_s in (5, 10, 20):
        ending_session.harness.move(wait_s * 0.8)
        assert endings_due(ending_session.harness.database, 10, 5, 30) == []
        ending_session.harness.move(wait_s * 0.4)
        assert endings_due(ending_session.harness.database, 10, 5, 30) == [ending_session.session_id]
        assert ending_session.end(unreachable) == EndPostponed()
    assert ending_session.end() == Ended()
    assert len(ending_session.harness.model.requests) == requests_before
    assert ending_session.keys == []


def test_an_ending_waits_for_the_snapshot_store(ending_session: EndingSession, tmp_path: Path) -> None:
    """While the snapshot store's directory is missing, as on an unmounted disk, the session does not end."""
    (tmp_path / "snapshots").rename(tmp_path / "elsewhere")
    assert ending_session.end() == EndPostponed()
    assert (ending_session.row.state, ending_session.row.ended_at) == ("ending", None)
    (tmp_path / "elsewhere").rename(tmp_path / "snapshots")
    assert ending_session.end() == Ended()
    assert ending_session.snapshots.load(ending_session.session_id) is None


def test_a_stale_ender_removes_nothing(ending_session: EndingSession) -> None:
    """A process that has lost the session's lease removes no data."""
    kept = ending_session.keys

    def overtaken(moment: str, name: str) -> None:
        if (moment, name) == ("before", "memory.flush"):
            ending_session.harness.sql(
                "UPDATE sessions SET token = token + 1 WHERE session_id = %(id)s", id=ending_session.session_id
            )

    with ending_session.harness.hooked(overtaken):
        assert ending_session.end() == EndNotDue()
    assert ending_session.keys == kept
    assert ending_session.snapshots.load(ending_session.session_id) is not None
    assert (ending_session.row.state, ending_session.row.turn_count) == ("ending", 1)
