"""A case's author determines which users see the case, and with which cases it may be merged."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
from sqlalchemy import text

from perdure.access.tenants import UserKey
from perdure.casebank import executions, search, search_queries, transfer
from perdure.casebank.cases import NewCase, add
from perdure.casebank.runs import prune, state
from perdure.clock import MovedClock
from perdure.database.engine import Database, Statement
from perdure.database.schema import Names
from perdure.settings import CaseScope
from tests.casebank.bank import Post, bank, column, put, statuses, use

NEAR = [1.0, 0.0, 0.0, 0.0]


def found(database: Database, user_id: str, k: int = 9, least: float | None = None) -> list[str]:
    """The ids of the cases that a search on behalf of `user_id` finds."""
    return [
        each.case_id
        for each in search.search_for_user(database, UserKey(user_id), NEAR, "hash:4", k, banks=["common"], least=least)
    ]


def test_a_user_finds_their_own_cases_and_those_without_an_author(database: Database) -> None:
    """A user's search finds their own cases and cases without an author. An administrator's search finds all cases."""
    put(database, "anas", vector=[1, 0, 0, 0], user_id="ana")
    put(database, "bobs", vector=[1, 0.1, 0, 0], user_id="bob")
    put(database, "imported", vector=[1, 0.2, 0, 0])
    put(database, "anas other", vector=[0, 1, 0, 0], user_id="ana")
    put(database, "of another embedder", vector=[1, 0, 0, 0], embedder="other:4", user_id="ana")
    assert found(database, "ana") == ["anas", "imported", "anas other"]
    assert found(database, "bob") == ["bobs", "imported"]
    assert found(database, "") == ["imported"]
    assert found(database, "ana", k=1) == ["anas"]
    assert found(database, "ana", least=0.5) == ["anas", "imported"]
    shown = {each.case_id: each.author for each in search.search(database, NEAR, "hash:4", 9)}
    assert shown == {"anas": "ana", "bobs": "bob", "imported": None, "anas other": "ana"}


@pytest.fixture
def crowded(database: Database) -> dict[str, np.ndarray[Any, Any]]:
    """3,000 cases: 100 without an author, 20 by ana, 900 by bob, and one by each of 1,980 other users.

    Returns all `vectors`, and for each user the indices of the cases that the user sees.
    """
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(3_000, 16)).round(3)
    authors = [None] * 100 + ["ana"] * 20 + ["bob"] * 900 + [f"user {number}" for number in range(1_980)]
    rows = [
        {"id": f"{number:04}", "vector": str(vector.tolist()), "user_id": author}
        for number, (vector, author) in enumerate(zip(vectors, authors, strict=True))
    ]
    with database.engine.connect() as connection:
        connection.execute(
            text(
                "INSERT INTO cases (case_id, query, response_text, query_vector, embedder, created_at, user_id)"
                " VALUES (:id, 'q', 'a', CAST(:vector AS public.vector), 'hash:16', now(), :user_id)"
            ),
            rows,
        )
        connection.exec_driver_sql("ANALYZE cases")
    return {"ana": np.r_[0:120], "bob": np.r_[0:100, 120:1_020], "nobody": np.r_[0:100], "vectors": vectors}


@pytest.mark.parametrize(
    ("few", "indexed"),
    [(500, True), (500, False), (search.INDEX_FROM, False), (search.INDEX_FROM, True)],
)
@pytest.mark.exhaustive
def test_a_user_among_many_finds_the_nearest(
    database: Database, crowded: dict[str, Any], few: int, *, indexed: bool
) -> None:
    """A search finds exactly the nearest visible cases, with and without indexes, for users with few or many cases."""
    if indexed:
        assert search.build_indexes(database, index_from=100) == [
            "cases_shared_nearest_16_idx",
            "cases_learnt_nearest_16_idx",
        ]
    statement = search_queries.nearest_for_user(16, few, few)
    vector_asked, vectors = crowded["vectors"][2_500], crowded["vectors"]
    for user_id in ("ana", "bob", "nobody"):
        visible = crowded[user_id]
        cosines = vectors[visible] @ vector_asked / np.linalg.norm(vectors[visible], axis=1)
        nearest = [f"{visible[at]:04}" for at in np.argsort(-cosines)[:4]]
        given = {
            "vector": str(vector_asked.tolist()),
            "embedder": "hash:16",
            "k": 4,
            "least": None,
            "authors": [user_id],
        }
        given |= {"banks": ["common"], "tenant": None}
        assert [row.case_id for row in database.run(statement, given)] == nearest


@pytest.mark.long
@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_a_search_for_a_user_scans_no_table(database: Database, crowded: dict[str, Any], mode: str) -> None:
    """A user's search uses indexes and does not scan the table, in PostgreSQL's custom plan and in its generic plan."""
    search.build_indexes(database, index_from=1_000)
    plan = _plan(database, search_queries.nearest_for_user(16, 500, 500), mode, authors=["ana"], k=4, least=0.5)
    assert "Seq Scan on cases" not in plan
    assert "cases_user_id_idx" in plan
    assert "cases_learnt_nearest_16_idx" in plan
    assert "One-Time Filter" in plan


def _plan(database: Database, statement: Statement, mode: str, **given: Any) -> str:
    values = {"vector": str([0.1] * 16), "embedder": "hash:16", "banks": ["common"], "tenant": None, **given}
    with database.engine.connect() as connection:
        connection.exec_driver_sql(f"SET plan_cache_mode = {mode}")
        connection.exec_driver_sql(Names("perdure", "public").render(statement.prepare))
        parameters = tuple(values[name] for name in statement.parameters)
        lines = connection.exec_driver_sql(f"EXPLAIN {statement.execute}", parameters).scalars().all()
        connection.exec_driver_sql(f'DEALLOCATE "{statement.name}"')
        connection.exec_driver_sql("RESET plan_cache_mode")
    return "\n".join(lines)


# --- the weekly policy -------------------------------------------------------------------


def _twins(database: Database) -> None:
    for case_id, user_id, usage in (("a", "ana", 9), ("b", "bob", 8), ("c", None, 7), ("d", "ana", 6), ("e", None, 5)):
        put(database, case_id, vector=NEAR, user_id=user_id, usage=usage)


def test_duplicates_of_two_users_are_not_merged(database: Database, clock: MovedClock) -> None:
    """Only scope `all` merges two users' duplicates. With scope `user`, a merge would hide a case from its author."""
    _twins(database)
    kept = prune.dry_run(bank(database, clock))["details"]["merged"]
    assert [(each["keeper"], each["removed"]) for each in kept] == [("a", "d"), ("c", "e")]
    shared = prune.dry_run(bank(database, clock, scope=CaseScope.ALL))["details"]["merged"]
    assert [(each["keeper"], each["removed"]) for each in shared] == [("a", "b"), ("a", "c"), ("a", "d"), ("a", "e")]


