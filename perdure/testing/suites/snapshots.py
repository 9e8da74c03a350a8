"""`SnapshotSuite`: behavioural tests that every snapshot store must pass.

A `StoreHarness` opens the store under test, as several processes would, and damages its data.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.errors import InvalidRequest, TooLarge
from perdure.models.protocol import Message, Role, ToolCall
from perdure.snapshots.codec import checked_variables, dump, parse
from perdure.snapshots.pending import MESSAGE
from perdure.snapshots.snapshot import MAX_VARIABLES_BYTES, AgentSnapshot, Event, Memory, Status
from perdure.snapshots.store import SnapshotStore, StaleSnapshot, Stored, Version

_PAYLOAD = {"user_id": "ana", "text": "où ? 📄", "reply_to": {"url": "https://a"}, "metadata": {"a": [1.5]}}

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30)
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT
JSON = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner), max_leaves=20)
VARIABLES = st.dictionaries(_TEXT, JSON, max_size=6)
EVENTS = st.lists(st.builds(Event, _TEXT, _TEXT, JSON), max_size=3).map(tuple)
VERSIONS = st.builds(
    Version, st.integers(0, 2**53 - 1) | st.integers(0, 3), st.integers(0, 2**53 - 1) | st.integers(0, 3)
)

# Suppresses three of hypothesis's health checks. All examples of a test use one store, which is safe because each
# example has its own session. All subclasses use one database of failed examples. On a busy machine, drawing is slow.
over_one_store = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors, HealthCheck.too_slow],
    max_examples=20,
)


HISTORY = (
    Message(Role.USER, "Où en est le rapport ?"),
    Message(Role.ASSISTANT, "", (ToolCall("call_1", "read", '{"path": "/tmp/report.txt"}'),)),
    Message(Role.TOOL, "42 lines", tool_call_id="call_1"),
    Message(Role.ASSISTANT, "It has 42 lines. 📄"),
)
"""The messages of each session under test."""

_VARIABLES = {"current_file_path": "/tmp/report.txt", "retry_count": 0}  # noqa: S108 (a value, no file)
_EVENTS = (Event("mcp", "task", {"id": 7}), Event("timer", "tick", None))
_SAVED_AT = 1_706_582_400_123


def snapshot_of(
    agent_id: UUID, tick: int = 1, variables: Any = None, events: tuple[Event, ...] = _EVENTS
) -> AgentSnapshot:
    """A snapshot of a session whose messages are `HISTORY`."""
    memory = Memory(HISTORY, _VARIABLES if variables is None else variables)
    return AgentSnapshot(agent_id, tick, _SAVED_AT, Status.WAITING_FOR_EVENT, memory, events)


class StoreHarness(Protocol):
    """A store under test, and access to its storage that bypasses the store."""

    def open(self) -> SnapshotStore:
        """Open the store as another process would. All stores that one harness opens share their storage."""
        ...

    def session(self) -> UUID:
        """The id of a new session that has the messages `HISTORY` and no snapshot.

        If the store needs no row in the table `sessions`, a new `uuid4()` is enough.
        """
        ...

    def damage(self, agent_id: UUID) -> None:
        """Make the stored snapshot unreadable, as a failing disk would."""
        ...

    def set_aside(self, agent_id: UUID) -> bytes | None:
        """The content of the agent's snapshots that the store has set aside; `None` if there are none."""
        ...


