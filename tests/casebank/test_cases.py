"""Cases are added directly, from a file or from a turn. Uses are counted, and cases are rated and reviewed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from perdure.access.tenants import UserKey
from perdure.casebank import archive, cases, executions, reflection, search, transfer
from perdure.casebank import queries as casebank_queries
from perdure.casebank.cases import NewCase
from perdure.casebank.embedding import embed_cases
from perdure.casebank.runs import prune
from perdure.casebank.runs import queries as runs_queries
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import InvalidRequest, ProviderError
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Vector
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from tests.casebank.bank import NORTH, NOW, bank, column, put, use
from tests.turns.harness import side_by_side

GOOD = NewCase("c", "a question", "an answer", query_vector=[1.0, 2.0], embedder="hash:2", usage_count=3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"success_rate": -0.1}, "success_rate"),
        ({"success_rate": 100.1}, "success_rate"),
        ({"success_rate": float("nan")}, "success_rate"),
        ({"usage_count": -1}, "usage_count"),
        ({"usage_count": 2**63}, "usage_count"),
        ({"query_vector": []}, "0 dimensions"),
        ({"query_vector": [0.0, 0.0]}, "no length"),
        ({"query_vector": [1e-60, 0.0]}, "no length"),
        ({"query_vector": [float("nan"), 1.0]}, "NaN"),
        ({"query_vector": [float("inf"), 1.0]}, "NaN"),
        ({"query_vector": [1e39, 1.0]}, "float32"),
        ({"query_vector": [1.0] * 16_001}, "16001 dimensions"),
        ({"embedder": None}, "embedder"),
        ({"embedder": ""}, "embedder"),
        ({"last_accessed_at": NOW + timedelta(hours=1)}, "future"),
        ({"created_at": NOW + timedelta(hours=1)}, "future"),
        ({"created_at": NOW.replace(tzinfo=None)}, "time zone"),
        ({"created_at": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))}, "before 1970"),
        ({"last_accessed_at": datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)}, "before 1970"),
        ({"category_path": "x" * 256}, "category_path"),
        ({"case_id": ""}, "case_id"),
        ({"case_id": "x" * 256}, "case_id"),
        ({"case_id": "a\x00"}, "case_id"),
        ({"user_id": "x" * 201}, "user_id"),
        ({"user_id": "a\x00"}, "user_id"),
        ({"query": " "}, "query"),
        ({"response_text": ""}, "response_text"),
    ],
)
def test_invalid_cases_are_refused_with_the_reason(change: dict[str, Any], why: str) -> None:
    """An invalid case is refused, and the error states the reason."""
    with pytest.raises(InvalidRequest, match=why):
        cases.check(replace(GOOD, **change), now=NOW)


def test_a_vector_of_another_size_than_its_embedders_is_refused() -> None:
    """A vector of the wrong size is refused, because no search could find the case."""
    cases.check(GOOD, now=NOW, dimensions=2)
    with pytest.raises(InvalidRequest, match="2 dimensions, its embedder's have 3"):
        cases.check(GOOD, now=NOW, dimensions=3)


@pytest.mark.parametrize("rate", [0, 100, None, 0.0, 50.5])
def test_the_bounds_themselves_are_accepted(database: Database, clock: MovedClock, rate: float | None) -> None:
    """Success rates of 0 and 100 percent are valid."""
    assert cases.add(database, replace(GOOD, success_rate=rate, created_at=clock.now()), now=clock.now())
    assert column(database, "SELECT success_rate FROM cases") == [rate]


def test_a_case_is_learnt_once(database: Database, clock: MovedClock) -> None:
    """Two positive feedbacks on one turn create one case. A search finds the case as soon as the case has a vector."""
    known: dict[str, Any] = {"turn_id": UUID(int=1), "user_id": "ana", "query": "how?", "response_text": "so"}
    case_id = cases.learn(database, clock, **known)
    assert case_id is not None
    assert cases.learn(database, clock, **known) is None
    embedder = HashEmbedder(16)
    assert search.search(database, embedder.embed(["how?"])[0], embedder.name, 1) == []
    assert list(embed_cases(database, embedder)) == [1]
    assert [each.case_id for each in search.search(database, embedder.embed(["how?"])[0], embedder.name, 1)] == [
        case_id
    ]


class _Refusing(HashEmbedder):
    """An embedder that refuses texts containing `bad`."""

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        if any("bad" in text for text in texts):
            raise InvalidRequest("That cannot be embedded.")
        return super().embed(texts, call)


def test_vectors_are_kept_until_new_ones_are_requested(database: Database) -> None:
    """A case keeps an imported vector of another embedder unless `reembed` is set.

    If the embedder refuses a case's question, the other cases still get vectors.
    """
    given = [line(case_id="a", query="one", query_vector=[1, 0], embedder="other:2"), line(case_id="c", query="two")]
    transfer.import_lines(database, [*given, line(case_id="b", query="bad")], now=NOW, own_embedder="hash:16")
    made = "SELECT embedder FROM cases ORDER BY case_id"
    assert list(embed_cases(database, _Refusing(16))) == [2]
    assert column(database, made) == ["other:2", None, "hash:16"]
    assert list(embed_cases(database, _Refusing(16), reembed=True)) == [2]
    assert column(database, made) == ["hash:16", None, "hash:16"]


def test_a_new_embedder_embeds_anew_what_the_former_one_embedded(database: Database, clock: MovedClock) -> None:
    """Imported without a vector, imported with one of the installation's embedder, or learnt: searches find each."""
    former, present = HashEmbedder(16), HashEmbedder(32)
    vector = list(map(float, former.embed(["three"])[0]))
    lines = [
        line(case_id="a", query="one"),
        line(case_id="c", query="three", query_vector=vector, embedder="hash:16"),
        line(case_id="d", query="four", query_vector=[1, 0], embedder="other:2"),
    ]
    assert transfer.import_lines(database, lines, now=clock.now(), own_embedder=former.name).added == 3
    learnt = cases.learn(
        database, clock, turn_id=UUID(int=1), user_id=UserKey("ana"), query="two", response_text="so",
        query_vector=former.embed(["two"])[0], embedder=former.name,
    )  # fmt: skip
    list(embed_cases(database, former))
    assert list(embed_cases(database, present)) == [3]
    assert list(embed_cases(database, present)) == []
    rows = [(each["case_id"], each["embedder"]) for each in cases.list_cases(database)]
    assert dict(rows) == {"a": "hash:32", learnt: "hash:32", "c": "hash:32", "d": "other:2"}


