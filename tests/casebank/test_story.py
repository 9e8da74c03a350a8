"""The life of one case: it is learnt, used, rated, archived and restored."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.casebank import archive, cases, executions, reflection, search
from perdure.casebank.runs import prune
from perdure.clock import MovedClock
from perdure.database.engine import Database
from tests.casebank.bank import bank, statuses, use


def test_a_case_that_fails_often_enough_is_archived_by_the_next_weekly_run(
    database: Database, clock: MovedClock
) -> None:
    """A case with much negative feedback gets a low rate. The weekly run archives the case, which can be restored."""
    case_id = cases.learn(
        database,
        clock,
        turn_id=UUID(int=1),
        user_id=UserKey("ana"),
        query="how do I reset it",
        response_text="press the button",
        query_vector=[1.0, 2.0, 3.0, 4.0],
        embedder="hash:4",
    )
    assert case_id is not None
    for number in range(2, 13):
        clock.advance(timedelta(hours=1))
        found = search.search(database, [1.0, 2.0, 3.0, 4.1], "hash:4", 4)
        assert [each.case_id for each in found] == [case_id]
        use(database, [case_id], UUID(int=number), succeeded=True)
        executions.feedback(database, UUID(int=number), 1 if number < 5 else -1)
    assert cases.read(database, case_id)["success_rate"] is None
    assert reflection.reflect(database).flagged == [case_id]
    assert round(cases.read(database, case_id)["success_rate"]) == 27
    parts = bank(database, clock)
    assert prune.run(parts)["details"]["spared"][0]["rule"] == "recent_access"
    clock.advance(timedelta(days=7, seconds=1))
    assert prune.run(parts)["details"]["removed"] == [case_id]
    assert search.search(database, [1.0, 2.0, 3.0, 4.1], "hash:4", 4) == []
    archive.restore(database, case_id)
    assert statuses(database) == {case_id: "active"}
