"""What every store of snapshots must do. `test_suite.py` runs it over each of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.errors import InvalidRequest, TooLarge
from perdure.snapshots.codec import checked_variables, dump, parse
from perdure.snapshots.pending import MESSAGE
from perdure.snapshots.snapshot import MAX_VARIABLES_BYTES, Event
from perdure.snapshots.store import SnapshotStore, StaleSnapshot, Stored, Version
from tests.snapshots.worlds import World, snapshot_of

PAYLOAD = {"user_id": "ana", "text": "où ? 📄", "reply_to": {"url": "https://a"}, "metadata": {"a": [1.5]}}

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30)
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT
JSON = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner), max_leaves=20)
VARIABLES = st.dictionaries(_TEXT, JSON, max_size=6)
EVENTS = st.lists(st.builds(Event, _TEXT, _TEXT, JSON), max_size=3).map(tuple)
VERSIONS = st.builds(
    Version, st.integers(0, 2**53 - 1) | st.integers(0, 3), st.integers(0, 2**53 - 1) | st.integers(0, 3)
)

# The same store for all examples: each has a session of its own. And an example that fails in one
# store's class is as good a first try in another's.
over_one_store = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors], max_examples=20
)


class SnapshotSuite:
    """The tests. Subclass it and give it a fixture `world`."""

    @pytest.fixture
    def store(self, world: World) -> Any:
        """The world's store, open."""
        made = world.open()
        yield made
        made.close()

    def test_an_unknown_agent_has_no_snapshot(self, world: World, store: SnapshotStore) -> None:
        """A session begins blank; that is no error."""
        assert store.load(world.session()) is None
        assert store.load(uuid4()) is None

    @over_one_store
    @given(variables=VARIABLES, events=EVENTS, version=VERSIONS)
    def test_what_is_saved_is_what_is_loaded(
        self, world: World, store: SnapshotStore, variables: Any, events: Any, version: Version
    ) -> None:
        """Compared as text: a float read back as an integer would compare equal."""
        saved = snapshot_of(world.session(), version.tick, variables, events)
        store.save(saved, version.token)
        loaded = store.load(saved.agent_id)
        assert loaded is not None
        assert (dump(loaded.snapshot), loaded.token) == (dump(saved), version.token)
        assert loaded.snapshot == saved

    def test_another_process_finds_it(self, world: World, store: SnapshotStore) -> None:
        """A snapshot is there for the process that comes after."""
        saved = snapshot_of(world.session())
        store.save(saved, 1)
        store.close()
        successor = world.open()
        assert successor.load(saved.agent_id) == Stored(saved, 1)
        successor.close()

    @over_one_store
    @given(versions=st.lists(VERSIONS, min_size=2, max_size=6))
    def test_the_highest_version_wins_whatever_the_order(
        self, world: World, store: SnapshotStore, versions: list[Version]
    ) -> None:
        """A stale runner may come late; what it brings is refused, and both versions are named."""
        agent_id = world.session()
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

    def test_pending_messages_are_those_of_the_last_save(self, world: World, store: SnapshotStore) -> None:
        """They come back in their order, with all that accepting them takes; the next save replaces them."""
        agent_id = world.session()
        waiting = tuple(Event("http", MESSAGE, {**PAYLOAD, "message_id": f"m{number}"}) for number in range(150))
        store.save(snapshot_of(agent_id, 1, {}, waiting), 1)
        loaded = store.load(agent_id)
        assert loaded is not None
        assert loaded.snapshot.event_queue_backup == waiting
        store.save(loaded.snapshot, 1)
        assert store.load(agent_id) == loaded
        store.save(snapshot_of(agent_id, 2, {}, waiting[149:]), 1)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 2, {}, waiting[149:]), 1)

    def test_agents_do_not_meet(self, world: World, store: SnapshotStore) -> None:
        """One session's snapshot says nothing of another's."""
        one, other = world.session(), world.session()
        store.save(snapshot_of(one, 5), 9)
        store.save(snapshot_of(other, 1, {"mine": True}), 1)
        store.delete(one)
        assert store.load(one) is None
        assert store.load(other) == Stored(snapshot_of(other, 1, {"mine": True}), 1)

    def test_what_is_deleted_is_gone_and_can_be_saved_anew(self, world: World, store: SnapshotStore) -> None:
        """An ended session leaves nothing; deleting twice, as a crash would have it, is no error."""
        agent_id = world.session()
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
    def test_what_cannot_be_stored_is_refused_and_changes_nothing(
        self, world: World, store: SnapshotStore, variables: Any, reason: str
    ) -> None:
        """A tool that sets nonsense must hear of it, whatever the store; what was there stays."""
        agent_id = world.session()
        store.save(snapshot_of(agent_id, 1), 1)
        with pytest.raises(InvalidRequest, match=reason):
            store.save(snapshot_of(agent_id, 2, variables), 1)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)

    def test_variables_have_room_up_to_their_limit_and_no_byte_more(self, world: World, store: SnapshotStore) -> None:
        """They are written with each change: their size is bounded, in bytes, and the refusal says the limit."""
        agent_id = world.session()
        frame = len(b'{"v":""}')
        full = {"v": "é" * ((MAX_VARIABLES_BYTES - frame) // 2)}
        store.save(snapshot_of(agent_id, 1, full), 1)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1, full), 1)
        with pytest.raises(TooLarge, match="65,536"):
            store.save(snapshot_of(agent_id, 2, {"v": full["v"] + "e"}), 1)

    @pytest.mark.parametrize("token", [-1, 2**53])
    def test_a_token_that_no_reader_holds_exactly_is_refused(
        self, world: World, store: SnapshotStore, token: int
    ) -> None:
        """Lua's and JavaScript's numbers end there, and order by rounded numbers is no order."""
        with pytest.raises(InvalidRequest, match="token"):
            store.save(snapshot_of(world.session()), token)

    def test_a_damaged_snapshot_is_set_aside_and_reported(
        self, world: World, store: SnapshotStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It must not wedge the session, nor vanish before an operator could look at it."""
        agent_id = world.session()
        store.save(snapshot_of(agent_id, 4), 4)
        world.spoil(agent_id)
        assert world.kept(agent_id) is None
        with caplog.at_level(logging.ERROR):
            assert store.load(agent_id) is None
        assert str(agent_id) in caplog.text
        assert world.kept(agent_id)
        store.save(snapshot_of(agent_id, 1), 1)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 1), 1)
        assert world.kept(agent_id)

    def test_a_damaged_snapshot_can_be_replaced_unread(self, world: World, store: SnapshotStore) -> None:
        """A runner that holds the state in memory need not load before it saves."""
        agent_id = world.session()
        store.save(snapshot_of(agent_id, 4), 4)
        world.spoil(agent_id)
        store.save(snapshot_of(agent_id, 5), 4)
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 5), 4)

    @pytest.mark.parametrize("tick", [4, 5])
    def test_a_good_snapshot_is_not_set_aside_for_the_damaged_one_it_replaced(
        self, world: World, store: SnapshotStore, tick: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker may save between the read and the move: only what was read may be set aside."""
        agent_id = world.session()
        store.save(snapshot_of(agent_id, 4), 4)
        world.spoil(agent_id)
        runner = world.open()
        saving = threading.Lock()

        def beside(read: Callable[..., Any]) -> Callable[..., Any]:
            def reading(*arguments: Any) -> Any:
                try:
                    return read(*arguments)
                except InvalidRequest:
                    if saving.acquire(blocking=False):
                        runner.save(snapshot_of(agent_id, tick), 4)
                    raise

            return reading

        for module, name, read in (("store", "parse", parse), ("postgres", "checked_variables", checked_variables)):
            monkeypatch.setattr(f"perdure.snapshots.{module}.{name}", beside(read))
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, tick), 4)
        assert saving.locked()
        runner.close()

    def test_the_engine_sets_aside_what_is_not_of_the_committed_step(
        self, world: World, store: SnapshotStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A database restored from a backup is older than its snapshots, whose versions would refuse all others."""
        agent_id = world.session()
        store.save(snapshot_of(agent_id, 9), 9)
        store.set_aside(agent_id, Version(9, 8), "older than what is stored")
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 9), 9)
        with caplog.at_level(logging.ERROR):
            store.set_aside(agent_id, Version(9, 9), "the session is at tick 3")
        assert "the session is at tick 3" in caplog.text
        assert store.load(agent_id) is None
        assert world.kept(agent_id)
        store.save(snapshot_of(agent_id, 3, {}), 3)
        store.set_aside(agent_id, Version(3, 2), "older than what is stored")
        assert store.load(agent_id) == Stored(snapshot_of(agent_id, 3, {}), 3)
        assert b"report" in (world.kept(agent_id) or b"")
        store.set_aside(agent_id, Version(9, 9), "again")
        assert world.kept(agent_id)
        assert store.load(agent_id) is None
        store.delete(agent_id)
        assert world.kept(agent_id) is None

    def test_setting_aside_nothing_is_no_error(self, world: World, store: SnapshotStore) -> None:
        """Another process may have done it already."""
        agent_id = world.session()
        store.set_aside(agent_id, Version(9, 9), "gone")
        assert world.kept(agent_id) is None

    def test_two_runners_race_and_the_newer_one_prevails(self, world: World, store: SnapshotStore) -> None:
        """A stale process resumes and saves concurrently with its successor; readers never see an older version."""
        agent_id = world.session()
        other = world.open()
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

    def test_many_threads_share_one_store(self, world: World, store: SnapshotStore) -> None:
        """A worker runs many turns in one process, each with a session of its own."""
        sessions = [world.session() for _ in range(8)]

        def work(agent_id: Any) -> Stored | None:
            for tick in range(1, 6):
                store.save(snapshot_of(agent_id, tick), 1)
            return store.load(agent_id)

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(work, sessions))
        assert found == [Stored(snapshot_of(agent_id, 5), 1) for agent_id in sessions]

    def test_a_store_that_was_closed_opens_again(self, world: World, store: SnapshotStore) -> None:
        """A turn that outlives the closing of its process's stores must still be able to save."""
        saved = snapshot_of(world.session())
        store.close()
        store.save(saved, 1)
        assert store.load(saved.agent_id) == Stored(saved, 1)
