"""The database engine: commits, driver errors, time limits, and the replacement of useless connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import psycopg2
import pytest
from sqlalchemy import event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError, ProgrammingError

from perdure.database.engine import Database, Statement, as_json, mapped_errors
from perdure.errors import Unavailable, loggable

PATIENCE_S = 20.0

INSERT = Statement("test.insert", "INSERT INTO users VALUES (%(user_id)s, now()) RETURNING user_id")
COUNT = Statement("test.count", "SELECT count(*) AS users FROM users", writes=False)
LOCK = Statement("test.lock", "SELECT 1 FROM users WHERE user_id = %(user_id)s FOR UPDATE")
TOUCH = Statement("test.touch", "UPDATE users SET created_at = now() WHERE user_id = %(user_id)s")
SETTING = Statement("test.setting", "SELECT current_setting(%(name)s) AS value", writes=False)
KILL = Statement(
    "test.kill",
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()",
    writes=False,
)


PID = Statement("test.pid", "SELECT pg_backend_pid() AS pid", writes=False)
MAKE = """
    CREATE TABLE things (thing_id integer PRIMARY KEY, size integer);
    INSERT INTO things SELECT n, n FROM generate_series(1, 3) AS n
"""
SIZES = Statement("test.sizes", "SELECT size FROM things ORDER BY thing_id", writes=False)
OF_SIZE = Statement("test.of_size", "SELECT thing_id FROM things WHERE size = %(size)s", writes=False)
ADD = Statement("test.add", "INSERT INTO things VALUES (%(thing_id)s, 1) RETURNING size")
CONNECTIONS = 5


@pytest.fixture
def other(database_url: str) -> Iterator[Database]:
    """A second process's pool on the same database."""
    made = Database(database_url)
    yield made
    made.close()


def test_a_statement_commits_by_itself(database: Database, other: Database) -> None:
    """Other connections see a statement's effect at once, and no transaction stays open."""
    assert database.run(INSERT, {"user_id": "ana"})[0].user_id == "ana"
    assert other.run(COUNT, {})[0].users == 1


def test_a_transaction_commits_together_or_not_at_all(database: Database, other: Database) -> None:
    """An error in a transaction rolls back the transaction's earlier statements."""
    with database.transaction("both") as transaction:
        transaction.run(INSERT, {"user_id": "ana"})
        assert other.run(COUNT, {})[0].users == 0
    assert other.run(COUNT, {})[0].users == 1
    with pytest.raises(IntegrityError), database.transaction("neither") as transaction:  # noqa: PT012 (the transaction is the block)
        transaction.run(INSERT, {"user_id": "bob"})
        transaction.run(INSERT, {"user_id": "ana"})
    assert other.run(COUNT, {})[0].users == 1
    assert database.run(INSERT, {"user_id": "cho"}), "the connection is usable again"


def test_the_driver_begins_a_transaction_with_one_statement(database: Database) -> None:
    """If the connection had the level of an earlier transaction, the driver would reset it with another one."""
    for _ in range(2):
        with database.transaction("level") as transaction:
            assert transaction.run(SETTING, {"name": "transaction_isolation"})[0].value == "read committed"
    with database.engine.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        assert (driver.autocommit, driver.isolation_level) == (True, None)


def test_a_statement_prepared_in_a_failed_transaction_can_be_run_again(database: Database) -> None:
    """A rollback does not remove the statements that the transaction prepared, so they can be run again."""
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), database.transaction("fails") as transaction:  # noqa: PT012 (the transaction is the block)
            transaction.run(INSERT, {"user_id": "ana"})
            raise ZeroDivisionError
    assert database.run(INSERT, {"user_id": "ana"})
    with pytest.raises(IntegrityError):
        database.run(INSERT, {"user_id": "ana"})
    assert database.run(INSERT, {"user_id": "bob"})