# --- files -----------------------------------------------------------------------------


def line(**fields: Any) -> str:
    """A line of an import file."""
    return json.dumps({"case_id": "c", "query": "q", "response_text": "a", **fields})


def test_a_file_with_bad_lines(database: Database, clock: MovedClock) -> None:
    """Each invalid line is reported with its number, and every valid one is imported."""
    lines = [
        line(case_id="1", query_vector=[1, 2], embedder="hash:2", usage_count=4, success_rate=50),
        "not json",
        line(case_id="2", success_rate=101),
        "",
        line(case_id="3", query_vector=[1, 2, 3], embedder="hash:2"),
        line(case_id="4", usage_count="7"),
        line(case_id="5", colour="red"),
        line(case_id="6", status="archived", last_accessed_at="2020-01-01T00:00:00Z"),
        '{"case_id": "7", "query": "q", "response_text": "a", "success_rate": NaN}',
        json.dumps({"case_id": "8", "query": "q"}),
        line(case_id="1"),
    ]
    imported = transfer.import_lines(database, lines, now=clock.now(), dimensions=lambda _embedder: 2)
    assert (imported.added, imported.unchanged) == (2, 1)
    assert [number for number, _ in imported.bad] == [2, 3, 5, 6, 7, 9, 10]
    why = dict(imported.bad)
    assert "JSON" in why[2]
    assert "success_rate" in why[3]
    assert "3 dimensions" in why[5]
    assert "usage_count" in why[6]
    assert "colour" in why[7]
    assert "response_text" in why[10]


