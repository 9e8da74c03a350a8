"""Tests of real workers with rows that they cannot parse, and with a database that rejects a commit."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from sqlalchemy import text

from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

MAX_ATTEMPTS = 3
GIVEN_UP_S = 120.0
"""Time limit for all attempts, in seconds. The third attempt starts an interpreter."""


@pytest.mark.timeout(180)
@pytest.mark.exhaustive
def test_a_session_with_unreadable_rows_continues(installation: Installation) -> None:
    """A turn whose rows this release cannot read fails after its last attempt. Later messages are answered."""
    first = installation.accept("hello")
    worker = installation.worker()
    installation.settled(first.turn_id)
    worker.container.kill("SIGTERM")
    newer = {"usage": json.dumps({"input_tokens": 1, "output_tokens": 1, "cached_tokens": 3})}
    assert installation.query("UPDATE messages SET usage = %(usage)s WHERE usage IS NOT NULL RETURNING 1", **newer)
    poisoned, behind = installation.accept("poisoned"), installation.accept("and then?")
    assert installation.query(
        """UPDATE turns SET unsaved = '{"verdict": 2}' WHERE turn_id = %(id)s RETURNING 1""", id=poisoned.turn_id
    )

    installation.worker(PERDURE_TURN__MAX_ATTEMPTS=str(MAX_ATTEMPTS))
    given_up, answered = installation.settled(poisoned.turn_id, behind.turn_id, within_s=GIVEN_UP_S)

    assert (given_up["status"], given_up["error"]["code"]) == ("failed", "BUDGET_EXHAUSTED")
    assert str(MAX_ATTEMPTS) in given_up["reply"]["text"]
    assert (answered["status"], answered["reply"]["text"]) == ("done", answer_to("and then?"))
    strikes = Counter(note.name for note in installation.faults.notes() if note.moment == "after")["turns.strike"]
    assert strikes == MAX_ATTEMPTS
    installation.check()


@pytest.mark.long
@pytest.mark.timeout(60)
def test_a_reply_survives_a_lock_timeout(installation: Installation) -> None:
    """If a commit fails with a lock timeout, the worker repeats the commit without another model call."""
    installation.worker(PERDURE_TURN__LEASE_S="15").ready()
    gate = installation.model_server.gate("hello")
    sent = installation.accept("hello")
    gate.wait()
    with installation.database.engine.execution_options(isolation_level="READ COMMITTED").begin() as other:
        other.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        other.execute(text("SELECT FROM turns WHERE turn_id = :id FOR UPDATE"), {"id": sent.turn_id})
        gate.opened.set()
        wait_until(lambda: _passed(installation, "turns.begin_next"), "the commit was rejected")
    (turn,) = installation.settled(sent.turn_id)

    assert (turn["status"], turn["reply"]["text"], turn["attempts"]) == ("done", answer_to("hello"), 1)
    assert len(installation.model_server.called_at["hello"]) == 1
    assert _passed(installation, "turns.settle") > 1
    installation.check()


def _passed(installation: Installation, name: str) -> int:
    return sum((note.moment, note.name) == ("before", name) for note in installation.faults.notes())
