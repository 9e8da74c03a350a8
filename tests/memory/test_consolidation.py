"""Consolidation stores the memories of each ended session once, despite failures."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

import pytest

from perdure.access.tenants import UserKey
from perdure.database.engine import Moment, Statement
from perdure.errors import CircuitBreakerOpen, ContentFiltered, ContextTooLong, ProviderError
from perdure.ids import new_id
from perdure.memory.consolidation import queries
from perdure.memory.consolidation.consolidate import (
    RETRY_S,
    Backlog,
    Consolidated,
    ConsolidationCounts,
    ConsolidationFailed,
    ConsolidationNotDue,
    Progress,
    Skipped,
    backlog,
    consolidations_due,
    consolidations_to_wake,
    count_given_up,
    retry_abandoned,
)
from perdure.memory.consolidation.extraction import ATTEMPTS
from perdure.memory.consolidation.merging import MergeCounts
from perdure.models.offline import OfflineModel
from perdure.models.protocol import CallAborted, ModelCall, ModelReply, ModelRequest
from perdure.sessions.conversations import change_conversation
from perdure.sessions.reading import list_sessions
from perdure.timetable.reminders import NewReminder, parse_moment
from perdure.timetable.reminders import add as add_reminder
from perdure.turns.inbox.fire_schedules import fire_due
from tests.memory import corpus
from tests.memory.archive import (
    GROUPS,
    HOME,
    LEASE_S,
    LYON,
    PARIS,
    Archive,
    Deciding,
    Echo,
    Grouped,
    answer,
    french_story,
    memory,
    story,
)
from tests.memory.pairs import CONTRADICTIONS, PARAPHRASES
from tests.repository.source import ROOT
from tests.turns.harness import Crash, side_by_side
from tests.turns.scripted import says

ANA = UserKey("ana")
LOCK = Statement("test.lock", "SELECT FROM sessions WHERE session_id = %(session_id)s FOR UPDATE")


def test_a_statement_becomes_a_memory_with_its_sources(archive: Archive) -> None:
    """With the built-in model, a user's statement becomes a memory that refers to its source message."""
    session_id = archive.ended("Hello!", ("assistant", "I live in a computer."), LYON, "And you?", "Thanks.")
    assert archive.consolidator(OfflineModel()).consolidate(session_id) == Consolidated(MergeCounts(stored=1))
    [row] = archive.known()
    assert (row.content, row.kind, row.seqs, row.channels) == (LYON, "fact", [3], ["cli"])
    assert (row.session_id, row.vectors, row.value) == (session_id, 1, row.importance)
    session = archive.session(session_id)
    assert session.consolidated_at is not None
    assert session.consolidation == {"stored": 1, "duplicates_merged": 0, "superseded": 0}
    assert (session.lease_until, session.consolidation_error) == (None, None)
    assert archive.consolidator().consolidate(session_id) == ConsolidationNotDue()


def test_a_short_session_is_skipped_once(archive: Archive) -> None:
    """A session with too few turns is skipped without a model call. It is not due again."""
    session_id = archive.ended(LYON, turns=4)
    assert archive.consolidator().batch() == ConsolidationCounts(processed=1, skipped=1)
    assert archive.session(session_id).consolidation == {"skipped": True}
    assert archive.harness.model.requests == []
    assert archive.consolidator().batch() == ConsolidationCounts()


def test_a_live_session_is_not_consolidated(archive: Archive) -> None:
    """A session that has not ended is not consolidated."""
    alive = archive.harness.send().session_id
    assert archive.consolidator().consolidate(alive) == ConsolidationNotDue()
    assert archive.consolidator().batch() == ConsolidationCounts()


def test_a_batch_has_its_size_and_reports_progress(archive: Archive) -> None:
    """A batch takes the `batch_size` sessions that ended first, and reports its progress after each session."""
    archive.limit(batch_size=2)
    sessions = [archive.ended(f"I own {number} cats and nothing else.", turns=5) for number in (3, 4, 5)]
    reported: list[Progress] = []
    counts = archive.consolidator(Echo()).batch(reported.append)
    assert [archive.session(each).consolidated_at is None for each in sessions] == [False, False, True]
    assert [(each.done, each.total) for each in reported] == [(0, 2), (1, 2), (2, 2)]
    assert reported[-1].counts == counts == ConsolidationCounts(processed=2, stored=2, superseded=1)
    assert backlog(archive.harness.database, archive.limits) == Backlog(1, 0, 0)


