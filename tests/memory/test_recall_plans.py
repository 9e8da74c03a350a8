"""Recall uses indexes, both for a user with one row in a hundred and for a user with half of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Connection

from perdure.database.engine import Database, Statement
from perdure.database.schema import Names
from perdure.memory.embedding import build_index, register, vector_literal
from perdure.memory.recall import queries
from perdure.models.embedders.hashing import HashEmbedder
from tests.databases import engine_of

_ROWS = 6_000
_DIMENSIONS = 64
_EMBEDDER = HashEmbedder(_DIMENSIONS)


@pytest.fixture
def filled(database: Database) -> Iterator[Connection]:
    """A connection to a database with memories and messages of 51 users. One user has half of the rows.

    The vectors of the rows are random and indexed.
    """
    registered = register(database, _EMBEDDER.name, _DIMENSIONS)
    engine = engine_of(database.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT setseed(0.5)")
        connection.exec_driver_sql(_FILL.replace(":rows", str(_ROWS)).replace(":dimensions", str(_DIMENSIONS)))
        assert build_index(database, registered, 1_000)
        connection.exec_driver_sql("VACUUM ANALYZE memories, memory_vectors, message_words, message_vectors")
        connection.exec_driver_sql("SET hnsw.iterative_scan = relaxed_order")
        yield connection
    engine.dispose()


_FILL = """
    CREATE TEMP TABLE owned AS
    SELECT n, gen_random_uuid() AS id, CASE WHEN n %% 2 = 0 THEN 'half' ELSE 'user ' || n %% 100 END AS user_id,
           'word' || (n * 7919 %% 500) || ' word' || (n * 104729 %% 700) || ' thing' AS content,
           ARRAY(SELECT random() - 0.5 + 0 * n FROM generate_series(1, :dimensions))::public.vector AS vector
    FROM generate_series(1, :rows) AS n;
    INSERT INTO users SELECT DISTINCT user_id, now() FROM owned;
    INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at,
                          valid_from)
    SELECT id, user_id, 'fact', content, 0.5, 0.5, '{cli}', 'tool', now(), now() - n * interval '1 hour' FROM owned;
    INSERT INTO memory_vectors SELECT id, 1, user_id, vector FROM owned;
    INSERT INTO message_words
    SELECT id, 1, user_id, now() - n * interval '1 hour',
           perdure_words(content) || array_to_tsvector(ARRAY[perdure_owner(user_id)]) FROM owned;
    INSERT INTO message_vectors (session_id, seq, embedder_id, user_id, half)
    SELECT id, 1, 1, user_id, vector FROM owned;