def test_each_commit_is_observed_before_and_after(database: Database) -> None:
    """The engine reports each commit before and after it, so that tests can kill the process at either moment."""
    seen: list[tuple[str, str]] = []
    database.observe = lambda moment, name: seen.append((moment, name))
    database.run(INSERT, {"user_id": "ana"})
    database.run(COUNT, {})
    with database.transaction("several") as transaction:
        transaction.run(INSERT, {"user_id": "bob"})
    assert seen == [("before", "test.insert"), ("after", "test.insert"), ("before", "several"), ("after", "several")]


def test_a_refused_connection_is_explained_to_operators_only(database_url: str) -> None:
    """The log and commands say why PostgreSQL refuses a connection; the message, which clients get, does not."""
    nowhere = Database(make_url(database_url).set(database="absent-database").render_as_string(hide_password=False))
    with pytest.raises(Unavailable) as raised, nowhere.transaction("t"):
        pass
    assert "absent-database" not in raised.value.message
    for shown in (raised.value.explained, loggable(raised.value)):
        assert 'FATAL:  database "absent-database" does not exist' in shown


def test_an_unreachable_server_is_reported_without_secrets() -> None:
    """The error's message contains no host, user or password, because any caller may see the message."""
    nowhere = Database("postgresql://ana:s3cret@127.0.0.1:1/perdure")
    with pytest.raises(Unavailable) as raised_error:
        nowhere.run(COUNT, {})
    assert raised_error.value.http_status == 503
    for hidden in ("s3cret", "ana", "127.0.0.1"):
        assert hidden not in raised_error.value.message
    assert "s3cret" not in str(raised_error.value.__cause__)
    with pytest.raises(Unavailable), nowhere.transaction("t"):
        raise AssertionError("there is no connection")


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg2", "postgresql+psycopg"])
def test_any_scheme_of_the_url_selects_psycopg2(database_url: str, scheme: str) -> None:
    """The engine uses psycopg2, whichever driver the URL names."""
    made = Database(make_url(database_url).set(drivername=scheme))
    assert made.engine.dialect.driver == "psycopg2"
    assert made.run(COUNT, {})[0].users == 0
    made.close()


def test_killed_connections_are_replaced(database: Database, other: Database) -> None:
    """If the server closes a pool's connection, one statement fails. The next statement uses a new connection."""
    database.run(COUNT, {})
    for _ in range(3):
        other.run(KILL, {})
        with pytest.raises(Unavailable):
            database.run(COUNT, {})
        assert database.run(COUNT, {})[0].users == 0


def test_a_transaction_on_a_killed_connection_is_unavailable(database: Database, other: Database) -> None:
    """A transaction on a killed connection fails at its first statement. The next one has another connection."""
    for _ in range(3):
        with database.transaction("alive") as transaction:
            assert transaction.run(COUNT, {})[0].users == 0
        other.run(KILL, {})
        with pytest.raises(Unavailable), database.transaction("dead") as transaction:
            transaction.run(COUNT, {})


def test_a_transaction_killed_in_the_middle_is_unavailable(database: Database, other: Database) -> None:
    """If a connection is killed during a transaction, `Unavailable` is raised and nothing is written."""
    with pytest.raises(Unavailable), database.transaction("dies") as transaction:  # noqa: PT012 (the transaction is the block)
        transaction.run(INSERT, {"user_id": "ana"})
        other.run(KILL, {})
        transaction.run(INSERT, {"user_id": "bob"})
    assert other.run(COUNT, {})[0].users == 0


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (psycopg2.DatabaseError("server closed the connection unexpectedly"), Unavailable),
        (psycopg2.ProgrammingError("a fault of ours"), psycopg2.ProgrammingError),
    ],
    ids=["closed", "other"],
)
def test_a_server_that_closes_as_a_transaction_has_ended_is_unavailable(
    database: Database, monkeypatch: pytest.MonkeyPatch, error: psycopg2.Error, raised: type[Exception]
) -> None:
    """If the connection is lost when its isolation level is reset after a transaction, `Unavailable` is raised.

    Other driver errors are raised unchanged.
    """
    dialect = database.engine.dialect
    set_level = dialect.set_isolation_level
    levels: list[Any] = []

    def closing(connection: Any, level: Any) -> None:
        levels.append(level)
        if len(levels) > 1:
            raise error
        set_level(connection, level)

    monkeypatch.setattr(dialect, "set_isolation_level", closing)
    with pytest.raises(raised), database.transaction("test"):
        pass
    assert len(levels) == 2