def test_a_repeated_statement_reinforces_its_memory(archive: Archive) -> None:
    """A repeated statement raises its memory's importance and access count, and adds a channel and a source to it."""
    archive.embedder = Grouped([LYON, HOME])
    first = archive.ended(LYON)
    second = archive.ended("Hm.", HOME, channel="telegram")
    archive.harness.script(answer(memory(LYON, 0.7)), answer(memory(HOME, 0.2)))
    assert archive.consolidator().batch() == ConsolidationCounts(processed=2, stored=1, duplicates_merged=1)
    [row] = archive.known()
    assert (row.content, round(row.importance, 9), row.access_count) == (LYON, 0.8, 1)
    assert row.channels == ["cli", "telegram"]
    assert row.last_accessed_at is not None
    sources = archive.harness.sql("SELECT session_id, seq FROM memory_sources ORDER BY seq")
    assert [(source.session_id, source.seq) for source in sources] == [(first, 1), (second, 2)]


def test_importance_never_exceeds_one(archive: Archive) -> None:
    """The importance never exceeds one, however often a statement is repeated."""
    for _ in range(3):
        archive.ended(LYON)
    archive.harness.script(*[answer(memory(LYON, 0.95))] * 3)
    archive.consolidator().batch()
    assert [(row.importance, row.access_count) for row in archive.known()] == [(1.0, 2)]


def test_a_contradiction_supersedes_the_earlier_memory(archive: Archive) -> None:
    """A contradicted memory stays stored. Its validity ends when the validity of the contradicting memory begins."""
    archive.embedder = Grouped([LYON, PARIS])
    archive.ended(LYON)
    archive.ended(PARIS)
    assert archive.consolidator(Echo()).batch() == ConsolidationCounts(processed=2, stored=2, superseded=1)
    old, new = archive.known()
    assert (old.content, old.superseded_by, old.valid_to) == (LYON, new.memory_id, new.valid_from)
    assert (new.content, new.superseded_by, new.valid_to, old.archived_at) == (PARIS, None, None, None)


def test_the_later_statement_wins_in_any_order(archive: Archive) -> None:
    """The later of two contradicting statements wins, in whatever order their sessions are consolidated."""
    archive.embedder = Grouped([LYON, PARIS])
    earlier, later = archive.ended(LYON), archive.ended(PARIS)
    worker = archive.consolidator(Echo())
    assert worker.consolidate(later) == Consolidated(MergeCounts(stored=1))
    assert worker.consolidate(earlier) == Consolidated(MergeCounts(stored=1, superseded=1))
    assert [(row.content, row.replaced_by) for row in archive.known()] == [(LYON, PARIS), (PARIS, None)]
    old, new = archive.known()
    assert old.valid_to == new.valid_from


def test_a_statement_repeated_after_a_contradiction_is_a_new_memory(archive: Archive) -> None:
    """If the statement of a superseded memory is repeated, a new memory is stored."""
    archive.embedder = Grouped([LYON, PARIS])
    for line in (LYON, PARIS, LYON):
        archive.ended(line)
    archive.consolidator(Echo()).batch()
    assert [(row.content, row.valid_to is None) for row in archive.known()] == [
        (LYON, False), (PARIS, False), (LYON, True),
    ]  # fmt: skip


def test_a_late_session_reinforces_the_memory_of_its_time(archive: Archive) -> None:
    """A session that is consolidated late reinforces the memory that was valid at the time of the session."""
    archive.embedder = Grouped([LYON, HOME, PARIS])
    late, first, second = archive.ended(HOME), archive.ended(LYON), archive.ended(PARIS)
    for session_id in (first, second, late):
        archive.consolidator(Echo()).consolidate(session_id)
    assert [(row.content, row.access_count, row.replaced_by) for row in archive.known()] == [
        (LYON, 1, PARIS), (PARIS, 0, None),
    ]  # fmt: skip


