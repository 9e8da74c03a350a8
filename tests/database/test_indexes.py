"""Vector indexes are built while other transactions run, by one process, and remains of a build are dropped once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from perdure.casebank import search
from perdure.database.engine import Database
from perdure.database.indexes import build_index
from perdure.errors import Unavailable
from perdure.memory import embedding
from tests.databases import engine_of
from tests.turns.harness import until

PATIENCE_S = 30.0

INDEXES = """
    SELECT c.relname, i.indisvalid FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
    JOIN pg_am AS a ON a.oid = c.relam WHERE a.amname = 'hnsw' ORDER BY 1
"""
WAITING = """
    SELECT count(*) FROM pg_stat_progress_create_index JOIN pg_stat_activity USING (pid)
    WHERE phase LIKE 'waiting for %%' AND clock_timestamp() - query_start > interval '300 milliseconds'
"""
"""The number of builds that have waited for longer than `LOCK_TIMEOUT_MS`."""

LOCK_TIMEOUT_MS = 100

BUILDING = "SELECT count(*) FROM pg_stat_progress_create_index WHERE datname = current_database()"
DROPPING = """
    SELECT pid FROM pg_stat_activity
    WHERE query LIKE 'DROP INDEX CONCURRENTLY%%' AND state = 'active' AND datname = current_database()
"""


@pytest.fixture
def other(database: Database) -> Iterator[Engine]:
    """Connections of another client."""
    made = engine_of(database.url)
    yield made
    made.dispose()


@pytest.fixture
def embedded(database: Database) -> Iterator[Database]:
    """A database with a user whose memories and cases have vectors. Its limits on waits and statements are short."""
    with database.engine.connect() as connection:
        connection.exec_driver_sql(
            """
            INSERT INTO users (user_id, created_at) VALUES ('ana', now());
            INSERT INTO embedders (name, dimensions, created_at) VALUES ('learnt', 3, now());
            INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at,
                                  valid_from)
            SELECT gen_random_uuid(), 'ana', 'fact', 'n', 0.5, 0.5, '{}', 'tool', now(), now()
            FROM generate_series(1, 40);
            INSERT INTO memory_vectors (memory_id, embedder_id, user_id, vector)
            SELECT memory_id, embedder_id, 'ana', '[1,2,3]' FROM memories, embedders;
            """
        )
        connection.exec_driver_sql(
            "INSERT INTO cases (case_id, query, response_text, query_vector, embedder, created_at) "
            "SELECT n, 'q', 'a', ('[1,' || n || ']')::public.vector, 'hash:2', now() FROM generate_series(1, 40) AS n"
        )
    made = Database(
        database.url.update_query_dict(
            {"options": f"-c lock_timeout={LOCK_TIMEOUT_MS} -c statement_timeout={10 * LOCK_TIMEOUT_MS}"}
        )
    )
    yield made
    made.close()


BUILDS: dict[str, tuple[Callable[[Database], object], list[str]]] = {
    "memories": (
        lambda database: embedding.build_indexes(database, "learnt", 40),
        ["memory_vectors_1_idx", "message_vectors_1_half_idx"],
    ),
    "cases": (lambda database: search.build_indexes(database, index_from=40), ["cases_shared_nearest_2_idx"]),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", BUILDS)
def test_a_long_transaction_delays_an_index_and_nothing_else(embedded: Database, other: Engine, kind: str) -> None:
    """Beside an open transaction, the build waits longer than any lock timeout, without blocking readers or writers.

    When the transaction has ended, the index is complete after one build.
    """
    build, names = BUILDS[kind]
    built = threading.Thread(target=build, args=(embedded,), daemon=True)
    with other.connect() as long, other.connect().execution_options(isolation_level="AUTOCOMMIT") as short:
        long.exec_driver_sql("SELECT * FROM memory_vectors, message_vectors, cases LIMIT 1")
        long.exec_driver_sql("DELETE FROM memory_vectors WHERE false; DELETE FROM message_vectors WHERE false")
        long.exec_driver_sql("DELETE FROM cases WHERE false")
        built.start()
        while not short.exec_driver_sql(WAITING).scalar():
            assert built.is_alive()
        short.exec_driver_sql("SET lock_timeout = 500")
        short.exec_driver_sql("UPDATE memory_vectors SET user_id = user_id")
        short.exec_driver_sql("UPDATE cases SET query = query")
        assert short.exec_driver_sql("SELECT count(*) FROM memory_vectors").scalar() == 40
        assert build(embedded) in (False, []), "another worker does not build the same index"
        long.commit()
        built.join(PATIENCE_S)
        assert [tuple(row) for row in short.exec_driver_sql(INDEXES)] == [(name, True) for name in names]


@pytest.mark.long
def test_remains_of_a_build_are_dropped_once(
    embedded: Database, other: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The remains of a build whose server was killed are dropped, then the index is built once. The log says so."""
    with other.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with other.connect() as long:
            long.exec_driver_sql("DELETE FROM memory_vectors WHERE false")
            built = threading.Thread(target=_ignoring_the_kill, args=(embedded,), daemon=True)
            built.start()
            while not connection.exec_driver_sql(WAITING).scalar():
                assert built.is_alive()
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_progress_create_index WHERE datname = current_database()"
            )
            # The process that builds loses its connection, and then waits to drop the remains: it is killed, too.
            while not (pid := connection.exec_driver_sql(DROPPING).scalar()):
                assert built.is_alive()
            connection.exec_driver_sql("SELECT pg_terminate_backend(%s)", (pid,))
            built.join(PATIENCE_S)
        until(lambda: not connection.exec_driver_sql(BUILDING).scalar(), "the killed server process ends")
        assert ("memory_vectors_1_idx", False) in [tuple(row) for row in connection.exec_driver_sql(INDEXES)]
        caplog.set_level("INFO")
        for _ in range(2):
            embedding.build_indexes(embedded, "learnt", 40)
        lines = [each.getMessage() for each in caplog.records if "memory_vectors_1_idx" in each.getMessage()]
        assert [line.partition(" memory_vectors_1_idx")[0] for line in lines] == [
            "drops the index", "builds the index", "built the index",
        ]  # fmt: skip
        assert [row.indisvalid for row in connection.exec_driver_sql(INDEXES)] == [True, True]


