"""An ended session leaves no data outside PostgreSQL, also after crashes and outages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Row

from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.stream import StreamEvent, StreamEventKind
from perdure.sessions.ending import Ended, EndOutcome, NotDue, Postponed, endings_due, request_end
from perdure.sessions.forking import fork
from perdure.snapshots.file import FileSnapshots
from perdure.snapshots.store import SnapshotStore
from perdure.tasks.process import Process
from perdure.tasks.sessions import ender
from perdure.testing.suites.snapshots import snapshot_of
from perdure.turns.run.runner import Runner
from tests.memory.conftest import Remembered, client, redis_memory, remembered, unreachable
from tests.turns.stage import Stage

__all__ = ["client", "redis_memory", "remembered", "unreachable"]

LEASE_S = 31.0


@dataclass(frozen=True)
class Scene:
    """A session that was asked to end, and a process that ends it."""

    stage: Stage
    redis_memory: RedisMemory
    client: Any
    over: UUID
    snapshots: SnapshotStore

    def end(self, redis_memory: RedisMemory | None = None) -> EndOutcome:
        """End it as the task does, with the scene's Redis unless another one is given."""
        runtime = replace(self.stage.runtime, redis_memory=redis_memory or self.redis_memory, snapshots=self.snapshots)
        return ender(Process(runtime, Runner(runtime, "tests"), {}, lambda _: True)).end(self.over)

    @property
    def row(self) -> Row[Any]:
        """The session's."""
        return self.stage.session(self.over)

    @property
    def keys(self) -> list[str]:
        """What is in Redis."""
        return sorted(self.client.keys())


@pytest.fixture
def scene(stage: Stage, redis_memory: RedisMemory, client: Any, remembered: Remembered, tmp_path: Path) -> Scene:
    """Redis remembers a turn of the session that PostgreSQL lacks, and what the session saw; it has a snapshot."""
    sent = stage.send("hello")
    stage.run(sent.session_id)
    redis_memory.working.remember_turn(sent.session_id, remembered(stage.session(sent.session_id).token))
    redis_memory.stream.append("ana", StreamEvent(StreamEventKind.TYPING, "cli", stage.clock.now()))
    stage.move(1)
    request_end(stage.database, sent.session_id, "enough")
    (tmp_path / "snapshots").mkdir()
    snapshots = FileSnapshots(tmp_path / "snapshots")
    snapshots.save(snapshot_of(sent.session_id), 1)
    return Scene(stage, redis_memory, client, sent.session_id, snapshots)


def test_an_ending_flushes_and_leaves_nothing_behind(scene: Scene) -> None:
    """No key, no snapshot; then, and not before, the session has ended and waits for consolidation."""
    seen: list[Any] = []

    def watch(moment: str, name: str) -> None:
        if (moment, name) == ("before", "sessions.finish_ending"):
            seen.append((scene.row.state, scene.keys, scene.snapshots.load(scene.over)))

    with scene.stage.hooked(watch):
        assert scene.end() == Ended()
    assert seen == [("ending", [], None)]
    said = [content for _, content in scene.stage.lines(scene.over)]
    assert said == ["hello", "ok", "question 1", "answer to question 1"]
    assert (scene.row.state, scene.row.turn_count, scene.row.lease_until) == ("ended", 2, None)
    assert scene.row.ended_at is not None


def test_what_belongs_to_others_stays(scene: Scene, remembered: Remembered) -> None:
    """The user's next session has begun, another user's goes on."""
    later = StreamEvent(StreamEventKind.PRESENCE, "web", scene.stage.clock.now() + timedelta(seconds=1))
    scene.redis_memory.stream.append("ana", later)
    scene.redis_memory.stream.append("ben", later)
    next_one = scene.stage.send("again").session_id
    scene.redis_memory.working.remember_turn(next_one, remembered())
    assert scene.end() == Ended()
    assert scene.keys == ["perdure:stream:ana", "perdure:stream:ben", f"perdure:working:{next_one}"]
    assert len(scene.redis_memory.stream.recent("ana", 10)) == 1


def test_a_fork_that_ends_leaves_its_users_stream_alone(scene: Scene) -> None:
    """What was seen belongs to the conversation that channels reach, and goes with that one."""
    forked = fork(scene.stage.database, scene.stage.clock, scene.over)
    request_end(scene.stage.database, forked, "enough")
    assert isinstance(replace(scene, over=forked).end(), Ended)
    assert "perdure:stream:ana" in scene.keys
    assert isinstance(scene.end(), Ended)
    assert scene.keys == []


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("commit", ["memory.flush", "sessions.finish_ending"])
def test_a_crash_while_cleaning_is_gone_on_from(moment: str, commit: str, scene: Scene) -> None:
    """What was flushed is not flushed again, what was removed is not missed; one summary."""
    with scene.stage.crashing("before" if moment == "before" else "after", commit):
        scene.end()
    scene.stage.move(LEASE_S)
    asked = len(scene.stage.model.requests)
    expected = NotDue() if (moment, commit) == ("after", "sessions.finish_ending") else Ended()
    assert scene.end() == expected
    assert len(scene.stage.model.requests) == asked
    assert (scene.row.state, scene.row.turn_count, scene.keys) == ("ended", 2, [])


def test_an_ending_waits_for_redis_and_goes_on(scene: Scene, unreachable: RedisMemory) -> None:
    """A session never ends with something left; it is tried again less and less often, without another summary."""
    assert scene.end(unreachable) == Postponed()
    assert (scene.row.state, scene.row.lease_until, scene.row.summary) == ("ending", None, "ok")
    asked = len(scene.stage.model.requests)
    for wait_s in (5, 10, 20):
        scene.stage.move(wait_s * 0.8)
        assert endings_due(scene.stage.database, 10, 5, 30) == []
        scene.stage.move(wait_s * 0.4)
        assert endings_due(scene.stage.database, 10, 5, 30) == [scene.over]
        assert scene.end(unreachable) == Postponed()
    assert scene.end() == Ended()
    assert len(scene.stage.model.requests) == asked
    assert scene.keys == []


def test_an_ending_waits_for_the_store_of_snapshots(scene: Scene, tmp_path: Path) -> None:
    """A disk that is not mounted: the same."""
    (tmp_path / "snapshots").rename(tmp_path / "elsewhere")
    assert scene.end() == Postponed()
    assert (scene.row.state, scene.row.ended_at) == ("ending", None)
    (tmp_path / "elsewhere").rename(tmp_path / "snapshots")
    assert scene.end() == Ended()
    assert scene.snapshots.load(scene.over) is None


def test_a_stale_ender_removes_nothing(scene: Scene) -> None:
    """The present holder of the session cleans up."""
    kept = scene.keys

    def overtaken(moment: str, name: str) -> None:
        if (moment, name) == ("before", "memory.flush"):
            scene.stage.sql("UPDATE sessions SET token = token + 1 WHERE session_id = %(id)s", id=scene.over)

    with scene.stage.hooked(overtaken):
        assert scene.end() == NotDue()
    assert scene.keys == kept
    assert scene.snapshots.load(scene.over) is not None
    assert (scene.row.state, scene.row.turn_count) == ("ending", 1)