def test_no_contradiction_reinforces_and_most_paraphrases_do(archive: Archive) -> None:
    """None of twenty contradictions reinforces a memory. At least 80 % of the paraphrases reinforce one."""
    archive.embedder = Grouped(*({a, b} for _, a, b in CONTRADICTIONS[:20]))
    for number, (_, earlier, later) in enumerate(CONTRADICTIONS[:20]):
        for line in (earlier, later):
            archive.ended(line, user_id=f"contradicted {number}")
    archive.limit(batch_size=200)
    assert archive.consolidator(Echo()).batch() == ConsolidationCounts(processed=40, stored=40, superseded=20)
    archive.embedder = Grouped(*({a, b} for a, b in PARAPHRASES))
    for number, (earlier, later) in enumerate(PARAPHRASES):
        for line in (earlier, later):
            archive.ended(line, user_id=f"paraphrased {number}")
    assert archive.consolidator(Echo()).batch().duplicates_merged >= 0.8 * len(PARAPHRASES)


def test_memories_are_one_users_own(archive: Archive) -> None:
    """If two users make the same statement, each of them gets a memory."""
    archive.ended(LYON, user_id="ana")
    archive.ended(LYON, user_id="bo")
    assert archive.consolidator(Echo()).batch() == ConsolidationCounts(processed=2, stored=2)
    assert len(archive.known("ana")) == len(archive.known("bo")) == 1


def test_entities_and_relations_are_stored(archive: Archive) -> None:
    """Names that differ only in case become one entity. The relations and mentions of entities are stored."""
    said = memory(
        "My sister Nora lives in Lyon.",
        entities=[{"name": "Nora", "type": "person"}, {"name": "Lyon", "type": "place"}],
        relations=[
            {"subject": "user", "relation": "sister", "object": "nora"},
            {"subject": "Nora", "relation": "lives in", "object": "LYON"},
        ],
    )
    archive.ended("My sister Nora lives in Lyon.")
    archive.ended("Nora likes her garden.")
    archive.harness.script(
        answer(said), answer(memory("Nora likes her garden.", entities=[{"name": "NORA", "type": "person"}]))
    )
    archive.consolidator().batch()
    entities = archive.harness.sql("SELECT name, kind FROM entities ORDER BY key")
    assert [tuple(row) for row in entities] == [("Lyon", "place"), ("Nora", "person"), ("user", "user")]
    relations = archive.harness.sql(
        "SELECT a.name, r.predicate, b.name FROM relations AS r JOIN entities AS a ON a.entity_id = r.source_id "
        "JOIN entities AS b ON b.entity_id = r.target_id ORDER BY 1"
    )
    assert [tuple(row) for row in relations] == [("Nora", "lives_in", "Lyon"), ("user", "sister", "Nora")]
    assert archive.harness.sql("SELECT count(*) FROM entity_mentions")[0][0] == 4


def test_an_invalid_reply_is_requested_again_with_the_reason(archive: Archive) -> None:
    """After an invalid reply the model is called again. The new prompt contains the invalid reply and the error."""
    session_id = archive.ended(LYON)
    archive.harness.script(says('[{"content": "I live'), answer(LYON))
    assert archive.consolidator().consolidate(session_id) == Consolidated(MergeCounts(stored=1))
    last = archive.harness.model.requests[-1].messages
    assert last[-2].content == '[{"content": "I live'
    assert "not valid JSON" in last[-1].content


def test_a_part_that_a_filter_refuses_costs_only_its_own_memories(archive: Archive) -> None:
    """The filter would refuse the part in every run, so the session keeps the memories of its other parts."""
    session_id = archive.ended(*["x" * 4_000] * 6, LYON)
    archive.harness.script(ContentFiltered("no"), answer(LYON))
    assert archive.consolidator().consolidate(session_id) == Consolidated(MergeCounts(stored=1))


def test_a_part_that_is_too_long_for_the_model_is_halved(archive: Archive) -> None:
    """A model with a small window reads the conversation in smaller parts."""
    session_id = archive.ended(LYON, "Hm.", "I own three cats.", "Well.")
    archive.harness.script(
        ContextTooLong("Too long."), answer(memory(LYON)), answer(memory("The user owns three cats."))
    )
    assert archive.consolidator().consolidate(session_id) == Consolidated(MergeCounts(stored=2))
    whole, first, second = (each.messages[-1].content for each in archive.harness.model.requests)
    assert whole == f"{first}\n{second}"


