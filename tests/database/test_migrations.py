"""Migrations: upgrades, downgrades, concurrency, interruptions, and agreement with the tables declared in code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import event, text
from sqlalchemy.engine import URL, Engine

from perdure.cli.errors import _expected
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
    made, engine = config(empty), engine_of(empty)
    try:
        with engine.connect() as connection:
            made.attributes["connection"] = connection
            command.downgrade(made, revision)
    finally:
        engine.dispose()


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


class _Interruption(Exception):
    """The migration's process is killed before it sends a statement."""


@contextmanager
def _interrupted(at: int) -> Iterator[None]:
    """In the block, a migration is interrupted before the `at`th statement from its first autocommit block on.

    The block has committed what the migration did before it.
    """
    entered, sent = False, 0
    enter = MigrationContext.autocommit_block

    def entering(context: MigrationContext) -> Any:
        nonlocal entered
        entered = True
        return enter(context)

    def sending(*_: Any) -> None:
        nonlocal sent
        sent += entered
        if entered and sent == at:
            raise _Interruption

    event.listen(Engine, "before_cursor_execute", sending)
    try:
        with patch.object(MigrationContext, "autocommit_block", entering):
            yield
    finally:
        event.remove(Engine, "before_cursor_execute", sending)


def _interrupt_everywhere(run: Callable[[], object], undo: Callable[[], object], engine: Engine) -> int:
    """Interrupt the migration `run` at each point, run it again each time, and compare the tables.

    Returns the number of points.
    """
    run()
    expected, points = _catalogue(engine), 0
    while True:
        undo()
        try:
            with _interrupted(points + 1):
                run()
        except _Interruption:
            points += 1
            run()
            assert _catalogue(engine) == expected, f"interrupted at point {points}"
        else:
            return points


@pytest.mark.long
@pytest.mark.parametrize("direction", ["up", "down"])
def test_an_interrupted_migration_can_be_run_again(empty: URL, engine: Engine, direction: str) -> None:
    """An autocommit block commits what the migration did before it, while the database has the revision before.

    A lock timeout, a restart of the server or a killed process interrupts it there. Each migration is interrupted at
    each of its statements from there on.
    """
    points, former = {}, "base"
    for revision in revisions():
        up, down = partial(migrate, empty, revision), partial(_downgrade, empty, former)
        if direction == "up":
            points[revision] = _interrupt_everywhere(up, down, engine)
        else:
            up()
            points[revision] = _interrupt_everywhere(down, up, engine) if former != "base" else 0
            up()
        former = revision
    assert {"0008", "0011"} <= {each for each, number in points.items() if number > 0}


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
    for url in (
        "postgresql://ana:s3cret@127.0.0.1:1/perdure",
        "postgresql://127.0.0.1:1/perdure?user=ana&password=s3cret&sslpassword=s3cret",
        "postgresql:///perdure?host=127.0.0.1&port=1&password=s3cret",
    ):
        with pytest.raises(Unavailable) as raised:
            migrate(url)
        assert "perdure up" in (_expected(raised.value) or ("",))[0]
        assert "The database 'perdure' at 127.0.0.1 cannot be migrated" in raised.value.message
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


def test_a_lock_that_is_not_free_in_time_is_no_missing_server(empty: URL, engine: Engine) -> None:
    """The message tells the operator to run the command again, and not to start a server."""
    migrate(empty, "0007")
    with engine.begin() as holder:
        holder.execute(text("LOCK TABLE sessions IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(Unavailable) as raised:
            migrate(empty)
    message, status = _expected(raised.value) or ("", 0)
    assert ("lock timeout" in message, "perdure up" in message, status) == (True, False, 3)
    assert "Run `perdure migrate` again" in message
    assert migrate(empty).after == HEAD


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