"""


def _plan(connection: Connection, mode: str, statement: Statement, user_id: str, **given: Any) -> str:
    """The plan of `statement`. `mode` is the value of PostgreSQL's setting `plan_cache_mode`."""
    parameters = {
        "user_id": user_id,
        "query": "word7 word9",
        "vector": vector_literal(_EMBEDDER.embed(["word7 word9"])[0]),
        "embedder_id": 1,
        "most": 60,
        "most_terms": 48,
        "most_telling": 8,
        "most_at_once": 2_000,
        "words": "word7 word3 word4",
        "shares": [1.0, 0.4, 0.3],
        "own": 1,
        "most_rows": 500,
        "most_found": 200,
        "common": 0.1,
        "exact_rows": 500,
        "seen_session": None,
        "seen_from": None,
        "exclude_sessions": [],
        "name": _EMBEDDER.name,
        "dimensions": _DIMENSIONS,
        "k": 10,
        "read_chars": 8_000,
        "most_best": 20,
        "most_within": 20,
        "seq_reach": 6,
        "preceding": 0.9,
        "starts": [datetime(2026, 1, 1, tzinfo=UTC)],
        "ends": [datetime(2026, 1, 2, tzinfo=UTC)],
        "text_weight": 1.0,
        "vector_weight": 0.6,
        "neighbours_weight": 0.4,
        "time_weight": 0.8,
        **given,
    }
    connection.exec_driver_sql(f"SET plan_cache_mode = {mode}")
    connection.exec_driver_sql(Names("perdure", "public").render(statement.prepare))
    values = tuple(parameters[name] for name in statement.parameters)
    lines = connection.exec_driver_sql(f"EXPLAIN {statement.execute}", values).scalars().all()
    connection.exec_driver_sql(f'DEALLOCATE "{statement.name}"')
    return "\n".join(lines)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_plans(filled: Connection, mode: str) -> None:
    """Searches by words and by vectors use indexes, with custom plans and with generic plans."""
    by_index = (
        (queries.find_messages_by_index(1, _DIMENSIONS), "message_words_words_idx"),
        (queries.find_messages_by_index(1, _DIMENSIONS), "message_vectors_1_half_idx"),
        (queries.find_messages_by_index(1, _DIMENSIONS), "message_words_pkey"),
        (queries.find_messages_by_index(1, _DIMENSIONS), "message_vectors_pkey"),
        (queries.MEMORIES_BY_WORDS, "memories_words_idx"),
        (queries.AVAILABLE, "memory_vectors_user_id_idx"),
        (queries.AVAILABLE, "message_vectors_user_id_idx"),
        (queries.memories_near_by_index(1, _DIMENSIONS), "memory_vectors_1_idx"),
    )
    exactly = (  # only for the user with few rows: for half of the table, a sequential scan is right
        (queries.FIND_MESSAGES, "message_vectors_user_id_idx"),
        (queries.MEMORIES_NEAR, "memory_vectors_user_id_idx"),
    )
    for user_id, statements in (("half", by_index), ("user 7", by_index + exactly)):
        for statement, index in statements:
            plan = _plan(filled, mode, statement, user_id)
            assert index in plan, (statement.name, plan)
            assert "Seq Scan on m" not in plan, (statement.name, plan)


@pytest.mark.exhaustive
def test_the_index_finds_enough_rows_of_any_user(filled: Connection, database: Database) -> None:
    """For any user, the vector index finds 20 of the user's rows.

    These 20 rows include at least 9 of the user's 10 nearest rows.
    """
    vector = vector_literal(_EMBEDDER.embed(["word7 word9"])[0])
    for user_id in ("half", "user 7"):
        given = {"user_id": user_id, "vector": vector, "embedder_id": 1, "most": 20}
        exact = [row.memory_id for row in database.run(queries.MEMORIES_NEAR, given)]
        found = [row.memory_id for row in database.run(queries.memories_near_by_index(1, _DIMENSIONS), given)]
        assert len(found) == 20
        assert len({*exact[:10]} & {*found}) >= 9
        owners = filled.exec_driver_sql(
            "SELECT DISTINCT user_id FROM memories WHERE memory_id = ANY (%s::uuid[])", ([str(each) for each in found],)
        )
        assert owners.scalars().all() == [user_id]


@pytest.mark.exhaustive
def test_frequent_words_find_the_row_with_most_of_them(filled: Connection, database: Database) -> None:
    """The row with the most words of the question ranks first, even if it is the oldest of thousands of matches."""
    filled.exec_driver_sql(
        "UPDATE memories SET content = 'word1 word2 word3', valid_from = '2001-01-01' "
        "WHERE memory_id = (SELECT min(memory_id::text)::uuid FROM memories WHERE user_id = 'half')"
    )
    given = {
        "user_id": "half", "query": "thing word1 word2 word3", "most": 60, "most_terms": 48, "most_telling": 8,
        "most_at_once": 2_000, "words": "", "shares": [], "own": 0,
    }  # fmt: skip
    for most_rows in (100, 1_000, 10_000):  # below and above the number of matches
        bounds = {"most_rows": most_rows, "most_found": 20, "common": 0.1}
        found = database.run(queries.MEMORIES_BY_WORDS, {**given, **bounds})
        best = filled.exec_driver_sql("SELECT content FROM memories WHERE memory_id = %s", (found[0].memory_id,))
        assert best.scalar_one() == "word1 word2 word3"
