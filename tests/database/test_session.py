"""Connections have the settings that perdure needs, whatever the role, the database or the environment sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy.engine import URL, make_url

from perdure.database.compatibility import require
from perdure.database.engine import Database, Statement
from perdure.database.migrate import migrate
from perdure.errors import IncompatibleDatabase, Unavailable
from tests.databases import Databases

ADD = Statement("test.add", "INSERT INTO users VALUES (%(user_id)s, now()) RETURNING user_id")
USERS = Statement("test.users", "SELECT user_id FROM users ORDER BY 1", writes=False)
TOUCH = Statement("test.touch", "UPDATE users SET created_at = clock_timestamp() WHERE user_id = 'ana' RETURNING 1")
SETTING = Statement("test.setting", "SELECT current_setting(%(name)s) AS value", writes=False)
WORDS = Statement("test.words", "SELECT perdure_words('Ein Café in 서울') AS words", writes=False)
NOW = Statement("test.now", "SELECT now() AS at", writes=False)
SLEEP = Statement("test.sleep", "SELECT pg_sleep(0.05)", writes=False)

STRANGE = {
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "client_encoding": "LATIN1",
    "standard_conforming_strings": "off",
    "statement_timeout": "20",
    "idle_session_timeout": "50",
    "row_security": "off",
    "search_path": "pg_catalog",
    "DateStyle": "German, DMY",
    "IntervalStyle": "iso_8601",
    "TimeZone": "Asia/Kathmandu",
    "bytea_output": "escape",
    "extra_float_digits": "-10",
    "transform_null_equals": "on",
}
"""Settings of a role or a database of which each is valid, and of which some used to break perdure."""


@pytest.fixture
def strange(databases: Databases, database_url: str) -> Iterator[URL]:
    """The URL of a database with the settings `STRANGE`."""
    url = make_url(database_url)
    _set_strangely(databases, url)
    yield url
    databases.administer(f"ALTER DATABASE {url.database} RESET ALL")


def _set_strangely(databases: Databases, url: URL) -> None:
    for name, value in STRANGE.items():
        databases.administer(f"ALTER DATABASE {url.database} SET {name} = '{value}'")


@pytest.fixture(params=[True, False], ids=["prepared", "behind a pooler"])
def opened(databases: Databases, strange: URL, request: pytest.FixtureRequest) -> Iterator[Database]:
    """The database, with and without prepared statements."""
    if not request.param:  # a pooler's own idle connections end by this limit: it ends no transaction
        databases.administer(f"ALTER DATABASE {strange.database} RESET idle_session_timeout")
    made = Database(strange, prepare=request.param)
    yield made
    made.close()


def test_the_defaults_of_a_role_or_a_database_have_no_effect(opened: Database) -> None:
    """A strange default changes neither the isolation nor the meaning of a statement, and ends none of them."""
    assert opened.run(SETTING, {"name": "transaction_isolation"})[0].value == "read committed"
    assert opened.run(ADD, {"user_id": "ana € 漢字 \\ '"})
    opened.run(SLEEP, {})
    with opened.transaction("test") as transaction:
        assert transaction.run(SETTING, {"name": "transaction_isolation"})[0].value == "read committed"
        assert transaction.run(SETTING, {"name": "transaction_read_only"})[0].value == "off"
        assert transaction.run(ADD, {"user_id": "bob"})
        transaction.run(SLEEP, {})
    assert [row.user_id for row in opened.run(USERS, {})] == ["ana € 漢字 \\ '", "bob"]
    assert "cafe" in opened.run(WORDS, {})[0].words


def test_times_have_the_offset_of_utc(opened: Database) -> None:
    """Answers showed times with the offset of the database's zone, and dates taken from them were those of the zone."""
    assert opened.run(NOW, {})[0].at.utcoffset() == timedelta(0)
    with opened.transaction("test") as transaction:
        assert transaction.run(NOW, {})[0].at.utcoffset() == timedelta(0)


def test_concurrent_statements_do_not_fail_under_a_strict_default(opened: Database) -> None:
    """With `serializable` as the default of a role, concurrent writes of one row failed with error 40001."""
    opened.run(ADD, {"user_id": "ana"})
    barrier = threading.Barrier(8)

    def touch(_: int) -> None:
        barrier.wait()
        for _ in range(10):
            assert opened.run(TOUCH, {})

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(touch, range(8)))


def test_a_serialization_failure_is_not_an_unreachable_database(database_url: str, database: Database) -> None:
    """A conflict or a time limit that the server reports is called that, since the operator would check the network."""
    raised = "DO $$ BEGIN RAISE EXCEPTION USING errcode = '40001'; END $$"
    strict = Database(make_url(database_url).update_query_dict({"options": "-c statement_timeout=10"}))
    for tried in (lambda: database.define(raised), lambda: strict.run(SLEEP, {})):
        with pytest.raises(Unavailable, match="The database is busy"):
            tried()
    strict.close()


@pytest.mark.parametrize("given", ["url", "options", "environment"])
def test_another_client_encoding_is_replaced(database_url: str, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Whatever sets `client_encoding`, every character of a message reaches the database."""
    url = make_url(database_url)
    match given:
        case "url":
            url = url.update_query_dict({"client_encoding": "latin1"})
        case "options":
            url = url.update_query_dict({"options": "-c client_encoding=latin1"})
        case _:
            monkeypatch.setenv("PGCLIENTENCODING", "latin1")
    made = Database(url)
    assert made.run(ADD, {"user_id": "€ 漢字"})[0].user_id == "€ 漢字"
    made.close()


@pytest.fixture
def empty(databases: Databases) -> Iterator[URL]:
    """An empty database."""
    with databases.empty() as url:
        yield url


def test_strange_defaults_do_not_change_a_migration(databases: Databases, empty: URL) -> None:
    """The functions of the tables are created, and the migrations' statements run, under perdure's own settings."""
    _set_strangely(databases, empty)
    migrate(empty)
    made = Database(empty)
    require(made)
    assert "cafe" in made.run(WORDS, {})[0].words
    made.close()


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_with_another_encoding_is_refused(databases: Databases, database_url: str, encoding: str) -> None:
    """A database that cannot store every character is refused before a model is called, by `migrate` and at a start."""
    name = f"other_{encoding.lower()}"
    databases.administer(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
    url = make_url(database_url).set(database=name)
    made = Database(url)
    said = f"has the encoding {encoding}, .* perdure needs UTF8. Create"
    try:
        with pytest.raises(IncompatibleDatabase, match=said):
            migrate(url)
        with pytest.raises(IncompatibleDatabase, match=said):
            require(made)
    finally:
        made.close()
        databases.administer(f"DROP DATABASE {name}")
