"""The versions of PostgreSQL and pgvector, and the revisions of the schema, that a release accepts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import text
from sqlalchemy.engine import URL, Engine

from perdure.database import compatibility
from perdure.database.compatibility import require
from perdure.database.engine import Database
from perdure.database.migrate import config, migrate
from perdure.errors import IncompatibleDatabase, Unavailable
from tests.databases import Databases, engine_of
from tests.releases import HEAD, next_release, upgraded


@pytest.fixture
def empty(databases: Databases) -> Iterator[URL]:
    """An empty database, with the administrator's role: tests change the extension's version."""
    with databases.empty(bare=True) as url:
        yield url


@pytest.fixture
def engine(empty: URL) -> Iterator[Engine]:
    """An administrator's connections to the empty database."""
    made = engine_of(empty, isolation_level="AUTOCOMMIT")
    yield made
    made.dispose()


@pytest.fixture
def release(empty: URL) -> Iterator[Database]:
    """A connection pool on the empty database, as in a process of this release."""
    made = Database(empty)
    yield made
    made.close()


def _declared(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT readable_from FROM schema_compatibility")).scalars())


@pytest.mark.long
def test_a_release_uses_its_own_schema_and_none_before_it(empty: URL, release: Database, tmp_path: Path) -> None:
    """A release refuses a database without perdure's tables or without the release's newest migration.

    The error names `perdure migrate`.
    """
    with pytest.raises(IncompatibleDatabase, match="no tables of perdure: run `perdure migrate`"):
        require(release)
    migrate(empty)
    with upgraded(next_release(empty, tmp_path)):
        with pytest.raises(IncompatibleDatabase, match=f"at revision {HEAD}, .* needs next: run `perdure migrate`"):
            require(release)
        migrate(empty)
        require(release)
        command.downgrade(config(empty), HEAD)
    require(release)
    command.downgrade(config(empty), "base")
    with pytest.raises(IncompatibleDatabase, match="no tables"):
        require(release)


@pytest.mark.long
def test_a_release_uses_the_schema_of_the_next_one_and_leaves_it_alone(
    empty: URL, engine: Engine, release: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After the next release has migrated the database, the old release works, and its `migrate` changes nothing."""
    migrate(empty)
    require(release)
    newer = next_release(empty, tmp_path, readable_from=HEAD)
    command.upgrade(newer, "head")
    require(release)
    with caplog.at_level(logging.WARNING):
        migrate(empty)
    assert "a newer release has migrated the database to revision next: nothing is changed" in caplog.text
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == ["next"]
        connection.execute(text("SELECT nickname FROM users"))
    require(release)


@pytest.mark.long
def test_a_release_does_not_use_a_schema_that_excludes_it(
    empty: URL, engine: Engine, release: Database, tmp_path: Path
) -> None:
    """A release refuses a schema that needs a newer release, until the schema is downgraded.

    The error names the revisions of the schema and of the release.
    """
    migrate(empty)
    own = _declared(engine)
    newer = next_release(empty, tmp_path, readable_from="next")
    command.upgrade(newer, "head")
    assert _declared(engine) == ["next"]
    with pytest.raises(IncompatibleDatabase, match=f"revision next, which releases .*before revision next .*at {HEAD}"):
        require(release)
    migrate(empty)  # leaves the newer schema unchanged, without an error
    command.downgrade(newer, HEAD)
    assert _declared(engine) == own
    require(release)


def test_a_revision_that_is_not_perdures_is_refused(empty: URL, engine: Engine, release: Database) -> None:
    """A database whose `alembic_version` belongs to another application is refused and not migrated."""
    with engine.connect() as connection:
        connection.execute(text("CREATE SCHEMA perdure"))
        connection.execute(text("CREATE TABLE alembic_version (version_num text)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('0012')"))
    with pytest.raises(IncompatibleDatabase, match="'0012', which is not one of perdure's: set PERDURE_DATABASE_S"):
        require(release)
    with pytest.raises(IncompatibleDatabase, match="a table 'alembic_version' that is not perdure's: set PERDURE_D"):
        migrate(empty)


def test_a_server_that_is_too_old_is_refused(empty: URL, release: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PostgreSQL that is too old is refused and not migrated.

    The error names the found and the required version, the setting and the fix.
    """
    monkeypatch.setattr(compatibility, "OLDEST_POSTGRESQL", 99)
    said = r"PERDURE_DATABASE_URL is PostgreSQL \d\d\.\d.*; perdure needs 99 or newer. Upgrade it, or set PERDURE_D"
    with pytest.raises(IncompatibleDatabase, match=said):
        require(release)
    with pytest.raises(IncompatibleDatabase, match=said):
        migrate(empty)
    monkeypatch.undo()
    with pytest.raises(IncompatibleDatabase, match="no tables"):
        require(release)


@pytest.mark.long
@pytest.mark.parametrize("installed", ["0.8.3", "0.7.4", "0.5"])
def test_a_pgvector_that_is_too_old_is_refused(empty: URL, engine: Engine, release: Database, installed: str) -> None:
    """A database with an old pgvector is refused. The error shows the statement that updates the extension."""
    migrate(empty)
    with engine.connect() as connection:
        connection.execute(text("UPDATE pg_extension SET extversion = :v WHERE extname = 'vector'"), {"v": installed})
    said = f"has pgvector {installed}; perdure needs 0.8.4 or newer. Install .* `ALTER EXTENSION vector UPDATE`"
    with pytest.raises(IncompatibleDatabase, match=said):
        require(release)
    with pytest.raises(IncompatibleDatabase, match=said):
        migrate(empty)


@pytest.mark.long
@pytest.mark.parametrize("installed", ["0.8.4", "0.8.10", "0.9", "1.0.0"])
def test_a_newer_pgvector_is_used(empty: URL, engine: Engine, release: Database, installed: str) -> None:
    """Versions of pgvector are compared as numbers, not as text, so 0.8.10 is newer than 0.8.4."""
    migrate(empty)
    with engine.connect() as connection:
        connection.execute(text("UPDATE pg_extension SET extversion = :v WHERE extname = 'vector'"), {"v": installed})
    require(release)


def test_a_server_that_cannot_be_reached_is_not_incompatible() -> None:
    """An unreachable server is not reported as incompatible, because a program may start before its database."""
    with pytest.raises(Unavailable) as raised:
        require(Database("postgresql://ana@127.0.0.1:1/perdure"))
    assert not isinstance(raised.value, IncompatibleDatabase)
