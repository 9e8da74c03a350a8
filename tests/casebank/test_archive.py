"""Archived cases: restoring, reading and searching them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from perdure.casebank import archive, cases, search, transfer
from perdure.casebank.embedding import embed_cases
from perdure.casebank.runs import prune
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import NotFound, ProviderError
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Vector
from perdure.models.protocol import ModelCall
from tests.casebank.bank import TABLES, bank, column, put, statuses

INDEX = "cases_shared_nearest_16_idx"

ROW = "SELECT cases::text || encode(public.vector_send(query_vector), 'hex') FROM cases WHERE case_id = :id"
STORABLE = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00"), min_size=1, max_size=40)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.long
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    query=STORABLE,
    category=st.none() | STORABLE,
    vector=st.lists(FLOAT32, min_size=1, max_size=8).filter(any),
    rate=st.none() | st.floats(0, 100),
    usage=st.integers(0, 100),
    idle=st.none() | st.integers(91, 10**4),
    number=st.integers(1, 2**60),
)
def test_restoring_gives_back_the_identical_row(  # noqa: PLR0917 (each is drawn by itself)
    database: Database,
    clock: MovedClock,
    query: str,
    category: str | None,
    vector: list[float],
    rate: float | None,
    usage: int,
    idle: int | None,
    number: int,
) -> None:
    """Archiving and restoring a case preserves its row, compared as text, and its vector, compared bit for bit."""
    with database.engine.connect() as connection:
        connection.exec_driver_sql(f"TRUNCATE {', '.join(TABLES)}")
        connection.execute(
            text(
                "INSERT INTO cases (case_id, query, response_text, category_path, query_vector, embedder, usage_count,"
                " success_rate, last_accessed_at, created_at, user_id, turn_id, review) VALUES ('c', :query, :query,"
                " :category, CAST(:vector AS public.vector), 'hash', :usage, :rate,"
                " perdure_now() - make_interval(days => :idle),"
                " perdure_now() - interval '91 days 1 second', 'ana', :turn, '{\"errors\": [1.50]}')"
            ),
            {
                "query": query,
                "category": category,
                "vector": f"[{','.join(map(repr, vector))}]",
                "usage": usage,
                "rate": rate,
                "idle": idle,
                "turn": UUID(int=number),
            },
        )
    before = column(database, ROW, id="c")
    result = prune.run(bank(database, clock))
    assert result["removed_cases"] + result["archived_cases"] == 1
    assert column(database, ROW, id="c") != before
    archive.restore(database, "c")
    assert column(database, ROW, id="c") == before


def test_restoring_marks_the_archive_and_the_history(database: Database, clock: MovedClock) -> None:
    """Restoring marks the row in `case_archive` and records an event. Pruning then spares the case for 7 days."""
    put(database, "c", usage=20, rate=10.0)
    prune.run(bank(database, clock))
    archive.restore(database, "c")
    assert statuses(database) == {"c": "active"}
    assert column(database, "SELECT restored_at <= perdure_now() AND restored_at >= archived_at FROM case_archive") == [
        True
    ]
    assert column(database, "SELECT event FROM case_history ORDER BY history_id") == ["archived", "restored"]
    spared = prune.run(bank(database, clock))["details"]["spared"]
    assert [(each["case_id"], each["rule"]) for each in spared] == [("c", "recently_restored")]
    clock.advance(timedelta(days=7, seconds=1))
    assert prune.run(bank(database, clock))["details"]["removed"] == ["c"]
    assert column(database, "SELECT count(*) FROM case_archive") == [2]


def test_only_archived_cases_can_be_restored(database: Database) -> None:
    """Restoring an active or unknown case raises `NotFound`."""
    put(database, "c")
    for case_id in ("c", "nobody", ""):
        with pytest.raises(NotFound):
            archive.restore(database, case_id)


def test_a_keeper_keeps_the_counts_of_a_restored_case(database: Database, clock: MovedClock) -> None:
    """A merged case is restored unchanged. Its keeper, the case that absorbed it, keeps the summed counts."""
    put(database, "keeper", vector=[1, 2, 3], usage=20, rate=80.0)
    put(database, "loser", vector=[1, 2, 3], usage=10, rate=50.0)
    before = column(database, ROW, id="loser")
    prune.run(bank(database, clock))
    archive.restore(database, "loser")
    assert column(database, ROW, id="loser") == before
    assert column(database, "SELECT usage_count FROM cases WHERE case_id = 'keeper'") == [30]
    assert prune.run(bank(database, clock))["merged_cases"] == 0, "a case restored within 7 days is spared"


def test_reading_an_archived_case_is_logged(
    database: Database, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading an archived case by its id logs a warning, and so does finding it in a search.

    A search finds archived cases only if `include_archived` is set.
    """
    put(database, "gone", vector=[1, 2, 3, 4], usage=20, rate=10.0)
    put(database, "there", vector=[1, 2, 3, 5], usage=20, rate=90.0)
    prune.run(bank(database, clock))
    caplog.clear()
    assert [each.case_id for each in search.search(database, [1, 2, 3, 4], "hash:4", 4)] == ["there"]
    assert not caplog.records
    found = search.search(database, [1, 2, 3, 4], "hash:4", 4, include_archived=True)
    assert [(each.case_id, each.status) for each in found] == [("gone", "archived"), ("there", "active")]
    assert [(record.levelno, "gone" in record.message) for record in caplog.records] == [(logging.WARNING, True)]
    caplog.clear()
    history = cases.read(database, "gone")["history"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert [event["event"] for event in history] == ["archived"]


def test_search_compares_within_one_embedder_and_size(database: Database) -> None:
    """A search finds only cases whose vectors have the embedder and the size of the query's vector."""
    put(database, "a", vector=[1, 0, 0, 0])
    put(database, "b", vector=[1, 1, 0, 0])
    put(database, "other", vector=[1, 0, 0, 0], embedder="other:4")
    put(database, "short", vector=[1, 0, 0])
    put(database, "none")
    put(database, "zero", vector=[0, 0, 0, 0])
    found = search.search(database, [2, 0, 0, 0], "hash:4", 9)
    assert [each.case_id for each in found] == ["a", "b"]
    assert [each.similarity for each in found] == [pytest.approx(1), pytest.approx(math.sqrt(0.5))]
    assert [each.case_id for each in search.search(database, [2, 0, 0, 0], "hash:4", 1)] == ["a"]


@pytest.mark.long
def test_a_large_bank_is_searched_by_its_index(database: Database) -> None:
    """With and without an index, a search finds exactly the nearest active cases of the query's embedder."""
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(900, 16)).round(3)
    with database.engine.connect() as connection:
        connection.execute(
            text(
                "INSERT INTO cases (case_id, query, response_text, query_vector, embedder, created_at, status)"
                " VALUES (:id, 'q', 'a', CAST(:vector AS public.vector), :embedder, now(), :status)"
            ),
            [
                {
                    "id": f"{number:04}",
                    "vector": str(vector.tolist()),
                    "embedder": "hash:16" if number % 10 == 0 else "other:16",
                    "status": "archived" if number % 3 == 0 else "active",
                }
                for number, vector in enumerate(vectors)
            ],
        )
        connection.exec_driver_sql("ANALYZE cases")
    mine = [number for number in range(0, 900, 10) if number % 3]
    cosines = vectors[mine] @ vectors[7] / np.linalg.norm(vectors[mine], axis=1)
    nearest = [f"{mine[at]:04}" for at in np.argsort(-cosines)[:4]]
    scanned = search.search(database, vectors[7].tolist(), "hash:16", 4)
    assert [each.case_id for each in scanned] == nearest
    assert search.build_indexes(database, index_from=900) == []
    with database.lock("perdure casebank indexes"):
        assert search.build_indexes(database, index_from=500) == [], "another process holds the lock"
    assert search.build_indexes(database, index_from=500) == [INDEX]
    assert search.build_indexes(database, index_from=500) == [INDEX], "a second call changes nothing"
    with database.engine.connect() as connection:
        connection.exec_driver_sql("SET enable_seqscan = off")
        plan = connection.exec_driver_sql(
            "EXPLAIN SELECT case_id FROM cases WHERE status = 'active' AND public.vector_dims(query_vector) = 16"
            " AND user_id IS NULL"
            " ORDER BY query_vector::public.vector(16) OPERATOR(public.<=>)"
            " '[1,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]'::public.vector(16) LIMIT 4"
        )
        assert INDEX in str(plan.fetchall())
    indexed = search.search(database, vectors[7].tolist(), "hash:16", 4)
    assert [each.case_id for each in indexed] == nearest


