"""Migrations: upgrades, downgrades, concurrency, interruptions, and agreement with the tables declared in code."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.engine import URL, Engine

from perdure.database.compatibility import require, revisions
from perdure.database.engine import Database
from perdure.database.migrate import config, migrate
from perdure.database.tables import metadata
from perdure.errors import Unavailable
from tests.databases import Databases, engine_of
from tests.releases import HEAD, next_release, upgraded


@pytest.fixture
def empty(databases: Databases) -> Iterator[URL]:
    """An empty database."""
    with databases.empty() as url:
        yield url


@pytest.fixture
def engine(empty: URL) -> Iterator[Engine]:
    """Connections to the empty database."""
    made = engine_of(empty)
    yield made
    made.dispose()


_CATALOGUE = """
    SELECT 'column', table_name, column_name, data_type, is_nullable, column_default
    FROM information_schema.columns WHERE table_schema = 'perdure'
    UNION ALL SELECT 'index', tablename, indexname, indexdef, NULL, NULL FROM pg_indexes WHERE schemaname = 'perdure'
    UNION ALL SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid), NULL, NULL
    FROM pg_constraint WHERE connamespace = to_regnamespace('perdure')
    UNION ALL SELECT 'option', relname, array_to_string(reloptions, ','), NULL, NULL, NULL
    FROM pg_class WHERE relnamespace = to_regnamespace('perdure') AND reloptions IS NOT NULL
    UNION ALL SELECT 'trigger', tgrelid::regclass::text, tgname, pg_get_triggerdef(oid), NULL, NULL
    FROM pg_trigger WHERE NOT tgisinternal
    UNION ALL SELECT 'function', proname, NULL, NULL, NULL, NULL
    FROM pg_proc WHERE pronamespace = to_regnamespace('perdure') AND proname LIKE 'perdure%'
    ORDER BY 1, 2, 3
