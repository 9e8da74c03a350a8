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
from perdure.settings import OnBusy
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


def _answered(runtime: Runtime, user_id: str = "ana") -> UUID:
    """Run a turn whose message requests a callback; returns the session's id."""
    message = {"user_id": user_id, "text": "hello", "reply_to": {"url": "https://example.org/reply"}}
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
        retention.retain(runtime.database)
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
    clock.advance(timedelta(days=91))
    before = _count(database, "snapshots WHERE NOT set_aside")
    assert retention.retain(database) == NOTHING | {"snapshots set aside": 2, "messages in the inbox": 1}
    assert _count(database, "snapshots WHERE NOT set_aside") == before


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
    send("queued", user_id="ben", on_busy="interrupt")
    clock.advance(timedelta(days=89))
    assert retention.retain(database) == NOTHING
    assert send("answered").duplicate
    clock.advance(timedelta(days=2))
    assert retention.retain(database) == NOTHING | {"messages in the inbox": 2}
    assert _inbox(database) == ["cancelled", "queued"]
    assert not send("answered").duplicate
    assert _count(database, "messages WHERE content = 'answered'") == 1


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
    _write(
        database,
        "UPDATE sessions SET ended_at = perdure_now(), state = 'ended', routable = false WHERE session_id = :ended",
        ended=ended,
    )
    clock.advance(timedelta(days=91))
    assert retention.retain(database) == NOTHING | {"snapshots of ended sessions": 2, "messages in the inbox": 2}
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