def test_every_wait_has_a_bound(database: Database) -> None:
    """PostgreSQL ends a transaction that is idle for 10 s. No statement waits longer than 2 s for a lock."""
    assert database.run(SETTING, {"name": "idle_in_transaction_session_timeout"})[0].value == "10s"
    assert database.run(SETTING, {"name": "lock_timeout"})[0].value == "2s"
    assert database.run(SETTING, {"name": "application_name"})[0].value == "perdure"


@pytest.mark.parametrize(("lease_s", "bound"), [(3, "1s"), (30, "10s"), (600, "10s"), (1.5, "500ms")])
def test_the_bound_follows_the_lease(database_url: str, lease_s: float, bound: str) -> None:
    """The idle timeout of a transaction is a third of the lease, but at most ten seconds."""
    made = Database(database_url, lease_s=lease_s)
    assert made.run(SETTING, {"name": "idle_in_transaction_session_timeout"})[0].value == bound
    made.close()


def test_options_of_the_url_are_kept(database_url: str) -> None:
    """An operator's `options` in the URL are added to perdure's and take precedence."""
    made = Database(database_url + ("&" if "?" in database_url else "?") + "options=-c%20lock_timeout%3D1234")
    assert made.run(SETTING, {"name": "lock_timeout"})[0].value == "1234ms"
    assert made.run(SETTING, {"name": "idle_in_transaction_session_timeout"})[0].value == "10s"
    made.close()


def test_a_lock_that_is_not_free_in_time_is_unavailable(database_url: str, database: Database) -> None:
    """A statement that waits too long for a lock raises `Unavailable`, so that its caller can retry."""
    database.run(INSERT, {"user_id": "ana"})
    hasty = Database(database_url + ("&" if "?" in database_url else "?") + "options=-c%20lock_timeout%3D50")
    with database.transaction("holds") as transaction:
        transaction.run(LOCK, {"user_id": "ana"})
        with pytest.raises(Unavailable):
            hasty.run(TOUCH, {"user_id": "ana"})
    hasty.run(TOUCH, {"user_id": "ana"})
    hasty.close()


@pytest.mark.long
def test_an_idle_transaction_is_ended_and_its_client_gets_an_error(database_url: str, database: Database) -> None:
    """The server ends an idle transaction; the paused client gets an error when it continues."""
    database.run(INSERT, {"user_id": "ana"})
    paused = Database(database_url, lease_s=3)
    with pytest.raises(Unavailable), paused.transaction("paused") as transaction:  # noqa: PT012 (the transaction is the block)
        transaction.run(TOUCH, {"user_id": "ana"})
        database.run(TOUCH, {"user_id": "ana"})  # waits until the server ends the other transaction
        transaction.run(TOUCH, {"user_id": "ana"})
    paused.close()


def test_a_row_without_columns_is_a_row(database: Database) -> None:
    """A statement that only asks whether something exists reads no columns."""
    assert len(database.run(Statement("test.exists", "SELECT FROM pg_class LIMIT 2", writes=False), {})) == 2


def test_a_statement_that_an_exit_leaves_ends_its_connection(database: Database) -> None:
    """An exit in the middle of a statement, as of a green thread, leaves the pool no connection that still runs it."""
    [before] = database.run(PID, {})

    def exiting(_: Any) -> None:
        raise SystemExit

    psycopg2.extensions.set_wait_callback(exiting)
    try:
        with pytest.raises(SystemExit):
            database.run(PID, {})
    finally:
        psycopg2.extensions.set_wait_callback(None)
    assert database.run(PID, {})[0].pid != before.pid