def test_a_failing_session_is_abandoned_after_its_last_run(archive: Archive) -> None:
    """The next batch retries a session whose consolidation failed. After `max_runs` runs the session is abandoned."""
    archive.limit(max_runs=2)
    session_id = archive.ended(LYON)
    archive.harness.script(*[ProviderError("It is forbidden.", transient=False)] * 2)
    first = archive.consolidator().consolidate(session_id)
    assert isinstance(first, ConsolidationFailed)
    assert not first.given_up
    row = archive.session(session_id)
    assert (row.consolidated_at, row.lease_until) == (None, None)
    assert row.consolidation_error == "PROVIDER_ERROR: It is forbidden."
    assert backlog(archive.harness.database, archive.limits) == Backlog(1, 1, 0)
    assert consolidations_to_wake(archive.harness.database, archive.limits, 10, 5, LEASE_S) == []
    assert archive.consolidator().batch() == ConsolidationCounts(processed=1, failed=1)
    assert archive.consolidator().batch() == ConsolidationCounts()
    assert backlog(archive.harness.database, archive.limits) == Backlog(0, 0, 1)
    assert archive.known() == []


def test_a_model_that_cannot_extract_is_asked_twice_and_what_it_said_is_kept(
    archive: Archive, caplog: pytest.LogCaptureFixture
) -> None:
    """Further calls would cost as much and give as little. Operators see what the model said, but no log has it."""
    session_id = archive.ended(LYON)
    archive.harness.script(says("Well, I"), says("I would\nrather not."))
    failed = archive.consolidator().consolidate(session_id)
    assert isinstance(failed, ConsolidationFailed)
    assert failed.given_up
    assert len(archive.harness.model.requests) == ATTEMPTS
    [listed] = list_sessions(archive.harness.database, given_up=True)
    assert listed["consolidation"]["error"].endswith("It said: I would rather not.")
    assert "INVALID_RESPONSE" in caplog.text
    assert "rather" not in caplog.text
    assert consolidations_to_wake(archive.harness.database, archive.limits, 10, 5, LEASE_S) == []


def test_what_can_be_extracted_is_kept_next_to_a_part_that_cannot(archive: Archive) -> None:
    """The memories of a conversation's other parts are stored."""
    session_id = archive.ended(*["x" * 4_000] * 6, LYON)
    archive.harness.script(says("No."), says("No."), answer(LYON))
    assert archive.consolidator().consolidate(session_id) == Consolidated(MergeCounts(stored=1))


def test_an_abandoned_session_is_listed_and_can_be_retried(archive: Archive) -> None:
    """Abandoned sessions are listed. `retry_abandoned` makes one of them due again, or all of them."""
    archive.limit(max_runs=1)
    database, limits = archive.harness.database, archive.limits
    first, second = archive.ended(LYON), archive.ended(LYON, user_id="ben")
    archive.harness.script(*[says("I would rather not.")] * 6)
    for session_id in (first, second):
        assert isinstance(archive.consolidator().consolidate(session_id), ConsolidationFailed)
    assert [each["session_id"] for each in list_sessions(database, given_up=True)] == [str(second), str(first)]
    [listed] = list_sessions(database, UserKey("ana"), given_up=True)
    assert listed["consolidation"]["status"] == "given_up"
    assert listed["consolidation"]["error"].startswith("INVALID_RESPONSE: ")
    archive.harness.move(2 * RETRY_S)
    assert consolidations_to_wake(database, archive.limits, 10, 5, LEASE_S) == []
    assert archive.consolidator().consolidate(first) == ConsolidationNotDue()

    assert retry_abandoned(database, limits, LEASE_S, [first]) == 1
    assert retry_abandoned(database, limits, LEASE_S, [first]) == 0, "it is due already"
    archive.harness.script(answer(LYON))
    assert archive.consolidator().consolidate(first) == Consolidated(MergeCounts(stored=1))
    assert retry_abandoned(database, limits, LEASE_S, [first]) == 0, "it is consolidated"
    assert count_given_up(database) == 1
    assert retry_abandoned(database, limits, LEASE_S) == 1
    archive.harness.script(answer(LYON))
    assert archive.consolidator().batch() == ConsolidationCounts(processed=1, stored=1)
    assert list_sessions(database, given_up=True) == []


