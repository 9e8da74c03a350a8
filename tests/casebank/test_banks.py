"""A case's bank, and whether it is shared, determine who finds the case and with which cases it may be merged."""

from __future__ import annotations

import json
from uuid import UUID

import pytest

from perdure.access.tenants import UserKey
from perdure.casebank import archive, cases, search, search_queries, sharing, transfer
from perdure.casebank.cases import NewCase, add
from perdure.casebank.runs import prune, state
from perdure.casebank.search_queries import SearchScope
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import Conflict, InvalidRequest, NotFound
from perdure.settings import CaseScope
from tests.casebank.bank import Post, bank, put, statuses

NEAR = [1.0, 0.0, 0.0, 0.0]


def found(database: Database, user_id: str, *banks: str) -> set[str]:
    """The ids of the cases that a search in `banks` on behalf of `user_id` finds."""
    return {each.case_id for each in search.search_for_user(database, UserKey(user_id), NEAR, "hash:4", 9, banks=banks)}


def _filled(database: Database) -> None:
    put(database, "anas", vector=NEAR, user_id="ana")
    put(database, "anas shared", vector=NEAR, user_id="ana", shared=True)
    put(database, "anas in support", vector=NEAR, user_id="ana", bank="support")
    put(database, "shared in support", vector=NEAR, user_id="ana", bank="support", shared=True)
    put(database, "imported", vector=NEAR)
    put(database, "imported to support", vector=NEAR, bank="support")


def test_a_search_finds_cases_of_the_given_banks_only(database: Database) -> None:
    """In the given banks, a search finds the user's own cases, shared cases and cases without an author, each once."""
    _filled(database)
    assert found(database, "ana", "common") == {"anas", "anas shared", "imported"}
    assert found(database, "bob", "common") == {"anas shared", "imported"}
    assert found(database, "bob", "support") == {"shared in support", "imported to support"}
    assert found(database, "bob", "sales") == found(database, "bob") == set()
    every = search.search_for_user(database, UserKey("ana"), NEAR, "hash:4", 9, banks=["common", "support"])
    assert len(every) == len({each.case_id for each in every}) == 6
    assert {each.bank: bool(each.shared_at) for each in every if each.case_id.startswith("shared")} == {"support": True}
    of_all = search.search(database, NEAR, "hash:4", 9, banks=["support"])
    assert {each.case_id for each in of_all} == {"anas in support", "shared in support", "imported to support"}
    assert len(search.search(database, NEAR, "hash:4", 9)) == 6


@pytest.mark.long
@pytest.mark.parametrize("few", [100, 1])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_small_bank_next_to_a_large_one_is_found(database: Database, few: int, *, indexed: bool) -> None:
    """With and without indexes, a search in a small bank finds the bank's cases, even if another bank is large."""
    _filled(database)
    for number in range(300):
        put(database, f"{number}", vector=NEAR, user_id=None if number % 2 else "ana")
    if indexed:
        search.build_indexes(database, index_from=100)
    parameters = {"vector": str(NEAR), "embedder": "hash:4", "k": 4, "least": None, "banks": ["support"]}
    for user_id, expected in (("bob", 2), ("ana", 3)):
        rows = database.run(
            search_queries.nearest_for_user(4, few, few), {**parameters, "authors": [user_id], "tenant": None}
        )
        assert len(rows) == expected
        assert {row.bank for row in rows} == {"support"}
    statement = search_queries.nearest(4, few, few, SearchScope.EVERYBODY, in_banks=True, include_archived=True)
    assert len(database.run(statement, {**parameters, "tenant": None})) == 3


def test_sharing_is_recorded_and_survives_archiving(database: Database) -> None:
    """A shared case is still shared after it was archived and restored. Sharing is recorded in the case's history."""
    _filled(database)
    with database.engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO case_archive (case_id, query, response_text, created_at, user_id, query_vector, embedder,"
            " archived_at, archived_reason)"
            " SELECT case_id, query, response_text, created_at, user_id, query_vector, embedder, now(), 'by the test'"
            " FROM cases WHERE case_id = 'anas shared'"
        )
        connection.exec_driver_sql("UPDATE cases SET status = 'archived' WHERE case_id = 'anas shared'")
    assert found(database, "bob", "common") == {"imported"}
    archive.restore(database, "anas shared")
    assert found(database, "bob", "common") == {"imported", "anas shared"}
    sharing.unshare(database, "anas shared", "an administrator")
    at = sharing.share(database, "anas", "an administrator")
    assert found(database, "bob", "common") == {"imported", "anas"}
    shown = cases.read(database, "anas")
    assert (shown["bank"], shown["shared_at"]) == ("common", at.isoformat())
    [event] = shown["history"]
    assert (event["event"], event["details"]) == ("shared", {"by": "an administrator"})
    assert event["at"] == shown["shared_at"]
    with pytest.raises(NotFound):
        sharing.share(database, "nobody", "an administrator")
    with pytest.raises(Conflict, match="no author"):
        sharing.unshare(database, "imported", "an administrator")