def test_a_plan_made_for_all_is_not_applied_across_users(database: Database, clock: MovedClock) -> None:
    """If the scope changes from `all` to `user` after planning, the plan's merges across users are not applied."""
    _twins(database)
    post = Post()
    made = bank(database, clock, post, scope=CaseScope.ALL, approval="manual")
    waiting = prune.run(made)
    assert (waiting["phase"], waiting["merged_cases"]) == ("waiting_approval", 4)
    state.approve(database, UUID(waiting["run_id"]), "the test")
    done = prune.advance(bank(database, clock, post))
    assert done is not None
    assert [each["removed"] for each in done["details"]["merged"]] == ["d"]
    assert statuses(database) == {"a": "active", "b": "active", "c": "active", "d": "archived", "e": "active"}
    reasons = {each["case_id"]: each["reason"] for each in done["details"]["spared"]}
    assert reasons == dict.fromkeys("bce", "its keeper is another user's")


def test_the_plan_sees_uses_that_are_not_counted_yet(database: Database, clock: MovedClock) -> None:
    """A plan includes recorded uses that `usage_count` does not include yet, so a recently used case is spared."""
    put(database, "sleeper", idle_days=200)
    put(database, "low", usage=10, rate=5.0, idle_days=30)
    assert prune.dry_run(bank(database, clock))["details"]["archived"] == ["sleeper"]
    use(database, ["sleeper", "low"], uuid4())
    details = prune.dry_run(bank(database, clock))["details"]
    assert (details["removed"], details["archived"]) == ([], [])
    assert [(each["case_id"], each["rule"]) for each in details["spared"]] == [("low", "recent_access")]
    assert column(database, "SELECT usage_count FROM cases ORDER BY case_id") == [10, 0]
    planned = details
    assert prune.run(bank(database, clock))["details"] == planned


def test_uncounted_uses_are_added_to_the_keeper(database: Database, clock: MovedClock) -> None:
    """A merge adds the uncounted uses of both cases to the keeper's `usage_count`. No use is counted twice."""
    put(database, "keeper", vector=NEAR, usage=20)
    put(database, "loser", vector=NEAR, usage=3)
    for case_id, times in (("keeper", 4), ("loser", 2)):
        for _ in range(times):
            use(database, [case_id], uuid4())
    made = bank(database, clock, recent_access_days=1, inactive_days=1_000)
    with database.engine.connect() as connection:
        connection.exec_driver_sql("UPDATE case_executions SET executed_at = perdure_now() - interval '2 days'")
    assert prune.run(made)["details"]["merged"][0]["removed"] == "loser"
    assert executions.count(database) == 0
    assert column(database, "SELECT usage_count FROM cases ORDER BY case_id") == [29, 5]


# --- files ---------------------------------------------------------------------------------


def test_authors_survive_export_and_import(database: Database, clock: MovedClock) -> None:
    """An export keeps authors, so that an import does not make one user's cases visible to all users."""
    now = clock.now()
    assert add(database, NewCase("learnt", "q", "a", user_id=UserKey("ana"), turn_id=uuid4()), now=now)
    assert add(database, NewCase("imported", "q", "a"), now=now)
    use(database, ["learnt"], uuid4())
    lines = [json.dumps(line) for line in transfer.export_lines(database)]
    assert [json.loads(line).get("user_id") for line in lines] == [None, "ana"]
    assert [json.loads(line)["usage_count"] for line in lines] == [0, 1]
    with database.engine.connect() as connection:
        connection.exec_driver_sql("TRUNCATE cases, case_executions, case_archive, case_history")
    assert transfer.import_lines(database, lines, now=now).added == 2
    assert column(database, "SELECT user_id FROM cases ORDER BY case_id") == [None, "ana"]
    unknown = '{"case_id": "of nobody", "query": "q", "response_text": "a", "user_id": ""}'
    assert transfer.import_lines(database, [unknown], now=now).added == 1
    assert '"user_id": ""' in [json.dumps(line) for line in transfer.export_lines(database)][2]