def test_the_sweeper_abandons_a_session_whose_last_run_died(archive: Archive) -> None:
    """If a worker dies during a session's last run, the sweeper abandons the session and sends no new task for it."""
    archive.limit(max_runs=1)
    database = archive.harness.database
    session_id = archive.ended(LYON)
    database.run(queries.CLAIM, {"session_id": session_id, "owner": "it dies", "lease_s": 30, "max_runs": 1})
    archive.harness.move(60)
    assert count_given_up(database) == 0
    assert consolidations_to_wake(database, archive.limits, 10, 5, LEASE_S) == []
    assert count_given_up(database) == 1
    [listed] = list_sessions(database, given_up=True)
    assert listed["consolidation"]["error"] == "UNKNOWN: the run was interrupted"


@pytest.mark.parametrize("error", [ProviderError("it is down"), CircuitBreakerOpen()])
def test_an_outage_uses_up_no_run(archive: Archive, error: Exception) -> None:
    """A provider outage does not use up the session's runs."""
    archive.limit(max_runs=1)
    session_id = archive.ended(LYON)
    archive.harness.script(error, answer(LYON))
    failed = archive.consolidator().consolidate(session_id)
    assert isinstance(failed, ConsolidationFailed)
    assert (failed.given_up, archive.session(session_id).consolidation_attempts) == (False, 0)
    assert archive.session(session_id).consolidation_error == failed.error
    assert archive.consolidator().consolidate(session_id) == Consolidated(MergeCounts(stored=1))


def test_an_unavailable_embedder_postpones_the_session(archive: Archive) -> None:
    """If the embedder fails, no memory is stored, because finding duplicates needs vectors. The session stays due."""
    embedder = Grouped()
    embedder.down = ProviderError("it is down")
    archive.embedder = embedder
    session_id = archive.ended(LYON)
    assert isinstance(archive.consolidator(Echo()).consolidate(session_id), ConsolidationFailed)
    assert archive.known() == []
    embedder.down = None
    assert archive.consolidator(Echo()).consolidate(session_id) == Consolidated(MergeCounts(stored=1))


def test_a_worker_that_shuts_down_returns_the_session(archive: Archive) -> None:
    """A worker that shuts down releases its session at once. The session is due again, and the run does not count."""
    session_id = archive.ended(LYON)

    def interrupted(request: ModelRequest, call: ModelCall) -> ModelReply:
        archive.keeper.begin_shutdown()
        call.check()
        raise AssertionError("the call was not aborted")

    archive.harness.script(interrupted)
    with pytest.raises(CallAborted):
        archive.consolidator().batch()
    row = archive.session(session_id)
    assert (row.consolidation_attempts, row.lease_until, row.consolidation_error) == (0, None, None)
    assert consolidations_due(archive.harness.database, archive.limits, LEASE_S) == [[session_id]]


STORIES = {"echo": (story, Echo), "deciding": (french_story, Deciding)}
"""Sessions whose statements the rules compare, and sessions that only the model's decisions tell apart."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STORIES)
def test_killed_anywhere_and_run_again_gives_the_same_memories(archive: Archive, name: str) -> None:
    """After a crash before or after any commit, a second run gives the same memories as a run without a crash."""
    story, model = STORIES[name]
    boundaries: list[tuple[Moment, str]] = []
    story(archive)
    with archive.harness.hooked(lambda moment, name: boundaries.append((moment, name))):
        archive.consolidator(model()).batch()
    undisturbed = archive.facts()
    assert len(undisturbed) == 3
    assert len(boundaries) >= 2 * (4 + 3 + 1)
    for at in range(len(boundaries)):
        archive.harness.sql("TRUNCATE users CASCADE")
        story(archive)
        passed = itertools.count()

        def die(_moment: Moment, _name: str, passed: Iterator[int] = passed, at: int = at) -> None:
            if next(passed) == at:
                raise Crash

        with archive.harness.hooked(die), suppress(Crash):
            archive.consolidator(model()).batch()
            pytest.fail(f"nothing reached {boundaries[at]}")
        archive.harness.move(LEASE_S + 10)
        archive.consolidator(model()).batch()
        assert archive.facts() == undisturbed, boundaries[at]
        assert backlog(archive.harness.database, archive.limits) == Backlog(0, 0, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize("boundary", [1, 2, 4, 5, 7])
def test_a_worker_that_is_killed_loses_and_doubles_nothing(
    archive: Archive, database_url: str, boundary: int, name: str
) -> None:
    """If SIGKILL ends a worker before or after a commit, no memory is lost or stored twice."""
    story, model = STORIES[name]
    archive.embedder = Grouped(*GROUPS)
    story(archive)
    archive.consolidator(model()).batch()
    story(archive, "bo")
    killed = subprocess.run(
        [sys.executable, "-m", "tests.memory.killing", database_url, str(boundary), name],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    archive.harness.move(LEASE_S + 10)
    archive.consolidator(model()).batch()
    assert archive.facts("bo") == archive.facts("ana")
    assert backlog(archive.harness.database, archive.limits) == Backlog(0, 0, 0)


def test_a_worker_that_was_paused_writes_nothing(archive: Archive) -> None:
    """A paused worker's result is dropped if another worker consolidated the session during the pause."""
    session_id = archive.ended(LYON)

    def overtaken() -> None:
        archive.harness.move(LEASE_S + 10)
        assert archive.consolidator(Echo()).consolidate(session_id) == Consolidated(MergeCounts(stored=1))

    assert archive.consolidator(Echo(overtaken)).consolidate(session_id) == ConsolidationNotDue()
    assert [row.access_count for row in archive.known()] == [0]