def _ignoring_the_kill(database: Database) -> None:
    with suppress(Unavailable):
        embedding.build_indexes(database, "learnt", 40)


def test_a_build_that_fails_leaves_nothing(embedded: Database, other: Engine) -> None:
    """An invalid index would cost each write, so a failed build drops it at once."""
    with pytest.raises(DBAPIError, match="dimensions"):
        build_index(
            embedded, "wrong_idx", "ON @schema.memory_vectors USING hnsw ((vector::@vector.halfvec(2)) "
            "@vector.halfvec_cosine_ops)",
        )  # fmt: skip
    with other.connect() as connection:
        assert connection.exec_driver_sql(INDEXES).all() == []


@pytest.mark.long
def test_the_roles_statement_timeout_ends_no_build(embedded: Database, other: Engine) -> None:
    """A short `statement_timeout` of the role, which suits its turns, does not apply to a build."""
    with other.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION slow(text) RETURNS text LANGUAGE sql IMMUTABLE AS "
            "$$ SELECT $1 || coalesce((SELECT '' FROM pg_sleep(1.2)), '') $$"
        )
    assert build_index(embedded, "users_slow_idx", "ON @schema.users (@schema.slow(user_id))")


def test_vectors_that_cannot_be_indexed_are_left_alone(embedded: Database) -> None:
    """Pgvector cannot index vectors of more than 4,000 dimensions, so each attempt to build would fail."""
    with embedded.engine.connect() as connection:
        connection.exec_driver_sql("UPDATE embedders SET dimensions = 4001")
    assert not embedding.build_indexes(embedded, "learnt", 1)