def test_many_threads_share_a_pool(database: Database) -> None:
    """With more threads than connections, each thread waits for a connection and gets its own rows."""
    found: list[str] = []
    begin = threading.Barrier(48)

    def work(number: int) -> None:
        begin.wait(PATIENCE_S)
        found.extend(database.run(INSERT, {"user_id": f"{number} {each}"})[0].user_id for each in range(4))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(48)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(set(found)) == 48 * 4
    assert database.run(COUNT, {})[0].users == 48 * 4


def _on_each_connection(database: Database, statement: str) -> None:
    """Run a statement on `CONNECTIONS` connections of the pool through SQLAlchemy, bypassing `Database.run`."""
    with ExitStack() as stack:
        for each in [stack.enter_context(database.engine.connect()) for _ in range(CONNECTIONS)]:
            each.execute(text(statement))


def _known_to_each_connection(database: Database, *statements: tuple[Statement, Mapping[str, Any]]) -> None:
    """Open `CONNECTIONS` connections in the pool and run the statements on each."""
    with ExitStack() as stack:
        for each in [stack.enter_context(database.transaction("known")) for _ in range(CONNECTIONS)]:
            for statement, given in statements:
                each.run(statement, given)


def test_a_statement_that_was_deallocated_is_prepared_again(database: Database) -> None:
    """If a pooler or an administrator deallocates a prepared statement, the engine prepares it again."""
    _known_to_each_connection(database, (COUNT, {}))
    _on_each_connection(database, "DEALLOCATE ALL")
    for _ in range(CONNECTIONS):
        assert database.run(COUNT, {})[0].users == 0


def test_a_transaction_whose_statement_was_deallocated_is_unavailable_once(database: Database, other: Database) -> None:
    """A transaction that runs a deallocated prepared statement fails. The next transaction succeeds."""
    _known_to_each_connection(database, (COUNT, {}))
    _on_each_connection(database, "DEALLOCATE ALL")
    with pytest.raises(Unavailable), database.transaction("broken") as transaction:  # noqa: PT012 (the transaction is the block)
        transaction.run(INSERT, {"user_id": "ana"})
        transaction.run(COUNT, {})
    assert other.run(COUNT, {})[0].users == 0
    with database.transaction("next") as transaction:
        assert transaction.run(INSERT, {"user_id": "ana"})
        assert transaction.run(COUNT, {})[0].users == 1


@pytest.mark.long
@pytest.mark.parametrize("changed", ["bigint", "text"])
def test_a_column_whose_type_changes_breaks_no_connection(database: Database, changed: str) -> None:
    """After a migration changes a column's type, open connections with prepared statements still work."""
    _on_one(database, MAKE)
    given = {"size": 2}
    _known_to_each_connection(database, (SIZES, {}), (OF_SIZE, given))
    _on_one(database, f"ALTER TABLE things ALTER COLUMN size TYPE {changed}")
    for _ in range(CONNECTIONS):
        sizes = [row.size for row in database.run(SIZES, {})]
        assert sizes == ([1, 2, 3] if changed == "bigint" else ["1", "2", "3"])
    _on_one(database, "ALTER TABLE things ALTER COLUMN size TYPE integer USING size::integer")
    _known_to_each_connection(database, (OF_SIZE, given))
    _on_one(database, f"ALTER TABLE things ALTER COLUMN size TYPE {changed}")
    for _ in range(CONNECTIONS):
        assert database.run(OF_SIZE, {"size": "2"})[0].thing_id == 2


def test_a_retried_write_is_written_and_observed_once(database: Database) -> None:
    """If PostgreSQL refuses an outdated plan, the engine's retry writes the row once and reports one commit."""
    _on_one(database, MAKE)
    database.run(ADD, {"thing_id": 10})
    _on_one(database, "ALTER TABLE things ALTER COLUMN size TYPE bigint")
    seen: list[tuple[str, str]] = []
    database.observe = lambda moment, name: seen.append((moment, name))
    database.run(ADD, {"thing_id": 11})
    assert seen == [("before", "test.add"), ("after", "test.add")]
    assert [row.size for row in database.run(SIZES, {})] == [1, 2, 3, 1, 1]