@pytest.mark.long
def test_a_user_erased_during_the_run_gets_no_memory(archive: Archive) -> None:
    """A user who is erased during the model's call gets no memory."""
    session_id = archive.ended(LYON)
    worker = archive.consolidator(Echo(lambda: archive.harness.sql("TRUNCATE users CASCADE")))
    assert worker.consolidate(session_id) == ConsolidationNotDue()
    assert archive.known() == []


def test_a_session_waits_for_an_earlier_one_that_is_being_consolidated(archive: Archive) -> None:
    """A user's sessions are consolidated in the order in which they ended, also by several workers."""
    earlier, later, others = archive.ended(LYON), archive.ended(PARIS), archive.ended(LYON, user_id="bo")
    met: list[object] = []

    def meanwhile() -> None:
        met.extend(archive.consolidator(Echo()).consolidate(each) for each in (later, others))

    assert archive.consolidator(Echo(meanwhile)).consolidate(earlier) == Consolidated(MergeCounts(stored=1))
    assert met == [ConsolidationNotDue(), Consolidated(MergeCounts(stored=1))]
    assert consolidations_due(archive.harness.database, archive.limits, LEASE_S) == [[later]]


def test_a_session_that_failed_does_not_hold_up_later_ones(archive: Archive) -> None:
    """A later session is consolidated before the retry of an earlier one."""
    earlier, later = archive.ended(LYON), archive.ended(PARIS)
    archive.harness.script(ProviderError("It is forbidden.", transient=False))
    assert isinstance(archive.consolidator().consolidate(earlier), ConsolidationFailed)
    assert archive.consolidator(Echo()).consolidate(later) == Consolidated(MergeCounts(stored=1))


def test_a_session_that_is_locked_is_waited_for(archive: Archive) -> None:
    """The connection of a killed worker holds its locks for a moment. The order stays the same."""
    earlier = archive.ended(LYON)
    archive.ended(PARIS)
    locked = threading.Event()

    def die() -> None:
        with archive.harness.database.transaction("test") as transaction:
            transaction.run(LOCK, {"session_id": earlier})
            locked.set()
            time.sleep(0.5)

    dying = threading.Thread(target=die)
    dying.start()
    assert locked.wait(10)
    assert archive.consolidator(Echo()).batch().processed == 2
    dying.join()