"""


def _catalogue(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(_CATALOGUE)) if row[1] != "alembic_version"]


def _downgrade(empty: URL, revision: str) -> None:
    command.downgrade(config(empty), revision)


@pytest.mark.exhaustive
@pytest.mark.parametrize("releases", ["this one", "this one and the next one"])
def test_up_and_down_and_up_again(empty: URL, engine: Engine, tmp_path: Path, releases: str) -> None:
    """Each downgrade restores the former tables, and a second upgrade gives the same tables as the first."""
    with upgraded(next_release(empty, tmp_path)) if "next" in releases else nullcontext():
        before = _catalogue(engine)
        assert [row for row in before if row[0] != "function"] == []
        stages = []
        for revision in revisions():
            migrate(empty, revision)
            stages.append((revision, _catalogue(engine)))
        for (_, there), (revision, back) in zip(reversed(stages[1:]), reversed(stages[:-1]), strict=True):
            assert _catalogue(engine) == there
            _downgrade(empty, revision)
            assert _catalogue(engine) == back
        _downgrade(empty, "base")
        assert _catalogue(engine) == before
        migrate(empty)
        assert _catalogue(engine) == stages[-1][1]


@pytest.mark.long
def test_models_and_migrations_agree(empty: URL, engine: Engine) -> None:
    """The tables declared in the code equal the migrated tables, including defaults and comments."""
    migrate(empty)
    with engine.connect() as connection:
        options = {"compare_type": True, "compare_server_default": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []


@pytest.mark.long
def test_what_alembic_does_not_compare_agrees_too(empty: URL, engine: Engine) -> None:
    """Constraints, partial indexes and storage options of the declared tables equal those of the migrated tables."""
    migrate(empty)
    with engine.begin() as connection:
        connection.execute(text("DROP VIEW due_work"))  # views are declared in migrations only
    migrated = [row for row in _catalogue(engine) if row[0] not in {"function", "trigger"}]
    with engine.begin() as connection:
        names = ", ".join(table.name for table in metadata.sorted_tables)
        connection.execute(text(f"DROP TABLE {names}"))
        metadata.create_all(connection)
    assert [row for row in _catalogue(engine) if row[0] not in {"function", "trigger"}] == migrated


@pytest.mark.long
def test_migrating_twice_changes_nothing(empty: URL, engine: Engine, tmp_path: Path) -> None:
    """Migrating a current database changes nothing. `perdure up` relies on this: it migrates at every start.

    The operator reads what each call did.
    """
    assert str(migrate(empty)) == f"Created the tables in the schema perdure at revision {HEAD}."
    with upgraded(next_release(empty, tmp_path)):
        assert str(migrate(empty)) == f"Upgraded the tables in the schema perdure from revision {HEAD} to next."
        before = _catalogue(engine)
        assert str(migrate(empty)) == "Nothing to do: the tables in the schema perdure are at revision next."
        assert _catalogue(engine) == before


@pytest.mark.long
def test_four_concurrent_migrations_succeed(empty: URL) -> None:
    """Concurrent migrations run one after the other, and all succeed."""
    begin = threading.Barrier(4)
    failed: list[BaseException] = []

    def work() -> None:
        begin.wait(20)
        try:
            migrate(empty)
        except BaseException as error:  # noqa: BLE001 (any error fails the test)
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    database = Database(empty)
    require(database)
    database.close()


def test_an_unreachable_server_is_reported_without_its_password() -> None:
    """If the server is unreachable, the error contains its address without the password."""
    with pytest.raises(Unavailable) as raised:
        migrate("postgresql://ana:s3cret@127.0.0.1:1/perdure")
    assert "127.0.0.1" in raised.value.message
    assert "s3cret" not in raised.value.message
    with pytest.raises(Unavailable):
        require(Database("postgresql://ana:s3cret@127.0.0.1:1/perdure"))


def test_the_clock_of_the_database_can_be_moved(empty: URL, engine: Engine) -> None:
    """`perdure_now()` returns the time shifted by the connection's `perdure.clock_offset`, which is 0 by default."""
    migrate(empty)
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT perdure_now() = now()"))
        connection.execute(text("SELECT set_config('perdure.clock_offset', '90.5', false)"))
        assert connection.scalar(text("SELECT extract(epoch FROM perdure_now() - now())::float")) == 90.5


_INDEX = (
    """with op.get_context().autocommit_block():
        op.drop_index("users_created_at_idx", if_exists=True, postgresql_concurrently=True)
        op.create_index("users_created_at_idx", "users", ["created_at"], postgresql_concurrently=True)""",
    'op.drop_index("users_created_at_idx")',
)


@pytest.mark.long
def test_a_large_table_is_indexed_concurrently_with_writers(empty: URL, engine: Engine, tmp_path: Path) -> None:
    """A later migration builds an index on a table without blocking its writers.

    After an interruption, a second run rebuilds the index.
    """
    migrate(empty)
    reader = engine.connect()
    reader.execution_options(isolation_level="REPEATABLE READ").execute(text("SELECT count(*) FROM users"))
    with (
        upgraded(next_release(empty, tmp_path, steps=_INDEX)),
        ThreadPoolExecutor(1) as pool,
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as writer,
    ):
        migrating = pool.submit(migrate, empty)
        waiting = text(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'virtualxid'"
        )
        deadline = time.monotonic() + 30
        while writer.execute(waiting).first() is None:
            assert time.monotonic() < deadline, "the index build did not wait for the open transaction"
        writer.execute(text("SET lock_timeout = '1s'"))
        writer.execute(text("INSERT INTO users (user_id, created_at) VALUES ('ana', now())"))
        writer.execute(text("UPDATE sessions SET tick = tick + 1"))
        writer.execute(text("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'virtualxid'"))
        with pytest.raises(Unavailable):
            migrating.result(30)
        reader.close()
        broken = text("SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid")
        assert writer.execute(broken).scalars().all() == ["users_created_at_idx"]
        migrate(empty)
        assert writer.execute(broken).scalars().all() == []
