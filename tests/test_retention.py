"""Which rows `retain` deletes, and which rows it keeps."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from perdure import retention
from perdure.access.tenants import UserKey
from perdure.casebank.executions import count
from perdure.casebank.reflection import EXECUTIONS
from perdure.clock import MovedClock
from perdure.database.engine import Database, Statement
from perdure.runtime import Runtime
from perdure.settings import OnBusy, RetentionSettings
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import Incoming, parse_incoming
from perdure.turns.run.loop import Runner
from tests.casebank.bank import put, use

NOTHING = {kept.what: 0 for kept in retention.KEPT}


def _count(database: Database, table: str) -> int:
    with database.engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())  # noqa: S608 (our tables)


def _write(database: Database, statement: str, **parameters: Any) -> None:
    with database.engine.connect() as connection:
        connection.execute(text(statement), parameters)


def _answered(runtime: Runtime, user_id: str = "ana", **more: Any) -> UUID:
    """Run a turn whose message requests a callback; returns the session's id."""
    message = {"user_id": user_id, "text": "hello", "reply_to": {"url": "https://example.org/reply"}, **more}
    sent = accept(runtime, parse_incoming(message))
    Runner(runtime, "tests").run(sent.session_id)
    return sent.session_id


@pytest.mark.parametrize("failing", [kept.what for kept in retention.KEPT])
def test_a_kind_that_fails_keeps_no_other(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    """If rows of one kind cannot be deleted, rows of all other kinds are, and the task fails with that error."""
    ran: list[str] = []
    broken = Statement("tests.broken", "SELECT * FROM a_table_that_does_not_exist")
    kinds = [replace(kept, delete=broken) if kept.what == failing else kept for kept in retention.KEPT]
    monkeypatch.setattr(retention, "KEPT", kinds)
    runtime.database.observe = lambda moment, name: ran.append(name) if moment == "after" else None
    with pytest.raises(ProgrammingError, match="UndefinedTable"):
        retention.retain(runtime.database, settings=RetentionSettings(vectors_days=9, transcripts_days=9))
    assert ran == [kept.delete.name for kept in kinds if kept.what != failing]
    assert f"retention of {failing} failed" in caplog.text


def test_replies_that_were_delivered_are_kept_for_a_month(runtime: Runtime, clock: MovedClock) -> None:
    """Settled deliveries are deleted after a month. A pending delivery and the transcript are kept at any age."""
    database = runtime.database
    for _ in range(3):
        _answered(runtime)
    _write(
        database,
        "UPDATE deliveries SET status = 'delivered'"
        " WHERE delivery_id <> (SELECT delivery_id FROM deliveries ORDER BY created_at, delivery_id LIMIT 1)",
    )
    clock.advance(timedelta(days=29))
    assert retention.retain(database) == NOTHING
    clock.advance(timedelta(days=2))
    assert retention.retain(database) == NOTHING | {"deliveries": 2}
    assert (_count(database, "deliveries"), _count(database, "messages")) == (1, 6)
    assert retention.retain(database) == NOTHING


def test_snapshots_set_aside_are_kept_for_three_months(runtime: Runtime, clock: MovedClock) -> None:
    """Snapshots that were set aside as unusable are deleted after three months. The current snapshot is kept."""
    database = runtime.database
    session_id = _answered(runtime)
    for tick, set_aside in ((7, True), (8, True), (9, False)):
        _write(
            database,
            "INSERT INTO snapshots (session_id, set_aside, variables, events, tick, token, saved_at)"
            " VALUES (:session_id, :set_aside, '{}', '[]', :tick, 1, perdure_now())",
            session_id=session_id,
            set_aside=set_aside,
            tick=tick,
        )
    clock.advance(timedelta(days=89))
    before = _count(database, "snapshots WHERE NOT set_aside")
    assert retention.retain(database) == NOTHING
    clock.advance(timedelta(days=2))
    assert retention.retain(database) == NOTHING | {"snapshots set aside": 2, "messages in the inbox": 1}
    assert _count(database, "snapshots WHERE NOT set_aside") == before


_ID = "(lpad(to_hex((extract(epoch FROM perdure_now()) * 1000)::bigint), 12, '0') || '7000' || right(md5(:name), 16))"

_ROWS: dict[str, tuple[float, str, list[str]]] = {
    "dry runs of the CaseBank": (
        30,
        """
        case_runs (run_id, dry_run, phase, started_at, finished_at)
        VALUES (md5(:name)::uuid, :name <> 'of the cycle', CASE :name WHEN 'unfinished' THEN 'planning' ELSE 'done' END,
                perdure_now(), CASE WHEN :name <> 'unfinished' THEN perdure_now() END)
        """,
        ["of the cycle", "unfinished"],
    ),
    "operators' actions": (
        30,
        f"audit (audit_id, via, actor, action, began_at) VALUES ({_ID}::uuid, 'api', :name, 'a', perdure_now())",
        [],
    ),
    "codes that link channels": (1, "link_codes VALUES (:name, decode(md5(:name), 'hex'), perdure_now())", []),
    "attempts to link channels": (1, "link_attempts VALUES ('', 'cli', :name, 1, perdure_now())", []),
    "answered requests": (7, "answered_requests VALUES (:name, 'a', gen_random_uuid(), perdure_now())", []),
    "costs of days, for budgets": (7, "day_spendings VALUES ('user', :name, perdure_now()::date, 1)", []),
    "side requests and forks": (
        90,
        """
        metered_requests (request_id, user_id, kind, requested_at)
        VALUES (gen_random_uuid(), :name, 'fork', perdure_now())
        """,
        [],
    ),
    "refused and joined messages of applications": (
        90,
        """
        unrouted (turn_id, user_id, message, settled_at)
        VALUES (gen_random_uuid(), :name, '{}', CASE WHEN :name <> 'unsettled' THEN perdure_now() END)
        """,
        ["unsettled"],
    ),
}
"""Of kinds of rows: their days, a row at this time, and the names of rows that stay at any age."""


@pytest.mark.parametrize("what", _ROWS)
def test_rows_are_kept_for_their_days(runtime: Runtime, clock: MovedClock, what: str) -> None:
    """Older ones are deleted, and no other."""
    database = runtime.database
    days, row, stay = _ROWS[what]

    def add(*names: str) -> None:
        for name in names:
            _write(database, "INSERT INTO users VALUES (:name, perdure_now())", name=name)
            _write(database, f"INSERT INTO {row}", name=name)

    add("old", "older", *stay)
    clock.advance(timedelta(days=days * 0.6))
    add("young")
    assert retention.retain(database) == NOTHING
    clock.advance(timedelta(days=days * 0.6))
    assert retention.retain(database) == NOTHING | {what: 2}
    assert _count(database, row.split(maxsplit=1)[0]) == 1 + len(stay)


def test_what_a_turn_has_cost_is_kept_for_a_week(runtime: Runtime, clock: MovedClock) -> None:
    """The amount of a turn that is not settled stays at any age."""
    database = runtime.database
    _answered(runtime)
    accept(runtime, parse_incoming({"user_id": "ben", "text": "hello"}))
    _write(database, "INSERT INTO turn_spendings SELECT turn_id, turn_id, accepted_at::date, 0, 1, 1 FROM turns")
    clock.advance(timedelta(days=6))
    assert retention.retain(database) == NOTHING
    clock.advance(timedelta(days=2))
    assert retention.retain(database) == NOTHING | {"costs of turns, for budgets": 1}
    assert _count(database, "turn_spendings") == 1


def test_the_newest_hundred_uses_of_a_case_stay(
    runtime: Runtime, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old uses of a case are deleted, except the newest hundred and uses that the case's use count does not include."""
    database = runtime.database
    monkeypatch.setattr(retention, "_BATCH", 2)
    put(database, "often")
    put(database, "seldom")
    use(database, ["seldom"], uuid4(), succeeded=True)
    for _ in range(EXECUTIONS):
        use(database, ["often"], uuid4(), succeeded=True)
        clock.advance(timedelta(seconds=1))
    clock.advance(timedelta(days=91))
    assert retention.retain(database) == NOTHING
    for _ in range(5):
        use(database, ["often"], uuid4(), succeeded=False, error="TOOL_ERROR")
    assert retention.retain(database) == NOTHING, "a use that is not counted yet stays"
    assert count(database) == EXECUTIONS + 6
    assert retention.retain(database) == NOTHING | {"uses of cases": 5}
    assert _count(database, "case_executions WHERE case_id = 'often'") == EXECUTIONS
    assert _count(database, "case_executions WHERE NOT succeeded") == 5
    assert _count(database, "case_executions WHERE case_id = 'seldom'") == 1


def test_a_process_that_shuts_down_stops_between_commits(
    runtime: Runtime, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process shuts down, `retain` stops after a commit. The next call deletes the remaining rows."""
    database = runtime.database
    monkeypatch.setattr(retention, "_BATCH", 1)
    for _ in range(3):
        _answered(runtime)
    _write(database, "UPDATE deliveries SET status = 'failed'")
    clock.advance(timedelta(days=31))
    left = iter([True, True])
    assert retention.retain(database, lambda: next(left, False)) == NOTHING | {"deliveries": 2}
    assert retention.retain(database) == NOTHING | {"deliveries": 1}


def _inbox(database: Database) -> list[str]:
    with database.engine.connect() as connection:
        return list(connection.execute(text("SELECT text FROM inbox ORDER BY text")).scalars())


def test_the_inbox_keeps_messages_whose_text_is_nowhere_else(runtime: Runtime, clock: MovedClock) -> None:
    """An inbox message is deleted 90 days after its turn has settled.

    After the deletion, a message with the same id counts as new.

    Queued messages, and messages cancelled before their turn began, are kept: the transcript does not contain them.
    """
    database = runtime.database

    def send(words: str, user_id: str = "ana", **given: Any) -> Accepted:
        incoming = {"user_id": user_id, "text": words, "message_id": words, **given}
        return accept(runtime, parse_incoming(incoming))

    answered = send("answered")
    send("merged into it", on_busy="merge")
    Runner(runtime, "tests").run(answered.session_id)
    send("cancelled", user_id="ben")
    queued = send("queued", user_id="ben", on_busy="interrupt")
    clock.advance(timedelta(days=89))
    assert retention.retain(database) == NOTHING
    assert send("answered").duplicate
    clock.advance(timedelta(days=2))
    assert retention.retain(database) == NOTHING | {"messages in the inbox": 2}
    assert _inbox(database) == ["cancelled", "queued"]
    assert not send("answered").duplicate
    assert _count(database, "messages WHERE content = 'answered'") == 1
    Runner(runtime, "tests").run(queued.session_id)
    assert retention.retain(database) == NOTHING, "it is old, but its turn has just settled"


def test_snapshots_of_ended_sessions_are_deleted(runtime: Runtime, clock: MovedClock) -> None:
    """Old snapshots of an ended session are deleted. Snapshots of a live session are kept at any age."""
    database = runtime.database
    ended, live = _answered(runtime, "ana"), _answered(runtime, "ben")
    for session_id in (ended, live):
        for tick in (1, 2):
            _write(
                database,
                "INSERT INTO snapshots (session_id, set_aside, variables, events, tick, token, saved_at)"
                " VALUES (:session_id, false, '{}', '[]', :tick, 1, perdure_now())",
                session_id=session_id,
                tick=tick,
            )
    clock.advance(timedelta(days=10))
    _write(
        database,
        "UPDATE sessions SET ended_at = perdure_now(), state = 'ended', routable = false WHERE session_id = :ended",
        ended=ended,
    )
    clock.advance(timedelta(days=81))
    assert retention.retain(database) == NOTHING | {"messages in the inbox": 2}, "it ended 81 days ago"
    clock.advance(timedelta(days=10))
    assert retention.retain(database) == NOTHING | {"snapshots of ended sessions": 2}
    assert _count(database, "snapshots") == 2


def test_every_page_of_a_walk_is_visited(runtime: Runtime, clock: MovedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """`retain` scans all pages of a table, even if it keeps every row of the first pages."""
    database = runtime.database
    monkeypatch.setattr(retention, "_BATCH", 2)
    for number in range(5):
        accept(runtime, Incoming(user=UserKey("ben"), text=f"kept {number}", on_busy=OnBusy.INTERRUPT))
        clock.advance(timedelta(seconds=1))
    for _ in range(5):
        _answered(runtime)
        clock.advance(timedelta(seconds=1))
    clock.advance(timedelta(days=91))
    assert retention.retain(database) == NOTHING | {"messages in the inbox": 5}
    assert _inbox(database) == [f"kept {number}" for number in range(5)]


def _end(database: Database, *sessions: UUID) -> None:
    _write(
        database,
        "UPDATE sessions SET ended_at = perdure_now(), consolidated_at = perdure_now(), state = 'ended',"
        " routable = false, summary = 'they said hello' WHERE session_id = ANY (:sessions)",
        sessions=[*sessions],
    )


def test_sessions_are_deleted_once_nothing_needs_them(runtime: Runtime, clock: MovedClock) -> None:
    """Only where it is set. A pending delivery, a follower that is open, a memory and consolidation keep a session."""
    database = runtime.database
    first = _answered(runtime)
    _end(database, first)
    follower, waits, remembered, unread = _answered(runtime), *(_answered(runtime, user) for user in "bcd")
    _end(database, waits, remembered, unread)
    _write(
        database,
        "UPDATE sessions SET previous_session_id = :first WHERE session_id = :follower",
        first=first,
        follower=follower,
    )
    _write(database, "UPDATE sessions SET consolidated_at = NULL WHERE session_id = :unread", unread=unread)
    _write(
        database,
        "WITH memory AS (INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin,"
        " created_at, valid_from) VALUES (gen_random_uuid(), 'c', 'fact', 'a fact', 0.5, 0.5, '{cli}', 'tool', now(),"
        " now()) RETURNING memory_id) INSERT INTO memory_sources SELECT memory_id, :session, 1 FROM memory",
        session=remembered,
    )
    _write(
        database,
        "UPDATE deliveries SET status = 'delivered'"
        " WHERE turn_id <> (SELECT turn_id FROM turns WHERE session_id = :waits)",
        waits=waits,
    )
    days = RetentionSettings(transcripts_days=10)
    clock.advance(timedelta(days=11))
    assert retention.retain(database) == NOTHING
    assert retention.retain(database, settings=days) == NOTHING, "the follower is open"
    _end(database, follower)
    assert retention.retain(database, settings=days) == NOTHING | {"ended sessions": 1}
    assert _count(database, "sessions") == 4
    clock.advance(timedelta(days=11))
    assert retention.retain(database, settings=days) == NOTHING | {"ended sessions": 1}, "the follower, by now"
    _write(database, "UPDATE deliveries SET status = 'failed'")
    _write(
        database,
        "UPDATE sessions SET consolidated_at = NULL, consolidation_given_up_at = perdure_now()"
        " WHERE session_id = :unread",
        unread=unread,
    )
    _write(
        database,
        "INSERT INTO snapshots (session_id, set_aside, variables, events, tick, token, saved_at)"
        " SELECT session_id, false, '{}', '[]', 1, 1, perdure_now() FROM sessions",
    )
    _write(database, "DELETE FROM memories")
    assert retention.retain(database, settings=days) == NOTHING | {"ended sessions": 3}
    for table in (
        "sessions", "turns", "messages", "message_words", "message_vectors", "unembedded", "snapshots", "inbox",
        "deliveries",
    ):  # fmt: skip
        assert _count(database, table) == 0, table
    assert accept(runtime, Incoming(user=UserKey("ana"), text="hello again")).session_id not in {first, follower}


def test_conversations_without_a_session_are_deleted(
    runtime: Runtime, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their titles quote their users. One with a session stays, a new one, and one in which nothing is remembered."""
    database = runtime.database
    monkeypatch.setattr(retention, "_BATCH", 1)
    for user, conversation in (("ana", "a"), ("ana", "b / c"), ("ana", "private"), ("ben", "a"), ("ben", "b")):
        _end(database, _answered(runtime, user, conversation=conversation))
    _write(database, "UPDATE conversations SET remember = false WHERE conversation = 'private'")
    _write(database, "UPDATE deliveries SET status = 'failed'")
    days = RetentionSettings(transcripts_days=10)
    clock.advance(timedelta(days=9))
    _answered(runtime, "ben", conversation="a")
    _write(
        database,
        "INSERT INTO conversations (user_id, conversation, title, created_at) VALUES ('ben', 'new', '', perdure_now())",
    )
    clock.advance(timedelta(days=2))
    deleted = retention.retain(database, settings=days)
    with database.engine.connect() as connection:
        left = connection.exec_driver_sql("SELECT user_id, conversation FROM conversations ORDER BY 1, 2").fetchall()

    assert deleted["conversations without a session"] == 3
    assert left == [("ana", "private"), ("ben", "a"), ("ben", "new")]


def test_sessions_that_follow_each_other_are_deleted_together(runtime: Runtime, clock: MovedClock) -> None:
    """One statement deletes the session and the one that it follows, with all their rows."""
    database = runtime.database
    first = _answered(runtime)
    _end(database, first)
    second = _answered(runtime)
    _end(database, second)
    _write(
        database,
        "UPDATE sessions SET previous_session_id = :first WHERE session_id = :second",
        first=first,
        second=second,
    )
    _write(database, "UPDATE deliveries SET status = 'failed'")
    clock.advance(timedelta(days=11))
    days = RetentionSettings(transcripts_days=10)
    assert retention.retain(database, settings=days) == NOTHING | {"ended sessions": 2}
    assert _count(database, "sessions") == 0


def test_the_session_of_another_agents_answer_stays_with_the_call(runtime: Runtime, clock: MovedClock) -> None:
    """It has the id of the call, which belongs to the turn of the agent that asked."""
    database = runtime.database
    asking, answering = _answered(runtime), _answered(runtime, "ben")
    _end(database, answering)
    _write(database, "UPDATE sessions SET depth = 1 WHERE session_id = :answering", answering=answering)
    _write(
        database,
        "INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status,"
        " intended_at, decide_at, waits_for)"
        " SELECT :answering, turn_id, 2, 0, 'ask', '{}', 'idempotent', 'done', now(), now(), 'agent' FROM turns"
        " WHERE session_id = :asking",
        answering=answering,
        asking=asking,
    )
    _write(database, "UPDATE deliveries SET status = 'failed'")
    clock.advance(timedelta(days=11))
    days = RetentionSettings(transcripts_days=10)
    assert retention.retain(database, settings=days) == NOTHING
    _end(database, asking)
    clock.advance(timedelta(days=11))
    assert sum(retention.retain(database, settings=days)["ended sessions"] for _ in range(2)) == 2


@pytest.mark.parametrize("batch", [1, 1_000])
def test_old_vectors_and_tool_calls_are_deleted(
    runtime: Runtime, clock: MovedClock, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Vectors where it is set. Of calls, those of ended sessions; those that a person decided or that waited stay."""
    database = runtime.database
    monkeypatch.setattr(retention, "_BATCH", batch)
    ended, live = _answered(runtime), _answered(runtime, "ben")
    clock.advance(timedelta(days=10))
    _end(database, ended)
    _write(
        database, "UPDATE message_words SET occurred_at = perdure_now() WHERE session_id = :live AND seq = 2", live=live
    )
    for session, decider, waits_for in (
        (ended, None, None), (ended, "staff", None), (ended, None, "task"), (live, None, None),
    ):  # fmt: skip
        _write(
            database,
            "INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status,"
            " intended_at, decide_at, decided_by, waits_for)"
            " SELECT ('00000000-0000-7000-8000-' || lpad((SELECT count(*) FROM tool_effects)::text, 12, '0'))::uuid,"
            " turn_id, 2, (SELECT count(*) FROM tool_effects), 'look', '{}', 'pure', 'done', now(), now(), :decider,"
            " :waits_for"
            " FROM turns WHERE session_id = :session",
            session=session,
            decider=decider,
            waits_for=waits_for,
        )
    _write(
        database,
        "WITH made AS (INSERT INTO embedders (name, dimensions, created_at) VALUES ('three', 3, now())"
        " RETURNING embedder_id) INSERT INTO message_vectors (session_id, seq, embedder_id, user_id)"
        " SELECT session_id, seq, embedder_id, user_id FROM message_words, made",
    )
    assert _count(database, "message_vectors") == 4
    days = RetentionSettings(vectors_days=365, inbox_days=0, deliveries_days=0)
    clock.advance(timedelta(days=354))
    assert retention.retain(database, settings=days) == NOTHING
    clock.advance(timedelta(days=2))
    assert retention.retain(database, settings=days) == NOTHING | {"vectors of messages": 3}
    clock.advance(timedelta(days=10))
    assert retention.retain(database, settings=days) == NOTHING | {
        "tool calls of ended sessions": 1,
        "vectors of messages": 1,
    }
    assert (_count(database, "tool_effects"), _count(database, "message_words")) == (3, 4)