def test_a_statement_for_missing_tables_is_an_error_and_keeps_its_connection(database: Database) -> None:
    """A statement on a missing table raises the driver's error.

    If the statement has succeeded on the connection before, the first error replaces the connection. Further errors do
    not replace the new connection.
    """
    pid = database.run(PID, {})[0].pid
    for _ in range(2):
        with pytest.raises(ProgrammingError):
            database.run(SIZES, {})
    _on_one(database, MAKE)
    assert len(database.run(SIZES, {})) == 3
    _on_one(database, "DROP TABLE things")
    with pytest.raises(ProgrammingError):
        database.run(SIZES, {})
    replaced = database.run(PID, {})[0].pid
    assert replaced != pid
    with pytest.raises(ProgrammingError):
        database.run(SIZES, {})
    assert database.run(PID, {})[0].pid == replaced


def test_connections_to_a_demoted_server_are_replaced(database: Database) -> None:
    """After a failover, the pool's connections to the old primary are replaced by connections to the new primary."""
    _known_to_each_connection(database, (COUNT, {}))
    _on_each_connection(database, "SET default_transaction_read_only = on")
    assert database.run(INSERT, {"user_id": "ana"})
    assert database.run(COUNT, {})[0].users == 1
    with ExitStack() as stack:
        for number in range(CONNECTIONS):
            stack.enter_context(database.transaction("writes")).run(INSERT, {"user_id": f"user {number}"})
    assert database.run(COUNT, {})[0].users == 1 + CONNECTIONS


def test_a_transaction_on_a_demoted_server_is_unavailable_once(database: Database) -> None:
    """If a transaction fails on a demoted server, all connections of the pool are replaced before their next use."""
    _known_to_each_connection(database, (COUNT, {}))
    _on_each_connection(database, "SET default_transaction_read_only = on")
    with pytest.raises(Unavailable, match="accepts no writes"), database.transaction("writes") as transaction:
        transaction.run(INSERT, {"user_id": "ana"})
    with ExitStack() as stack:
        for number in range(CONNECTIONS):
            stack.enter_context(database.transaction("writes")).run(INSERT, {"user_id": f"user {number}"})


def test_a_read_only_database_is_unavailable_until_it_accepts_writes(database: Database) -> None:
    """While the database is read-only, writes raise `Unavailable`. When it accepts writes again, writes succeed."""

    def demote(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = on")
        connection.commit()

    database.run(COUNT, {})
    event.listen(database.engine, "connect", demote)
    _on_each_connection(database, "SET default_transaction_read_only = on")
    for _ in range(2):
        with pytest.raises(Unavailable, match="accepts no writes"):
            database.run(INSERT, {"user_id": "ana"})
    assert database.run(COUNT, {})[0].users == 0, "reads still succeed"
    event.remove(database.engine, "connect", demote)
    assert database.run(INSERT, {"user_id": "ana"})


def _on_one(database: Database, *statements: str) -> None:
    """Run statements on a connection outside the pool."""
    made = Database(database.url)
    with made.engine.connect() as connection:
        for each in statements:
            connection.execute(text(each))
    made.close()


def test_json_for_the_database_is_strict() -> None:
    """`as_json` rejects NaN, which PostgreSQL's JSON types do not accept."""
    assert as_json({"ü": [1, None]}) == '{"ü":[1,null]}'
    with pytest.raises(ValueError, match="JSON"):
        as_json({"n": float("nan")})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SSL error: certificate verify failed", "sslrootcert in PERDURE_DATABASE_URL must name"),
        ("FATAL:  connection requires a valid client certificate", "must name it with sslcert and sslkey"),
    ],
)
def test_a_connection_that_fails_on_a_certificate_names_the_option(text: str, said: str) -> None:
    """The driver does not say which certificate it means, and PostgreSQL not where to name one."""
    with pytest.raises(Unavailable) as raised, mapped_errors():
        raise psycopg2.OperationalError(text)
    assert raised.value.reason.startswith(f"{text}. ")
    assert said in raised.value.reason
