"""Workers whose role is an ordinary one finish erasures and embed texts, even while `ANALYZE` must wait."""

from __future__ import annotations

import pytest
from pytest_celery import CeleryTestSetup

from perdure.access.tenants import UserKey
from tests.databases import engine_of
from tests.processes.faults import wait_until
from tests.processes.installation import Installation

UNEMBEDDED = "SELECT 1 FROM unembedded"


@pytest.mark.exhaustive
@pytest.mark.parametrize("worker_count", [1])
def test_an_erasure_next_to_a_maintained_table_stops_no_duty(
    celery_setup: CeleryTestSetup, installation: Installation
) -> None:
    """While another session maintains a table, an erasure is finished, and the sweep's later duties continue.

    When the lock is released, the statistics are updated, although the role may not read `pg_statistic`.
    """
    engine = engine_of(installation.database.url)
    installation.settled(installation.accept("hello", user="gone").turn_id)
    with engine.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE users IN SHARE UPDATE EXCLUSIVE MODE")
        installation.runtime.eraser.erase(UserKey("gone"))
        wait_until(lambda: not installation.query("SELECT 1 FROM erasures"), "the erasure is finished")
        installation.settled(installation.accept("hello", user="ana").turn_id)
        wait_until(lambda: not installation.query(UNEMBEDDED), "the texts are embedded")
        stale = "SELECT table_name FROM stale_statistics"
        wait_until(lambda: [row[0] for row in installation.query(stale)] == ["users"], "the others are analyzed")
    installation.query("UPDATE stale_statistics SET due_at = now() RETURNING 1")
    wait_until(lambda: not installation.query(stale), "the statistics are updated")
    engine.dispose()
    assert "permission denied" not in installation.workers[0].logs()
