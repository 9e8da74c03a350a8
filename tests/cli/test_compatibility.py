"""Gateways, workers and beat start if this release can use the database. Otherwise they exit with 3."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from alembic import command
from sqlalchemy import text
from sqlalchemy.engine import make_url

from perdure.database.migrate import config
from tests.cli.conftest import Perdure
from tests.databases import ADMINISTRATOR, engine_of
from tests.processes.gateway import serving
from tests.releases import HEAD, next_release

PROGRAMS = (("gateway",), ("worker",), ("beat",))

pytestmark = pytest.mark.long


def test_a_running_gateway_stays_ready_while_the_next_release_migrates(
    perdure: Perdure, database_url: str, tmp_path: Path
) -> None:
    """The old release stays ready as long as it can use the migrated schema.

    If a migration excludes the old release, `/readyz` fails, and no program of the old release starts.
    """
    newer = next_release(database_url, tmp_path, readable_from=HEAD)
    excluding = next_release(database_url, tmp_path, readable_from="excluding", revision="excluding")
    with serving(perdure) as url:
        assert httpx2.get(f"{url}/readyz").json() == {"status": "ready"}
        command.upgrade(newer, "head")
        assert httpx2.get(f"{url}/readyz").json() == {"status": "ready"}
        migrated = perdure("migrate")
        assert (migrated.returncode, "newer release" in migrated.stderr) == (0, True)
        command.downgrade(newer, HEAD)
        assert httpx2.get(f"{url}/readyz").json() == {"status": "ready"}

        command.upgrade(excluding, "head")
        answer = httpx2.get(f"{url}/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "UNAVAILABLE")
        assert "releases before revision excluding cannot use" in answer.json()["detail"]
        for program in PROGRAMS:
            ended = perdure(*program)
            assert (ended.returncode, "install a newer one" in ended.stderr) == (3, True), ended.stderr
        assert perdure("migrate").returncode == 0, "`migrate` leaves the schema as it is"
    command.downgrade(excluding, HEAD)


def test_programs_need_the_migration(perdure: Perdure, database_url: str) -> None:
    """If a migration is pending, no program starts, because a worker would fail at every task."""
    command.downgrade(config(database_url), "-1")
    for program in PROGRAMS:
        ended = perdure(*program)
        assert (ended.returncode, "run `perdure migrate`" in ended.stderr) == (3, True), ended.stderr
    assert perdure("migrate").returncode == 0, "the pending migration is applied"


def test_programs_and_the_migration_need_pgvectors_version(perdure: Perdure, database_url: str) -> None:
    """If pgvector is too old, no program starts, and `perdure migrate` fails.

    The message names the found version, the required version, the setting and the remedy.
    """
    administrator = make_url(database_url).set(username=ADMINISTRATOR).render_as_string(hide_password=False)
    engine = engine_of(administrator, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        found = connection.scalar(text("SELECT extversion FROM pg_extension WHERE extname = 'vector'"))
        change = text("UPDATE pg_extension SET extversion = :version WHERE extname = 'vector'")
        connection.execute(change, {"version": "0.8.3"})
        for program in (("migrate",), *PROGRAMS):
            ended = perdure(*program)
            assert ended.returncode == 3, ended.stderr
            for named in ("PERDURE_DATABASE_URL", "0.8.3", "0.8.4", "ALTER EXTENSION vector UPDATE"):
                assert named in ended.stderr
        connection.execute(change, {"version": found})
    engine.dispose()