def test_a_session_is_claimed_by_one_worker(archive: Archive) -> None:
    """A session that a worker is consolidating is not due for other workers."""
    session_id = archive.ended(LYON)
    met: list[object] = []

    def look() -> None:
        met.append(archive.consolidator(Echo()).consolidate(session_id))
        met.append(archive.consolidator(Echo()).batch())

    archive.consolidator(Echo(look)).consolidate(session_id)
    assert met == [ConsolidationNotDue(), ConsolidationCounts()]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_four_workers_share_a_batch(archive: Archive) -> None:
    """Four workers consolidate 200 sessions of 40 users, each session once. No fact is stored twice."""
    archive.limit(batch_size=200)
    for number in range(200):
        archive.ended("I collect old maps.", f"I own a house numbered {number}00.", user_id=f"user {number % 40}")
    works = [archive.consolidator(Echo()).batch for _ in range(4)]
    counts = side_by_side(*works)
    assert all(isinstance(each, ConsolidationCounts) for each in counts), counts
    assert sum(each.processed for each in counts) == 200
    assert sum(each.failed for each in counts) == 0
    maps = archive.harness.sql(
        "SELECT user_id, count(*) AS memories, sum(access_count) AS accesses FROM memories "
        "WHERE content = 'I collect old maps.' GROUP BY user_id"
    )
    assert [(row.memories, row.accesses) for row in maps] == [(1, 4)] * 40


def test_a_fact_of_two_concurrent_sessions_is_one_memory(archive: Archive) -> None:
    """If two workers extract the same fact before either has stored it, one memory is stored."""
    earlier, later = archive.ended(LYON), archive.ended(LYON)
    inner: list[object] = []
    worker = archive.consolidator(Echo(lambda: inner.append(archive.consolidator(Echo()).consolidate(earlier))))
    assert worker.consolidate(later) == Consolidated(MergeCounts(duplicates_merged=1))
    assert inner == [Consolidated(MergeCounts(stored=1))]
    assert [row.access_count for row in archive.known()] == [1]


def test_recalled_text_is_not_learnt_again(archive: Archive) -> None:
    """Tool results, quotations and assistant messages that repeat a tool result do not become memories."""
    session_id = archive.ended(
        "What do you know of me?",
        ("assistant", ""),
        ("tool", "I own a boat in Marseille."),
        ("assistant", "You told me that you own a boat in Marseille."),
        "<recalled_memory>I own a boat in Marseille.</recalled_memory> Thanks, that is all.",
    )
    archive.harness.script(answer("You own a boat in Marseille.", memory("You own a boat in Marseille.", sources=[4])))
    assert archive.consolidator().consolidate(session_id) == Consolidated(MergeCounts())
    shown = archive.harness.model.requests[0].messages[1].content
    assert "[3," not in shown
    assert "recalled_memory" not in shown


def test_a_prompt_lists_no_memories_of_other_users(archive: Archive) -> None:
    """The model is told which memories of the session's user are known, also if another user's are nearer."""
    archive.ended(LYON)
    archive.ended("I have a cat in Lyon.", user_id="ben")
    archive.consolidator(Echo()).batch()
    session_id = archive.ended("I live in Lyon with my cat.", user_id="ben")
    archive.harness.script(answer())
    archive.consolidator().consolidate(session_id)
    told = str(archive.harness.model.requests[-1].messages)
    assert "I have a cat in Lyon." in told
    assert LYON not in told


def test_what_a_schedule_sends_is_not_learnt(archive: Archive) -> None:
    """A schedule repeats what was said when it was made, or what an agent wrote: that ends no later statement.

    A session that has only such messages costs no call.
    """
    harness = archive.harness
    archive.limit(min_turns=1)
    moment = parse_moment(harness.settings, harness.clock.now(), at=None, cron="0 * * * *", timezone=None)
    add_reminder(harness.database, harness.settings, NewReminder(new_id(harness.clock), ANA, LYON, moment, "http"))
    for reply in ("Good morning.", "Hello."):
        harness.move(3_600)
        assert fire_due(harness.runtime) == 1
        harness.script(says(reply))
        [due] = harness.sql("SELECT session_id FROM sessions WHERE unsettled > 0")
        harness.run(due.session_id)
        if reply == "Hello.":
            harness.ask(PARIS, user_id="ana")
        harness.sql("UPDATE sessions SET routable = false, end_requested_at = perdure_now(), ended_at = perdure_now()")
    assert archive.consolidator(Echo()).batch() == ConsolidationCounts(processed=2, stored=1)
    assert [row.content for row in archive.known()] == [PARIS]
    harness.sql("UPDATE sessions SET consolidated_at = NULL")
    before = len(harness.model.requests)
    harness.script(answer())
    archive.consolidator().batch()
    [request] = harness.model.requests[before:]
    assert LYON not in request.messages[1].content
    assert "Hello." in request.messages[1].content


