"""The planner's statistics forget erased texts with the rights of an ordinary role; what prevents it harms nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import Engine, create_engine

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database, Statement
from perdure.files.store import Files
from perdure.settings import FileSettings
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.users.erase import Eraser
from perdure.users.statistics import forget_samples
from perdure.users.tables import SHARED_TABLES, USER_TABLES

SAMPLED = Statement("tests.sampled", "SELECT tablename FROM pg_stats WHERE schemaname = current_schema()", writes=False)
STALE = Statement("tests.stale", "SELECT table_name FROM stale_statistics ORDER BY 1", writes=False)
MINE = Statement("tests.role", "SELECT rolsuper FROM pg_roles WHERE rolname = current_user", writes=False)


def _eraser(database: Database, clock: MovedClock) -> Eraser:
    files = Files(database, FileSettings(), clock)
    return Eraser(database, clock, PostgresSnapshots(database), None, 30, files)


@pytest.fixture
def other(database: Database) -> Iterator[Engine]:
    """Connections of another client."""
    made = create_engine(database.url.update_query_dict({"options": "-c search_path=perdure"}))
    yield made
    made.dispose()


def _erased(database: Database, clock: MovedClock) -> None:
    """Sample two users, one of whom is erased."""
    with database.engine.connect() as connection:
        connection.exec_driver_sql("INSERT INTO users (user_id, created_at) VALUES ('cli:ana', now()), ('bob', now())")
        connection.exec_driver_sql("INSERT INTO link_attempts VALUES ('', 'cli', 'ana', 1, now())")
        connection.exec_driver_sql("ANALYZE users, link_attempts")
    _eraser(database, clock).erase(UserKey("cli:ana"))


def _sampled(database: Database) -> set[str]:
    return {row.tablename for row in database.run(SAMPLED, {})}


def test_the_tests_role_is_an_ordinary_one(database: Database) -> None:
    """The tests run with an ordinary role, as most installations do: a superuser's rights would hide failures."""
    assert [row.rolsuper for row in database.run(MINE, {})] == [False]


def test_an_owner_forgets_the_samples(database: Database, clock: MovedClock) -> None:
    """The owner of the tables, who is no superuser, updates the statistics of each table, and clears empty tables'."""
    _erased(database, clock)
    assert "link_attempts" in _sampled(database)
    assert forget_samples(database) == len(USER_TABLES) + len(SHARED_TABLES)
    assert "users" in _sampled(database)
    assert not {"link_attempts", "link_attempts_pkey"} & _sampled(database)
    assert database.run(STALE, {}) == []
    assert forget_samples(database) == 0


@pytest.mark.long
def test_a_table_that_is_being_maintained_delays_no_other(
    database: Database, clock: MovedClock, other: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """While a lock conflicts with `ANALYZE`, as during `VACUUM`, other tables are done; this one follows later."""
    _erased(database, clock)
    with other.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE users IN SHARE UPDATE EXCLUSIVE MODE")
        assert forget_samples(database) == len(USER_TABLES) + len(SHARED_TABLES) - 1
    assert [row.table_name for row in database.run(STALE, {})] == ["users"]
    assert "the statistics of users are updated later: UNAVAILABLE: The database is busy (a lock" in caplog.text
    assert forget_samples(database) == 0
    clock.advance(timedelta(minutes=5.1))
    assert forget_samples(database) == 1


@pytest.mark.long
def test_the_roles_statement_timeout_ends_no_analyze(database: Database, clock: MovedClock) -> None:
    """A short `statement_timeout` of the role, which suits its turns, does not apply to `ANALYZE`."""
    _erased(database, clock)
    impatient = Database(database.url.update_query_dict({"options": "-c statement_timeout=200"}), lease_s=30)
    with database.engine.connect() as connection:
        # `ANALYZE` computes the expression of this index for each row that it samples.
        connection.exec_driver_sql(
            "CREATE FUNCTION slow(text) RETURNS text LANGUAGE sql IMMUTABLE AS "
            "$$ SELECT $1 || coalesce((SELECT '' FROM pg_sleep(1)), '') $$"
        )
        connection.exec_driver_sql("CREATE INDEX users_slow_idx ON users (slow(user_id))")
    try:
        impatient.analyze("users")
    finally:
        impatient.close()


def test_users_who_are_erased_meanwhile_are_not_forgotten(database: Database, clock: MovedClock) -> None:
    """If another user is erased while a table is analyzed, the table is analyzed again."""
    _erased(database, clock)
    analyze = database.analyze

    def erasing(table: str) -> None:
        analyze(table)
        if table == "users":
            Eraser(
                database, clock, PostgresSnapshots(database), None, 30, Files(database, FileSettings(), clock)
            ).erase(UserKey("bob"))

    database.analyze = erasing  # type: ignore[method-assign]
    try:
        forget_samples(database)
    finally:
        database.analyze = analyze  # type: ignore[method-assign]
    assert [row.table_name for row in database.run(STALE, {})] == ["users"]


@pytest.mark.long
def test_a_role_with_grants_only_says_what_it_may_not_do(
    granted: Database, database: Database, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A role that may not analyze the tables says so once a day, and the erasure is finished all the same."""
    _erased(granted, clock)
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        assert forget_samples(granted) == 0
    assert [each.getMessage().partition(",")[0] for each in caplog.records] == [
        f"the role may not analyze {len(USER_TABLES) + len(SHARED_TABLES)} tables"
    ]
    clock.advance(timedelta(days=1.1))
    assert forget_samples(database) == len(USER_TABLES) + len(SHARED_TABLES), "the owner may"
