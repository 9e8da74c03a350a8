"""Tests of what only the PostgreSQL store does: the commit of a step also writes the step's variables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from perdure.database.engine import Database, Statement, as_json
from perdure.errors import NotFound
from perdure.settings import Settings
from perdure.snapshots import queries
from perdure.snapshots.codec import checked_variables
from perdure.snapshots.deletion import delete_snapshots
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.snapshots.snapshot import HISTORY_TURNS, Event, Status
from perdure.snapshots.store import SnapshotStore, SnapshotUnavailable, StaleSnapshot, Stored, Version
from perdure.testing.suites.snapshots import snapshot_of
from tests.snapshots.storages import MemorySnapshots, PostgresStorage

# Like the engine's statement for a step, this statement writes nothing if the token is stale.
STEP = Statement(
    "tests.step",
    f"""
    WITH fenced AS (
        UPDATE sessions SET tick = tick + 1, state = 'thinking', variables_tick = {queries.NEXT_VARIABLES_TICK}
        WHERE session_id = %(session_id)s AND token = %(token)s
        RETURNING session_id, token, tick
    ), {queries.WITH_STEP}
    SELECT tick FROM fenced
    """,  # noqa: S608 (the statement's own piece)
)

CLAIM = Statement("tests.claim", "UPDATE sessions SET token = token + 1 WHERE session_id = %(session_id)s")


@pytest.fixture
def session_id(postgres_storage: PostgresStorage) -> UUID:
    """The id of a session with one running turn."""
    return postgres_storage.session()


@pytest.fixture
def store(database: Database) -> SnapshotStore:
    """The store under test, on the test's database."""
    return PostgresSnapshots(database)


def step(database: Database, session_id: UUID, token: int, variables: Any = None) -> bool:
    """Commit a step, and change the variables if any are given; returns whether the step was committed."""
    text = as_json(checked_variables(variables)) if variables is not None else None
    return bool(database.run(STEP, {"session_id": session_id, "token": token, "variables": text}))


def rows(database: Database, session_id: UUID) -> list[Any]:
    """The variables, tick and `xmin` of a session's snapshot rows. `xmin` changes if a row is rewritten."""
    with database.engine.connect() as connection:
        found = connection.execute(
            text("SELECT variables::text, tick, xmin::text FROM snapshots WHERE session_id = :s ORDER BY tick"),
            {"s": session_id},
        )
        return [tuple(row) for row in found]


def test_variables_are_committed_with_their_step(database: Database, store: SnapshotStore, session_id: UUID) -> None:
    """After a step's commit, the snapshot has the step's variables, and the session's tick and status."""
    assert step(database, session_id, 0, {"a": 1})
    loaded = store.load(session_id)
    assert loaded is not None
    assert loaded.version == Version(0, 1)
    assert loaded.snapshot.status is Status.THINKING
    assert loaded.snapshot.memory.working_variables == {"a": 1}


def test_a_step_that_changes_no_variables_writes_no_row(
    database: Database, store: SnapshotStore, session_id: UUID
) -> None:
    """A step that changes no variables writes no row. The snapshot still has the session's tick."""
    assert step(database, session_id, 0)
    assert store.load(session_id) is None
    step(database, session_id, 0, {"a": 1})
    before = rows(database, session_id)
    step(database, session_id, 0)
    database.run(CLAIM, {"session_id": session_id})
    assert rows(database, session_id) == before
    loaded = store.load(session_id)
    assert loaded is not None
    assert loaded.version == Version(1, 3)
    assert loaded.snapshot.memory.working_variables == {"a": 1}


@pytest.mark.parametrize("variables", [{"a": 2}, None])
def test_a_step_discards_the_events_that_were_saved_before(
    database: Database, store: SnapshotStore, session_id: UUID, variables: Any
) -> None:
    """After a step, `load` ignores events saved before the step. Pending events are in the session's queue instead."""
    saved = replace(snapshot_of(session_id, 0), event_queue_backup=(Event("mcp", "task", 1),))
    store.save(saved, 0)
    assert store.load(session_id) == Stored(saved, 0)
    step(database, session_id, 0, variables)
    loaded = store.load(session_id)
    assert loaded is not None
    assert loaded.snapshot.memory.working_variables == (variables or saved.memory.working_variables)
    assert loaded.snapshot.event_queue_backup == ()


def test_the_variables_of_each_tick_stay(database: Database, session_id: UUID) -> None:
    """The variables of earlier ticks stay, because forks need them. A step that changes no variables adds no row."""
    for number in range(3):
        step(database, session_id, 0, {"a": number})
        step(database, session_id, 0)
    assert [(row[0], row[1]) for row in rows(database, session_id)] == [('{"a":0}', 1), ('{"a":1}', 3), ('{"a":2}', 5)]


def test_a_save_under_a_newer_token_replaces_later_ticks(
    database: Database, store: SnapshotStore, session_id: UUID
) -> None:
    """A save under a newer token deletes later ticks that were saved under an older token."""
    step(database, session_id, 0, {"a": 1})
    store.save(snapshot_of(session_id, 7, {"stale": True}), 0)
    store.save(snapshot_of(session_id, 2, {"a": 2}), 1)
    assert [(row[0], row[1]) for row in rows(database, session_id)] == [('{"a":1}', 1), ('{"a":2}', 2)]


