"""The CaseBank with several tenants: searches and merges do not cross from one tenant to another."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from perdure.access.tenants import UserKey, everybodys, user_key
from perdure.casebank import search, search_queries
from perdure.casebank.plan.compute import seen_by
from perdure.casebank.runs import apply, prune
from perdure.casebank.search import EVERYBODY, Within
from perdure.casebank.search_queries import SearchScope
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.settings import CaseScope
from tests.casebank.bank import bank, put
from tests.plans import outline, plans

NEAR = [1.0, 0.0, 0.0, 0.0]
AUTHORS = [
    None, "ana", everybodys("acme"), user_key("acme", "ana"), user_key("acme", "bob"), everybodys("bolt"),
    user_key("bolt", "ana"), "",
]  # fmt: skip


def _name(author: str | None) -> str:
    return "nobody's" if author is None else repr(author)


@pytest.fixture
def filled(database: Database) -> Database:
    """One active and one archived case of each author in `AUTHORS`, all with the same vector."""
    for author in AUTHORS:
        put(database, _name(author), vector=NEAR, user_id=author)
        put(database, f"old {_name(author)}", vector=NEAR, user_id=author)
    with database.engine.connect() as connection:
        connection.exec_driver_sql("UPDATE cases SET status = 'archived' WHERE case_id LIKE 'old%%'")
    return database


@pytest.mark.parametrize("few", [0, search.INDEX_FROM])
def test_a_search_sees_one_tenant(filled: Database, monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """A search for a tenant finds only the tenant's cases. The operator's search finds all cases.

    A search for no tenant finds only the cases without a tenant.
    """
    monkeypatch.setattr(search, "INDEX_FROM", few)
    search._nearest.cache_clear()
    of = {"acme": AUTHORS[2:5], "bolt": AUTHORS[5:7], None: [None, "ana", ""]}
    for tenant, authors in of.items():
        seen = {_name(author) for author in authors}
        active = search.search(filled, NEAR, "hash:4", 99, Within(tenant))
        everything = search.search(filled, NEAR, "hash:4", 99, Within(tenant), include_archived=True)
        assert {each.case_id for each in active} == seen
        assert {each.case_id for each in everything} == seen | {f"old {name}" for name in seen}
        assert {each.to_dict()["tenant"] for each in everything} == {tenant}
    assert len(search.search(filled, NEAR, "hash:4", 99, EVERYBODY, include_archived=True)) == 2 * len(AUTHORS)
    search._nearest.cache_clear()


def test_a_user_sees_their_own_and_their_tenants(filled: Database) -> None:
    """A tenant's user finds their own cases, and the cases that belong to the whole tenant.

    Only users without a tenant find cases without an author.
    """
    expected: dict[str, set[str | None]] = {
        "ana": {None, "ana"},
        "eve": {None},
        user_key("acme", "ana"): {everybodys("acme"), user_key("acme", "ana")},
        user_key("bolt", "eve"): {everybodys("bolt")},
        user_key("third", "ana"): set(),
    }
    for user, authors in expected.items():
        found = search.search_for_user(filled, UserKey(user), NEAR, "hash:4", 99, banks=["common"])
        assert {each.case_id for each in found} == {_name(author) for author in authors}, user


@pytest.mark.long
def test_a_tenants_searches_use_an_index(database: Database) -> None:
    """With 5,000 cases, searches within a tenant use an index, in PostgreSQL's custom plan and in its generic plan."""
    with database.engine.connect() as connection:
        connection.execute(
            text(
                "INSERT INTO cases (case_id, query, response_text, query_vector, embedder, created_at, user_id)"
                " SELECT n, 'q', 'a', CAST('[1,0]' AS public.vector), 'hash:2', now(),"
                " CASE WHEN n % 500 = 0 THEN 'acme' ELSE 'bolt' END || chr(31) || n FROM generate_series(1, 5000) AS n"
            )
        )
        connection.exec_driver_sql("ANALYZE cases")
    search.build_indexes(database, index_from=100)
    common: dict[str, Any] = {"vector": "[1,0]", "embedder": "hash:2", "k": 4, "least": None}
    given = {**common, "tenant": "acme", "authors": [user_key("acme", "500"), everybodys("acme")]}
    given["banks"] = ["common"]
    statements = {
        "cases_of_tenant_idx": search_queries.nearest(
            2, 1_000, 1_000, SearchScope.TENANT, in_banks=False, include_archived=False
        ),
        "cases_user_id_idx": search_queries.nearest_for_user(2, 1_000, 1_000, of_tenant=True),
    }
    for index, statement in statements.items():
        for nodes in plans(database, statement, given):
            assert index in {node.get("Index Name") for node in nodes}, outline(nodes)
            assert not [node for node in nodes if node["Node Type"] == "Seq Scan" and node["Relation Name"] == "cases"]


def _pairs(database: Database, clock: MovedClock, scope: CaseScope) -> set[tuple[str, str]]:
    merged = prune.dry_run(bank(database, clock, scope=scope))["details"]["merged"]
    return {(each["keeper"], each["removed"]) for each in merged}


def test_duplicates_of_two_tenants_are_not_merged(database: Database, clock: MovedClock) -> None:
    """With the scope `all`, duplicates within a tenant are merged. Duplicates of two tenants are never merged."""
    authors = {"a": user_key("acme", "ana"), "b": user_key("acme", "bob"), "c": everybodys("acme"), "d": "ana"}
    authors |= {"e": user_key("bolt", "ana"), "f": everybodys("bolt")}
    for usage, (case_id, author) in enumerate({**authors, "g": None}.items()):
        put(database, case_id, vector=NEAR, user_id=author, usage=20 - usage)
    assert _pairs(database, clock, CaseScope.USER) == set()
    assert _pairs(database, clock, CaseScope.ALL) == {("a", "b"), ("a", "c"), ("d", "g"), ("e", "f")}


def test_a_plan_across_tenants_is_not_applied(database: Database, clock: MovedClock, monkeypatch: Any) -> None:
    """A plan that merges two tenants' cases is not applied, because a run locks each pair and checks it again.

    Earlier releases made such plans with the scope `all`.
    """
    put(database, "a", vector=NEAR, user_id=user_key("acme", "ana"), usage=9)
    put(database, "b", vector=NEAR, user_id=user_key("bolt", "ana"), usage=8)
    monkeypatch.setattr("perdure.casebank.plan.compute.seen_by", lambda _author, _scope: None)
    assert vars(apply)["seen_by"] is seen_by  # a run imports the module when it applies its first plan
    done = prune.run(bank(database, clock, scope=CaseScope.ALL))
    assert done["details"]["merged"] == []
    assert [each["reason"] for each in done["details"]["spared"]] == ["its keeper is another user's"]


def test_seen_by_identifies_the_users_who_see_a_case() -> None:
    """`seen_by` is equal for two authors only if the same users see their cases. Only such cases may be merged."""
    acmes = user_key("acme", "ana")
    assert [seen_by(each, CaseScope.USER) for each in (acmes, None, UserKey("ana"))] == [acmes, None, "ana"]
    assert [seen_by(each, CaseScope.ALL) for each in (acmes, None, UserKey("ana"))] == ["acme", None, None]