@pytest.mark.parametrize("scope", CaseScope)
def test_duplicates_of_two_banks_are_not_merged(database: Database, clock: MovedClock, scope: CaseScope) -> None:
    """Duplicates in different banks are not merged, because a merge would hide a case from the agents of its bank."""
    put(database, "a", vector=NEAR, user_id="ana", usage=9)
    put(database, "b", vector=NEAR, user_id="ana", usage=8, bank="support")
    put(database, "c", vector=NEAR, user_id="ana", usage=7, bank="support")
    merged = prune.run(bank(database, clock, scope=scope))["details"]["merged"]
    assert [(each["keeper"], each["removed"]) for each in merged] == [("b", "c")]
    assert statuses(database) == {"a": "active", "b": "active", "c": "archived"}


def test_a_shared_case_is_not_merged_into_a_private_one(database: Database, clock: MovedClock) -> None:
    """A shared case is merged into a private case only with the scope `all`, which shows every case to every user."""
    put(database, "own", vector=NEAR, user_id="ana", usage=9)
    put(database, "shared", vector=NEAR, user_id="ana", usage=8, shared=True)
    put(database, "shared too", vector=NEAR, user_id="ana", usage=7, shared=True)
    put(database, "of bob", vector=NEAR, user_id="bob", usage=6, shared=True)
    details = prune.dry_run(bank(database, clock))["details"]
    assert [(each["keeper"], each["removed"]) for each in details["merged"]] == [("shared", "shared too")]
    everybody = prune.dry_run(bank(database, clock, scope=CaseScope.ALL))["details"]
    assert {each["keeper"] for each in everybody["merged"]} == {"own"}


def test_a_case_that_was_shared_since_the_plan_is_spared(database: Database, clock: MovedClock) -> None:
    """If a case is shared after a plan is made, the plan's merge of that case into a private one is not applied."""
    put(database, "keeper", vector=NEAR, user_id="ana", usage=9)
    put(database, "loser", vector=NEAR, user_id="ana", usage=8)
    post = Post()
    waiting = prune.run(bank(database, clock, post, approval="manual"))
    sharing.share(database, "loser", "the test")
    state.approve(database, UUID(waiting["run_id"]), "the test")
    done = prune.advance(bank(database, clock, post))
    assert done is not None
    assert [each["reason"] for each in done["details"]["spared"]] == ["only one of it and its keeper is shared"]


def test_banks_and_sharing_survive_export_and_import(database: Database, clock: MovedClock) -> None:
    """An export includes the bank of each case and whether the case is shared. An import restores both."""
    _filled(database)
    lines = [json.dumps(line) for line in transfer.export_lines(database)]
    assert [
        json.loads(line)["case_id"] for line in map(json.dumps, transfer.export_lines(database, bank="support"))
    ] == [
        "anas in support",
        "imported to support",
        "shared in support",
    ]
    with database.engine.connect() as connection:
        connection.exec_driver_sql("TRUNCATE cases, case_executions, case_archive, case_history")
    assert transfer.import_lines(database, lines, now=clock.now()).added == 6
    assert found(database, "bob", "support") == {"shared in support", "imported to support"}
    assert found(database, "bob", "common") == {"anas shared", "imported"}


@pytest.mark.parametrize(
    "wrong", [{"bank": ""}, {"bank": "a b"}, {"bank": "x" * 65}, {"user_id": None, "shared_at": "2026-01-01T00:00:00Z"}]
)
def test_a_bank_is_an_identifier_and_a_shared_case_has_an_author(
    database: Database, clock: MovedClock, wrong: dict[str, str | None]
) -> None:
    """An import refuses an invalid bank name, and a shared case without an author. Each refusal states the reason."""
    line = json.dumps({"case_id": "a", "query": "q", "response_text": "a", "user_id": "ana", **wrong})
    imported = transfer.import_lines(database, [line], now=clock.now())
    assert (imported.added, [number for number, _ in imported.bad]) == (0, [1])
    assert imported.bad[0][1].startswith(("bank must be", "shared_at needs"))
    with pytest.raises(InvalidRequest):
        add(database, NewCase("a", "q", "a", bank="no bank"), now=clock.now())