def test_a_restored_case_is_found(database: Database, clock: MovedClock) -> None:
    """A case is embedded when it is restored, if it has no vector, or one of the installation's former embedder."""
    former, present = HashEmbedder(16), HashEmbedder(32)
    lines: list[dict[str, Any]] = [
        {"case_id": "none", "query": "one", "status": "archived"},
        {"case_id": "foreign", "query": "two", "status": "archived", "query_vector": [1, 0], "embedder": "other:2"},
        {"case_id": "former", "query": "three", "last_accessed_at": "2020-01-01T00:00:00Z"},
    ]
    texts = [json.dumps({"response_text": "a", "created_at": "2020-01-01T00:00:00Z", **each}) for each in lines]
    transfer.import_lines(database, texts, now=clock.now(), own_embedder=former.name)
    list(embed_cases(database, former))
    assert prune.run(bank(database, clock))["details"]["archived"] == ["former"]
    assert list(embed_cases(database, present, reembed=True)) == []
    for each in lines:
        archive.restore(database, each["case_id"], present)
    embedders = {each["case_id"]: each["embedder"] for each in cases.list_cases(database)}
    assert embedders == {"none": present.name, "former": present.name, "foreign": "other:2"}


def test_a_case_is_restored_while_its_embedder_is_unavailable(database: Database, clock: MovedClock) -> None:
    """The next reflection embeds the case."""

    class _Ill(HashEmbedder):
        def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
            raise ProviderError("ill")

    text_ = json.dumps({"case_id": "a", "query": "one", "response_text": "b", "status": "archived"})
    transfer.import_lines(database, [text_], now=clock.now())
    archive.restore(database, "a", _Ill(16))
    assert statuses(database) == {"a": "active"}
    assert list(embed_cases(database, HashEmbedder(16))) == [1]