def test_lost_wake_ups_are_issued_again(archive: Archive) -> None:
    """If a session's consolidation task is lost, the sweeper sends it again. The pause before each repeat doubles."""
    session_id = archive.ended(LYON)

    def woken() -> list[object]:
        return [*consolidations_to_wake(archive.harness.database, archive.limits, 10, 5, LEASE_S)]

    assert woken() == [session_id]
    assert woken() == []
    archive.harness.move(6)
    assert woken() == [session_id]
    archive.harness.move(6)
    assert woken() == []
    with archive.harness.crashing("before", "consolidation.merge"):
        archive.consolidator(Echo()).consolidate(session_id)
    archive.harness.move(LEASE_S + 10)
    assert woken() == [session_id]
    assert archive.session(session_id).consolidation_error == "UNKNOWN: the run was interrupted"


def test_copied_turns_of_a_fork_are_not_consolidated(archive: Archive) -> None:
    """The turns that a forked session copied from its source are neither read nor counted as the session's turns."""
    source = archive.ended(LYON)
    fork = archive.ended(LYON, "I have a dog called Rex.", turns=6)
    archive.harness.sql(
        "UPDATE sessions SET forked_from = %(source)s WHERE session_id = %(fork)s", source=source, fork=fork
    )
    archive.harness.sql(
        "UPDATE messages SET created_at = created_at - interval '1 hour' WHERE session_id = %(fork)s AND seq = 1",
        fork=fork,
    )
    assert archive.consolidator(Echo()).batch() == ConsolidationCounts(processed=2, stored=2)
    assert sorted(row.access_count for row in archive.known()) == [0, 0]
    archive.harness.sql("UPDATE sessions SET consolidated_at = NULL WHERE session_id = %(fork)s", fork=fork)
    archive.harness.sql(
        "UPDATE turns SET accepted_at = accepted_at - interval '1 hour' WHERE session_id = %(fork)s AND seq < 6",
        fork=fork,
    )
    assert archive.consolidator(Echo()).consolidate(fork) == Skipped()


@pytest.mark.parametrize("min_turns", [1, 2], ids=["extracted", "too short at first"])
def test_messages_that_are_imported_during_the_run_become_memories(archive: Archive, min_turns: int) -> None:
    """The run writes nothing, as it has not read them. The session is due at once, with all of its runs."""
    harness = archive.harness
    archive.limit(min_turns=min_turns)

    def imports(number: int, said: str) -> UUID:
        lines = [corpus.line(2 * number + position, text) for position, text in enumerate((said, "Noted."), start=1)]
        return corpus.imported(harness.database, harness.clock, lines).sessions[0]

    def claimed(moment: Moment, name: str) -> None:
        if min_turns == 2 and (moment, name) == ("after", "consolidation.claim"):
            imports(1, PARIS)

    session_id = imports(0, LYON)
    model = Echo((lambda: imports(1, PARIS)) if min_turns == 1 else lambda: None)
    with harness.hooked(claimed):
        assert archive.consolidator(model).consolidate(session_id) == ConsolidationNotDue()
    assert archive.known() == []
    assert consolidations_to_wake(harness.database, archive.limits, 9, backoff_s=0, lease_s=LEASE_S) == [session_id]
    assert isinstance(archive.consolidator(Echo()).consolidate(session_id), Consolidated)
    assert {row.content for row in archive.known()} == {LYON, PARIS}


def test_a_conversation_that_is_left_out_during_the_run_gives_no_memory(archive: Archive) -> None:
    """Nothing of a conversation is remembered once the user has said so, also if a model has just read it."""
    harness = archive.harness
    session_id = UUID(harness.ask(LYON, conversation="private")["session_id"])
    harness.sql(
        "UPDATE sessions SET routable = false, end_requested_at = perdure_now(), ended_at = perdure_now(),"
        " state = 'ended'"
    )

    def leave_out() -> None:
        change_conversation(
            harness.database, harness.waker, UserKey("ana"), "private", title=None, archived=None, remember=False
        )

    archive.limit(min_turns=0)
    assert archive.consolidator(Echo(leave_out)).consolidate(session_id) == Consolidated(MergeCounts())
    assert archive.known() == []