class SnapshotSuite:
    """Tests of a snapshot store. Subclass it and define a fixture `harness` that returns a `StoreHarness`."""

    @pytest.fixture
    def store(self, harness: StoreHarness) -> Any:
        """The store under test, open."""
        made = harness.open()
        yield made
        made.close()

    def test_an_unknown_agent_has_no_snapshot(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """A new session has no snapshot; `load` returns `None` and raises nothing."""
        assert store.load(harness.session()) is None
        assert store.load(uuid4()) is None

    @over_one_store
    @given(variables=VARIABLES, events=EVENTS, version=VERSIONS)
    def test_a_loaded_snapshot_equals_the_saved_one(
        self, harness: StoreHarness, store: SnapshotStore, variables: Any, events: Any, version: Version
    ) -> None:
        """The test compares the snapshots as JSON text too, because 1.0 and 1 are equal in Python."""
        saved = snapshot_of(harness.session(), version.tick, variables, events)
        store.save(saved, version.token)
        loaded = store.load(saved.agent_id)
        assert loaded is not None
        assert (dump(loaded.snapshot), loaded.token) == (dump(saved), version.token)
        assert loaded.snapshot == saved

    def test_another_process_loads_the_snapshot(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """A snapshot outlives the process that saved it."""
        saved = snapshot_of(harness.session())
        store.save(saved, 1)
        store.close()
        successor = harness.open()
        assert successor.load(saved.agent_id) == Stored(saved, 1)
        successor.close()

    @over_one_store
    @given(versions=st.lists(VERSIONS, min_size=2, max_size=6))
    def test_saves_in_any_order_leave_the_highest_version(
        self, harness: StoreHarness, store: SnapshotStore, versions: list[Version]
    ) -> None:
        """A snapshot of a lower version is refused. The error names the refused and the stored version."""
        agent_id = harness.session()
        highest, latest = versions[0], snapshot_of(agent_id, versions[0].tick, {"number": 0})
        store.save(latest, highest.token)
        for number, version in enumerate(versions[1:], start=1):
            snapshot = snapshot_of(agent_id, version.tick, {"number": number})
            if version < highest:
                with pytest.raises(StaleSnapshot) as caught:
                    store.save(snapshot, version.token)
                assert (caught.value.offered, caught.value.stored) == (version, highest)
                assert f"{version}" in caught.value.message
                assert f"{highest}" in caught.value.message
            else:
                store.save(snapshot, version.token)
                highest, latest = version, snapshot
            assert store.load(agent_id) == Stored(latest, highest.token)

    def test_the_last_save_replaces_the_pending_messages(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """`load` returns the pending messages of the last save, in order and with all of their fields."""
        agent_id = harness.session()
        waiting = tuple(Event("http", MESSAGE, {**_PAYLOAD, "message_id": f"m{number}"}) for number in range(150))
        store.save(snapshot_of(agent_id, 1, {}, waiting), 1)
        loaded = store.load(agent_id)
        assert loaded is not None
        assert loaded.snapshot.event_queue_backup == waiting
        store.save(loaded.snapshot, 1)
        assert store.load(agent_id) == loaded
        store.save(snapshot_of(agent_id, 2, {}, waiting[149:]), 1)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 2, {}, waiting[149:]), 1)

    def test_sessions_are_independent(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """Saving or deleting one session's snapshot does not change another's."""
        one, other = harness.session(), harness.session()
        store.save(snapshot_of(one, 5), 9)
        store.save(snapshot_of(other, 1, {"mine": True}), 1)
        store.delete(one)
        assert store.load(one) is None
        assert store.load(other) == Stored(snapshot_of(other, 1, {"mine": True}), 1)

    def test_delete_is_idempotent_and_allows_a_lower_version(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """The engine deletes the snapshot of an ended session. After a crash, it may delete the snapshot again."""
        agent_id = harness.session()
        store.delete(agent_id)
        store.save(snapshot_of(agent_id, 7), 7)
        store.delete(agent_id)
        store.delete(agent_id)
        assert store.load(agent_id) is None
        store.save(snapshot_of(agent_id, 1), 1)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)

    @pytest.mark.parametrize(
        ("variables", "reason"),
        [
            ({"a": "half \ud800"}, "NUL or a character"),
            ({"a": ["\x00"]}, "NUL or a character"),
            ({"\x00": 1}, "NUL or a character"),
            ({"a": float("nan")}, "(?i)nan|range"),
            ({"a": object()}, "not JSON serializable"),
        ],
    )
    def test_invalid_variables_are_refused(
        self, harness: StoreHarness, store: SnapshotStore, variables: Any, reason: str
    ) -> None:
        """Every store refuses the same invalid variables. A refusal does not change the stored snapshot."""
        agent_id = harness.session()
        store.save(snapshot_of(agent_id, 1), 1)
        with pytest.raises(InvalidRequest, match=reason):
            store.save(snapshot_of(agent_id, 2, variables), 1)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)

    def test_variables_may_have_the_maximum_size_in_bytes(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """Each change writes all variables, so their size is bounded; the error states the limit."""
        agent_id = harness.session()
        frame = len(b'{"v":""}')
        full = {"v": "é" * ((MAX_VARIABLES_BYTES - frame) // 2)}
        store.save(snapshot_of(agent_id, 1, full), 1)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1, full), 1)
        with pytest.raises(TooLarge, match="65,536"):
            store.save(snapshot_of(agent_id, 2, {"v": full["v"] + "e"}), 1)

    @pytest.mark.parametrize("token", [-1, 2**53])
    def test_a_token_outside_of_0_to_2_53_is_refused(
        self, harness: StoreHarness, store: SnapshotStore, token: int
    ) -> None:
        """Lua and JavaScript cannot distinguish 2**53 from 2**53 + 1, so they cannot order such versions."""
        with pytest.raises(InvalidRequest, match="token"):
            store.save(snapshot_of(harness.session()), token)

    def test_a_damaged_snapshot_is_set_aside_and_reported(
        self, harness: StoreHarness, store: SnapshotStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A damaged snapshot must not block its session, and an operator must be able to inspect it."""
        agent_id = harness.session()
        store.save(snapshot_of(agent_id, 4), 4)
        harness.damage(agent_id)
        assert harness.set_aside(agent_id) is None
        with caplog.at_level(logging.ERROR):
            assert store.load(agent_id) is None
        assert str(agent_id) in caplog.text
        assert harness.set_aside(agent_id)
        store.save(snapshot_of(agent_id, 1), 1)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)
        assert harness.set_aside(agent_id)

    def test_a_save_replaces_a_damaged_snapshot(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """A worker that has the session's state in memory calls `save` without calling `load` first."""
        agent_id = harness.session()
        store.save(snapshot_of(agent_id, 4), 4)
        harness.damage(agent_id)
        store.save(snapshot_of(agent_id, 5), 4)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 5), 4)

    @pytest.mark.parametrize("tick", [4, 5])
    def test_a_snapshot_saved_during_the_load_of_a_damaged_one_is_not_set_aside(
        self, harness: StoreHarness, store: SnapshotStore, tick: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker may save after `load` has read the damaged snapshot and before `load` sets it aside."""
        agent_id = harness.session()
        store.save(snapshot_of(agent_id, 4), 4)
        harness.damage(agent_id)
        runner = harness.open()
        saving = threading.Lock()

        def saving_during(read: Callable[..., Any]) -> Callable[..., Any]:
            def reading(*arguments: Any) -> Any:
                try:
                    return read(*arguments)
                except InvalidRequest:
                    if saving.acquire(blocking=False):
                        runner.save(snapshot_of(agent_id, tick), 4)
                    raise

            return reading

        for module, name, read in (("store", "parse", parse), ("postgres", "checked_variables", checked_variables)):
            monkeypatch.setattr(f"perdure.snapshots.{module}.{name}", saving_during(read))
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, tick), 4)
        assert saving.locked()
        runner.close()

    def test_set_aside_moves_snapshots_up_to_the_given_version(
        self, harness: StoreHarness, store: SnapshotStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        """When an older database is restored, newer snapshots are set aside. Otherwise, every save would be stale."""
        agent_id = harness.session()
        store.save(snapshot_of(agent_id, 9), 9)
        store.set_aside(agent_id, Version(9, 8), "older than what is stored")
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 9), 9)
        with caplog.at_level(logging.ERROR):
            store.set_aside(agent_id, Version(9, 9), "the session is at tick 3")
        assert "the session is at tick 3" in caplog.text
        assert store.load(agent_id) is None
        assert harness.set_aside(agent_id)
        store.save(snapshot_of(agent_id, 3, {}), 3)
        store.set_aside(agent_id, Version(3, 2), "older than what is stored")
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 3, {}), 3)
        assert b"report" in (harness.set_aside(agent_id) or b"")
        store.set_aside(agent_id, Version(9, 9), "again")
        assert harness.set_aside(agent_id)
        assert store.load(agent_id) is None
        store.delete(agent_id)
        assert harness.set_aside(agent_id) is None

    def test_set_aside_without_a_snapshot_does_nothing(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """Another process may have set the snapshot aside already."""
        agent_id = harness.session()
        store.set_aside(agent_id, Version(9, 9), "gone")
        assert harness.set_aside(agent_id) is None

    def test_of_two_concurrent_runners_the_higher_token_wins(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """A worker that lost the session may still save. The versions that a reader loads never decrease."""
        agent_id = harness.session()
        other = harness.open()
        begin, done = threading.Barrier(3, timeout=30), threading.Event()

        def run(through: SnapshotStore, token: int) -> int:
            begin.wait()
            refused = 0
            for tick in range(1, 31):
                try:
                    through.save(snapshot_of(agent_id, tick, {"token": token}), token)
                except StaleSnapshot as stale:
                    assert (stale.offered, stale.stored.token) == (Version(token, tick), 2)  # noqa: PT017 (in a thread)
                    refused += 1
            return refused

        def watch() -> list[Version]:
            begin.wait()
            seen: list[Version] = []
            while not done.is_set():
                found = store.load(agent_id)
                if found is not None:
                    assert found.snapshot.memory.working_variables == {"token": found.token}
                    seen.append(found.version)
            return seen

        with ThreadPoolExecutor(3) as pool:
            watching = pool.submit(watch)
            try:
                racing = [pool.submit(run, store, 1), pool.submit(run, other, 2)]
                stale, fresh = (each.result(60) for each in racing)
            finally:
                done.set()
            seen = watching.result(30)
        other.close()
        assert fresh == 0
        assert seen == sorted(seen)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 30, {"token": 2}), 2)
        with pytest.raises(StaleSnapshot):
            store.save(snapshot_of(agent_id, 31), 1)
        assert 0 <= stale <= 30

    def test_many_threads_share_one_store(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """A worker process runs many turns concurrently, each of a different session."""
        sessions = [harness.session() for _ in range(8)]

        def work(agent_id: Any) -> Stored | None:
            for tick in range(1, 6):
                store.save(snapshot_of(agent_id, tick), 1)
            return store.load(agent_id)

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(work, sessions))
        assert found == [Stored(snapshot_of(agent_id, 5), 1) for agent_id in sessions]

    def test_a_closed_store_opens_again_on_use(self, harness: StoreHarness, store: SnapshotStore) -> None:
        """A turn may still save after its process has closed its stores."""
        saved = snapshot_of(harness.session())
        store.close()
        store.save(saved, 1)
        assert store.load(saved.agent_id) == Stored(saved, 1)