@pytest.mark.long
def test_an_export_can_be_imported_again(database: Database, clock: MovedClock) -> None:
    """Importing an export changes nothing in the same database, and restores all cases in an empty database."""
    lines = [
        line(case_id="1", query_vector=[0.1, 2], embedder="hash:2", usage_count=4, success_rate=50.5),
        line(case_id="2", status="archived", last_accessed_at="2020-01-01T00:00:00Z", category_path="a/b"),
    ]
    assert transfer.import_lines(database, lines, now=clock.now()).added == 2
    exported = list(map(json.dumps, transfer.export_lines(database)))
    before = column(database, "SELECT cases::text FROM cases ORDER BY case_id")
    assert transfer.import_lines(database, exported, now=clock.now()).unchanged == 2
    assert column(database, "SELECT cases::text FROM cases ORDER BY case_id") == before
    with database.engine.connect() as connection:
        connection.exec_driver_sql("TRUNCATE cases, case_executions, case_archive, case_history")
    assert transfer.import_lines(database, exported, now=clock.now()).added == 2
    assert column(database, "SELECT cases::text FROM cases ORDER BY case_id") == before
    assert column(database, "SELECT case_id FROM case_archive") == ["2"]


# --- use and reflection ------------------------------------------------------------------


def counts(database: Database) -> list[int]:
    """The `usage_count` of each case, ordered by id."""
    return column(database, "SELECT usage_count FROM cases ORDER BY case_id")


def test_a_use_counts_once_a_turn(database: Database) -> None:
    """A use is counted once, even if it is recorded twice, or if several processes count concurrently.

    Lists of cases include the use even before it is counted.
    """
    put(database, "a", usage=1, idle_days=50)
    put(database, "b", usage=1, idle_days=50)
    for _ in range(2):
        use(database, ["b", "a", "erased", "a"], UUID(int=1), succeeded=False, error="TOOL_ERROR")
    assert counts(database) == [1, 1], "settling writes no case"
    assert [each["usage_count"] for each in cases.list_cases(database)] == [2, 2]
    counted = side_by_side(*[lambda: executions.count(database)] * 4)
    assert (sum(counted), counts(database)) == (2, [2, 2])
    assert [each["usage_count"] for each in cases.list_cases(database)] == [2, 2]
    assert column(database, "SELECT last_accessed_at > perdure_now() - interval '1 day' FROM cases") == [True, True]
    assert column(database, "SELECT case_id FROM case_executions ORDER BY 1") == ["a", "b"], "no use of an unknown case"
    assert column(database, "SELECT DISTINCT error FROM case_executions") == ["TOOL_ERROR"]
    use(database, ["a"], UUID(int=1), succeeded=False, error="TOOL_ERROR")
    assert (executions.count(database), counts(database)) == (0, [2, 2])


def test_a_use_is_counted_once_wherever_counting_stops(database: Database) -> None:
    """If counting is interrupted after a commit, the next count adds only the uses that are not counted yet."""
    for number in range(250):
        put(database, f"{number:03}")
    use(database, [f"{number:03}" for number in range(250)], UUID(int=1))
    pages = 0

    def die(moment: str, name: str) -> None:
        nonlocal pages
        if (moment, name) == ("after", "casebank.count_uses"):
            pages += 1
            raise KeyboardInterrupt

    database.observe = die
    with pytest.raises(KeyboardInterrupt):
        executions.count(database)
    database.observe = None
    assert (pages, sum(counts(database))) == (1, 100)
    assert executions.count(database, lambda: False) == 0, "a process that shuts down counts nothing more"
    assert executions.count(database) == 150
    assert counts(database) == [1] * 250


def test_a_locked_case_is_counted_later(database: Database) -> None:
    """Counting skips cases that a pruning run or the storing of feedback has locked. The next count adds their uses."""
    put(database, "a")
    put(database, "b")
    use(database, ["a", "b"], UUID(int=1))
    with database.transaction("tests.lock") as other:
        other.run(runs_queries.LOCK_CASES, {"case_ids": ["a"]})
        assert (executions.count(database), counts(database)) == (1, [0, 1])
    assert (executions.count(database), counts(database)) == (1, [1, 1])
    use(database, ["a", "b"], UUID(int=2))
    with database.transaction("tests.feedback") as other:
        other.run(casebank_queries.FEEDBACK, {"turn_id": UUID(int=2), "score": 1})
        assert (executions.count(database), counts(database)) == (0, [1, 1])
    assert (executions.count(database), counts(database)) == (2, [2, 2])


