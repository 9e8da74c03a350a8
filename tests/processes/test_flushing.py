"""At shutdown, a worker finds turns that only Redis has, and writes them to PostgreSQL."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from uuid import UUID

import pytest
from pytest_celery import CeleryTestSetup

from perdure.clock import SystemClock
from perdure.ids import new_id
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.working import RememberedMessage, RememberedTurn
from perdure.models.protocol import Role
from perdure.settings import MemorySettings
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.parametrize("worker_count", [1])
def test_a_shutdown_writes_turns_that_postgresql_lacks(
    installation: Installation, celery_setup: CeleryTestSetup
) -> None:
    """A worker writes each missing turn once. It skips a turn if another worker claimed the session after the turn."""
    worker = installation.workers[0]
    redis = RedisMemory.at(installation.redis.url, MemorySettings(), SystemClock())
    known = installation.accept("hello", user="ana")
    stale = installation.accept("hello", user="ben")
    installation.settled(known.turn_id, stale.turn_id)
    before = {each.session_id: _lines(installation, each.session_id) for each in (known, stale)}
    lost = {}
    for session_id in (known.session_id, stale.session_id):
        lost[session_id] = _lost(_token(installation, session_id))
        assert redis.working.remember_turn(session_id, lost[session_id])
    raise_token = "UPDATE sessions SET token = token + 1 WHERE session_id = %(id)s RETURNING token"
    with installation.database.engine.begin() as connection:
        connection.exec_driver_sql(raise_token, {"id": stale.session_id})

    worker.container.signal(signal.SIGTERM)
    assert worker.container.wait() == 0
    assert "flushed 1 of 2 sessions, 1 turns, 1 left to others" in worker.logs()
    assert _lines(installation, stale.session_id) == before[stale.session_id]
    written = [*before[known.session_id], ("user", "what was lost"), ("assistant", "is back")]
    assert _lines(installation, known.session_id) == written
    assert _turns(installation, known.session_id) == [known.turn_id, lost[known.session_id].turn_id]

    # At the next shutdown, PostgreSQL already has every entry.
    worker.container.start()
    again = installation.accept("again", user="ana")
    assert again.session_id == known.session_id
    installation.settled(again.turn_id)
    worker.container.signal(signal.SIGTERM)
    assert worker.container.wait() == 0
    assert "flushed 1 of 1 sessions, 0 turns" in worker.logs()
    assert _lines(installation, known.session_id) == [*written, ("user", "again"), ("assistant", answer_to("again"))]
    installation.check()
    redis.close()


def _lost(token: int) -> RememberedTurn:
    """The Redis entry of a turn whose commit PostgreSQL lost in a failover."""
    now = datetime.now(UTC)
    return RememberedTurn(
        turn_id=new_id(SystemClock()),
        seq=2,
        token=token,
        agent="tester",
        channel="http",
        status="done",
        settled_at=now,
        messages=(
            RememberedMessage(
                role=Role.USER, content="what was lost", message_id="lost", token_count=3, created_at=now
            ),
            RememberedMessage(position=2, role=Role.ASSISTANT, content="is back", token_count=3, created_at=now),
        ),
    )


def _token(installation: Installation, session_id: UUID) -> int:
    token: int = installation.query("SELECT token FROM sessions WHERE session_id = %(id)s", id=session_id)[0].token
    return token


def _lines(installation: Installation, session_id: UUID) -> list[tuple[str, str]]:
    return [(row.role, row.content) for row in installation.transcript(session_id)]


def _turns(installation: Installation, session_id: UUID) -> list[UUID]:
    rows = installation.query("SELECT turn_id FROM turns WHERE session_id = %(id)s ORDER BY seq", id=session_id)
    return [row.turn_id for row in rows]