def test_deletion_covers_postgresql_whatever_the_store(
    database: Database, store: SnapshotStore, session_id: UUID
) -> None:
    """`delete_snapshots` deletes all variables from PostgreSQL, even if snapshots are in an external store."""
    elsewhere = MemorySnapshots(f"acme://{session_id}", Settings(_env_file=None))
    step(database, session_id, 0, {"a": 1})
    step(database, session_id, 0, {"a": 2})
    elsewhere.save(snapshot_of(session_id), 1)
    delete_snapshots(database, elsewhere, session_id)
    delete_snapshots(database, elsewhere, session_id)
    assert rows(database, session_id) == []
    assert store.load(session_id) is None
    assert elsewhere.load(session_id) is None


def test_a_stale_runners_step_writes_no_variables(database: Database, store: SnapshotStore, session_id: UUID) -> None:
    """A step under a stale token is not committed and writes no variables."""
    database.run(CLAIM, {"session_id": session_id})
    assert not step(database, session_id, 0, {"stale": True})
    assert store.load(session_id) is None


def test_a_save_under_a_stale_token_is_refused(database: Database, store: SnapshotStore, session_id: UUID) -> None:
    """After a new claim, a save under the old token is refused, even if nothing was saved under the new token."""
    database.run(CLAIM, {"session_id": session_id})
    with pytest.raises(StaleSnapshot, match=r"token 0, tick 5 .* token 1, tick 0"):
        store.save(snapshot_of(session_id, 5), 0)
    assert rows(database, session_id) == []


def test_a_save_for_a_session_that_does_not_exist_is_refused(store: SnapshotStore) -> None:
    """Saving for an unknown session raises `NotFound`."""
    with pytest.raises(NotFound):
        store.save(snapshot_of(uuid4()), 1)


def test_the_history_is_that_of_the_last_turns_only(database: Database, store: SnapshotStore, session_id: UUID) -> None:
    """A snapshot has the messages of the last `HISTORY_TURNS` turns, so that its size stays bounded."""
    with database.engine.connect() as connection:
        for number in range(2, HISTORY_TURNS + 5):
            turn = {"turn": uuid4(), "session": session_id, "number": number, "seq": number + 3}
            connection.execute(
                text(
                    "INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, first_seq,"
                    " accepted_at, settled_at)"
                    " VALUES (:turn, :session, :number, 'ana', 'a', 'cli', 5, 'done', :seq, now(), now())"
                ),
                turn,
            )
            connection.execute(
                text(
                    "INSERT INTO messages (session_id, seq, turn_id, role, content, channel, token_count, created_at)"
                    " VALUES (:session, :seq, :turn, 'user', 'message ' || :number, 'cli', 1, now())"
                ),
                turn | {"number": str(number)},
            )
    step(database, session_id, 0, {"a": 1})
    loaded = store.load(session_id)
    assert loaded is not None
    contents = [message.content for message in loaded.snapshot.memory.short_term_history]
    assert contents == [f"message {number}" for number in range(5, HISTORY_TURNS + 5)]


@pytest.mark.parametrize("column", ["variables", "events"])
@pytest.mark.parametrize("value", ["null", "7", '"cut"', '{"a": 1, "a": 2}', '["x"]', '{"a": "\\u0000"}'])
def test_json_of_a_wrong_shape_is_set_aside(
    database: Database, store: SnapshotStore, session_id: UUID, column: str, value: str
) -> None:
    """PostgreSQL only checks that a value is JSON, so the store sets aside JSON of a wrong shape."""
    store.save(snapshot_of(session_id), 1)
    with database.engine.connect() as connection:
        connection.execute(text(f"UPDATE snapshots SET {column} = CAST(:v AS json)"), {"v": value})  # noqa: S608
    assert store.load(session_id) is None
    assert [row[1] for row in rows(database, session_id)] == [1]
    store.save(snapshot_of(session_id, 2), 1)
    assert store.load(session_id) == Stored(snapshot_of(session_id, 2), 1)


@pytest.fixture
def read_only(database_url: str) -> Iterator[Database]:
    """The test's database with read-only transactions, like a standby."""
    url = make_url(database_url)
    made = Database(url.update_query_dict({"options": "-c default_transaction_read_only=on"}, append=True))
    yield made
    made.close()


def test_a_read_only_database_is_reported_as_such(read_only: Database, store: SnapshotStore, session_id: UUID) -> None:
    """On a standby, saving and deleting report that the database is read-only; loading works."""
    store.save(snapshot_of(session_id), 1)
    standby = PostgresSnapshots(read_only)
    with pytest.raises(SnapshotUnavailable, match="postgres cannot be used: the database is read-only"):
        standby.save(snapshot_of(session_id, 2), 1)
    with pytest.raises(SnapshotUnavailable, match="read-only"):
        standby.delete(session_id)
    assert standby.load(session_id) == Stored(snapshot_of(session_id), 1)


def test_an_unreachable_database_is_reported_as_such() -> None:
    """As with every store, the error is `SnapshotUnavailable`, so that the engine retries."""
    unreachable = Database("postgresql+psycopg2://nobody@127.0.0.1:1/none")
    with pytest.raises(SnapshotUnavailable, match="postgres cannot be used: the database cannot be reached"):
        PostgresSnapshots(unreachable).load(uuid4())
    unreachable.close()