def test_an_archived_case_is_counted_when_it_is_restored(database: Database, clock: MovedClock) -> None:
    """If a use is recorded while its case is archived, the use is counted after the case is restored."""
    put(database, "a", usage=3, idle_days=200)
    assert prune.run(bank(database, clock))["details"]["archived"] == ["a"]
    use(database, ["a"], UUID(int=1))
    assert (executions.count(database), counts(database)) == (0, [3])
    archive.restore(database, "a")
    assert (executions.count(database), counts(database)) == (1, [4])


def uses(database: Database, clock: MovedClock, case_id: str, outcomes: str, first: int = 1) -> None:
    """Record one use per character of `outcomes`, one second apart: `+` for a success, `-` for a failure."""
    for number, outcome in enumerate(outcomes, start=first):
        clock.advance(timedelta(seconds=1))
        error = None if outcome == "+" else f"error {number % 2}"
        use(database, [case_id], UUID(int=number), succeeded=outcome == "+", error=error)


def test_the_rate_is_that_of_the_last_hundred_executions(database: Database, clock: MovedClock) -> None:
    """A case's rate is computed from its newest 100 uses. A case without recorded uses keeps its rate."""
    put(database, "a", rate=12.0)
    put(database, "b", rate=12.0)
    uses(database, clock, "a", "-" * 5 + "+" * 75 + "-" * 25)
    assert reflection.reflect(database) == reflection.Reflected(1, [])
    assert column(database, "SELECT success_rate FROM cases ORDER BY case_id") == [75.0, 12.0]


def test_an_imported_rate_counts_for_the_uses_before(database: Database, clock: MovedClock) -> None:
    """One failure does not outweigh 400 uses, however often reflection runs. After 100 uses, only they count."""
    case = cases.NewCase("a", "how", "so", usage_count=400, success_rate=95.0)
    few = cases.NewCase("b", "how", "so", usage_count=3, success_rate=100.0)
    for each in (case, few):
        cases.add(database, each, now=clock.now())
        uses(database, clock, each.case_id, "-")
    for _ in range(2):
        assert reflection.reflect(database) == reflection.Reflected(2, [])
        rates = column(database, "SELECT success_rate FROM cases ORDER BY case_id")
        assert rates == [pytest.approx(95.0 * 99 / 100), pytest.approx(75.0)]
    uses(database, clock, "a", "-" * 100, first=2)
    assert reflection.reflect(database).flagged == ["a"]
    assert column(database, "SELECT success_rate FROM cases WHERE case_id = 'a'") == [0.0]


def test_reflection_keeps_the_rate_of_a_merge(database: Database, clock: MovedClock) -> None:
    """The uses that a case has absorbed count in its rate until a hundred later uses replace them."""
    put(database, "keeper", vector=NORTH, usage=59, rate=90.0)
    put(database, "loser", vector=NORTH, usage=50, rate=40.0)
    uses(database, clock, "keeper", "-")
    clock.advance(timedelta(days=8))
    assert len(prune.run(bank(database, clock))["details"]["merged"]) == 1
    merged = column(database, "SELECT success_rate FROM cases WHERE case_id = 'keeper'")
    assert reflection.reflect(database).rated == 0
    assert column(database, "SELECT success_rate FROM cases WHERE case_id = 'keeper'") == merged
    uses(database, clock, "keeper", "+", first=2)
    assert reflection.reflect(database).rated == 1
    expected = pytest.approx((99 * merged[0] + 100) / 100)
    assert column(database, "SELECT success_rate FROM cases WHERE case_id = 'keeper'") == [expected]


def test_a_page_of_cases_without_executions_ends_no_reflection(database: Database, clock: MovedClock) -> None:
    """Cases whose executions are all older than their merge are on every page before a case that is rated."""
    for number in range(101):
        put(database, f"{number:03}")
        uses(database, clock, f"{number:03}", "-", first=number)
    with database.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO case_history (case_id, event, reason, details, at) "
                """SELECT case_id, 'absorbed', '', '{"after": {"usage_count": 1, "success_rate": 5}}', perdure_now() """
                "FROM cases WHERE case_id < '100'"
            )
        )
    assert reflection.reflect(database) == reflection.Reflected(1, ["100"])


def test_feedback_overrides_the_outcome_of_the_turn(database: Database, clock: MovedClock) -> None:
    """Positive and negative feedback override the turn's outcome. A review lists negative feedback as an error."""
    put(database, "a")
    uses(database, clock, "a", "++-")
    assert executions.feedback(database, UUID(int=1), -1) == ["a"]
    assert executions.feedback(database, UUID(int=2), -1) == ["a"]
    assert executions.feedback(database, UUID(int=3), 1) == ["a"]
    assert executions.feedback(database, UUID(int=4), 1) == []
    assert reflection.reflect(database).flagged == ["a"]
    review = cases.list_cases(database, flagged=True)[0]["review"]
    assert review["errors"] == [{"error": "negative feedback", "count": 2}]
    assert column(database, "SELECT round(success_rate) FROM cases") == [33]


@pytest.mark.parametrize(("outcomes", "flagged"), [("+-", False), ("++---", True), ("-", True), ("+", False)])
def test_under_fifty_percent_is_flagged(database: Database, clock: MovedClock, outcomes: str, flagged: bool) -> None:
    """A case with a rate below 50 % is flagged until its rate recovers. A rate of exactly 50 % is not flagged."""
    put(database, "a")
    uses(database, clock, "a", outcomes)
    assert bool(reflection.reflect(database).flagged) is flagged
    uses(database, clock, "a", "+" * 10, first=100)
    assert reflection.reflect(database).flagged == []
    assert column(database, "SELECT review FROM cases") == [None]


def test_the_most_frequent_errors_come_first(database: Database, clock: MovedClock) -> None:
    """A review lists at most three errors, the most frequent first. Ties are sorted by text."""
    put(database, "a")
    for number, error in enumerate(["x", "y", "y", "z", "w", "w", "w"]):
        use(database, ["a"], UUID(int=number), succeeded=False, error=error)
    reflection.reflect(database)
    review = cases.read(database, "a")["review"]
    assert [(each["error"], each["count"]) for each in review["errors"]] == [("w", 3), ("y", 2), ("x", 1)]
    assert review["executions"] == 7


class Adviser:
    """A model that records its requests. While `unavailable` is true, each call fails."""

    name = "adviser"

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.unavailable = False

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        self.requests.append(request.messages[-1].content)
        if self.unavailable:
            raise ProviderError("The provider is unavailable.")
        return ModelReply("Say it in other words.")


def test_suggestions_are_at_most_five_a_minute(database: Database, clock: MovedClock) -> None:
    """A process requests at most five suggestions a minute. A suggestion is kept while its case is flagged."""
    for number in range(7):
        put(database, f"{number}", query=f"question {number}")
        use(database, [f"{number}"], UUID(int=number), succeeded=False, error="it broke")
    reflection.reflect(database)
    model = Adviser()
    assert reflection.suggest(database, clock, model, 10) == 5
    assert reflection.suggest(database, clock, model, 10) is None
    assert len(model.requests) == 5
    assert "question 0" in model.requests[0]
    assert "1 times: it broke" in model.requests[0]
    clock.advance(timedelta(seconds=61))
    model.unavailable = True
    assert reflection.suggest(database, clock, model, 10) == 0, "two cases were left, and the model was unavailable"
    clock.advance(timedelta(seconds=61))
    assert reflection.suggest(database, clock, model, 10) == 0
    assert len(model.requests) == 7, "the model is not called again on the same day"
    model.unavailable = False
    clock.advance(timedelta(days=1))
    reflection.reflect(database)
    assert reflection.suggest(database, clock, model, 10) == 2
    reviews = [each["review"] for each in cases.list_cases(database, flagged=True)]
    assert [each["suggestion"] for each in reviews] == ["Say it in other words."] * 7
