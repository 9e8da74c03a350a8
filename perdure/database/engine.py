"""Runs named statements on PostgreSQL and returns their rows; by default each statement is its own commit.

The steps of a turn use no transaction of several statements. Each write is one statement (with CTEs) in autocommit,
which checks the fencing token and writes in one round trip. A worker that is paused between two statements therefore
holds no lock. `transaction()` is for rare work that needs several statements, such as accepting a message that
interrupts the running turn. The server ends a transaction if the client stops responding.

If the database cannot be reached, the engine raises `Unavailable` instead of the driver's error. The caller then cannot
know whether a write was committed, so it must not repeat the write: it reads the current state and continues from that.

`session` has the server settings of each connection: the `search_path`, the isolation level, timeouts. Startup options
make these settings. Behind a pooler in transaction mode (`prepare=False`), `SET LOCAL` makes them at the start of each
transaction, in the round trip of its first statement. Statements are not prepared behind such a pooler, because a
prepared statement belongs to one server connection, and the next transaction may get another connection.

A connection can become useless while it is still open: its prepared statements are deallocated, a column that they use
changes its type, or its server becomes a standby. The engine then replaces all pooled connections. A single statement
that failed for this reason runs again on a new connection. The first attempt wrote nothing, since the server refused
it. A transaction raises `Unavailable` instead.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, Literal, Protocol
from uuid import UUID

import psycopg2
import psycopg2.extensions
import psycopg2.extras
from sqlalchemy import Connection, Row, create_engine, event
from sqlalchemy.engine import URL, Engine, ExceptionContext, ExecutionContext, result_tuple
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from perdure.database.hiding import hide_values
from perdure.database.schema import EXTENSION_SCHEMA, Names
from perdure.database.session import LOCK_TIMEOUT_S, ServerSettings, connect_arguments, with_driver
from perdure.errors import IllegalTransition, Unavailable
from perdure.settings import SCHEMA
from perdure.text.untrusted import first_line

log = logging.getLogger(__name__)

psycopg2.extras.register_uuid()

_uuid = lru_cache(4_096)(UUID)
_UUIDS = psycopg2.extensions.new_type((2950,), "UUID", lambda value, _: None if value is None else _uuid(value))
"""The driver's type for `uuid`. Many rows of an answer have the same session or turn, and making a UUID takes 2 µs."""

_PARAMETER = re.compile(r"%\((\w+)\)s")

_ILLEGAL_TRANSITION = "PD001"
"""The error code that the SQL function `perdure_illegal_transition` raises."""

_READ_ONLY = "25006"
_NOT_ON_A_STANDBY = "0A000"
"""The code with which a standby refuses the `SET TRANSACTION` that begins each transaction behind a pooler."""

_USELESS = frozenset({"26000", "42P05", _READ_ONLY})
"""Codes of errors that make a connection useless: a prepared statement is missing or already exists, or the server is
a standby.
"""

_CHANGED = ("0A000", "42")
"""Prefixes of the error codes for a statement that does not match the tables. If the connection has run the statement
before, the tables have changed since then, and preparing the statement again helps.
"""

_SESSION = "perdure"
"""The key of the `_Session` in the `info` of a pooled connection."""

_RUNS = "perdure_runs"
"""The key of the number of prepared statements that a pooled connection has run."""

_FIRST_REPLAN = 128
"""After how many runs a connection plans its statements anew: then, and whenever the number has doubled (a power of 2).

PostgreSQL keeps the plan of a prepared statement until the table's statistics change. If it is made while the table is
empty, all indexes look alike, and a plan that reads a whole index stays in use while the table grows, until autovacuum
analyzes it, which takes a minute. With 6,000 waiting sessions, a turn's steps took five times as long.
"""

_FAILED = "perdure_failed"
"""The execution option with the driver's error that SQLAlchemy is to handle; see `_execute`."""

_TRIES = 3

_OVER_A_LIMIT = "54"
"""The class of error codes for statements that exceed a limit of the server, such as the size of an index row."""

_POOL_SIZE = 32
_POOL_WAIT_S = 30
_RESERVED = 2
"""The number of connections that are reserved for urgent statements."""

_BUSY = "The database is busy; please try again."
_UNREACHABLE = "The database cannot be reached; please try again."
_HINTS = {
    "unsupported startup parameter": (
        "PgBouncer refuses the settings of a connection: set PERDURE_DATABASE_PREPARE=false"
    ),
    "certificate verify failed": (
        "sslrootcert in PERDURE_DATABASE_URL must name the server's authority, and the server's certificate be valid"
    ),
    "requires a valid client certificate": "PERDURE_DATABASE_URL must name it with sslcert and sslkey",
}
"""What the driver's errors of connections do not say, by a part of their text."""

_REFUSED = {
    "40": _BUSY,
    "53": "The database lacks disk space, memory or connections; please try again.",
    "55P03": "The database is busy (a lock was not granted in time); please try again.",
    "57014": "The database is busy (a statement was cancelled, or exceeded statement_timeout); please try again.",
}
"""The messages for errors of statements that a reachable server ended, by the errors' codes or classes of codes."""


@dataclass(frozen=True)
class Statement:
    """A named SQL statement. If `writes` is true, each run outside of a `Transaction` is a commit.

    Parameters in `sql` have the form `%(name)s`. Each connection prepares the statement once, under the name `name`,
    because parsing and planning take longer than execution.
    """

    name: str
    sql: str
    writes: bool = True

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_PARAMETER.findall(self.sql)))

    @cached_property
    def prepare(self) -> str:
        """The `PREPARE` command. It still has the markers that `schema.Names.render` replaces."""
        numbers = {name: f"${number}" for number, name in enumerate(self.parameters, start=1)}
        return f'PREPARE "{self.name}" AS {_PARAMETER.sub(lambda found: numbers[found[1]], self.sql)}'

    @cached_property
    def execute(self) -> str:
        """The `EXECUTE` command for the prepared statement, with `%s` for each parameter."""
        given = f"({', '.join(['%s'] * len(self.parameters))})" if self.parameters else ""
        return f'EXECUTE "{self.name}"{given}'


_STAY_IDLE = Statement(
    "database.stay_idle",
    """
    SELECT set_config(name, '0', true) FROM pg_settings
    WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
    """,
)
_LOCK = Statement(
    "database.lock",
    """
    SELECT pg_try_advisory_xact_lock(hashtextextended(concat_ws(' ', current_schema(), %(name)s::text), 0)) AS locked
    """,
    writes=False,
)

# Sets the limits that an administrator may have set for the role to 0, which means no limit.
_UNLIMITED = """
    SELECT set_config(name, '0', {local}) FROM pg_catalog.pg_settings
    WHERE name IN ('statement_timeout', 'transaction_timeout', 'lock_timeout');
"""
_LOCK_LIMIT = f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_S * 1000}"

Moment = Literal["before", "after"]
Observer = Callable[[Moment, str], None]


class Executor(Protocol):
    """Runs statements: a `Database` or a `Transaction`."""

    def run(self, statement: Statement, parameters: Mapping[str, Any]) -> Sequence[Row[Any]]: ...


class Transaction:
    """Several statements that commit together."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begun = False

    def run(self, statement: Statement, parameters: Mapping[str, Any]) -> Sequence[Row[Any]]:
        first, self._begun = not self._begun, True
        return _rows(self._connection, statement, parameters, first=first)


class Database:
    """A pool of connections, shared by all threads of a process.

    If `observe` is set, it is called before each commit is sent, and again after the server has confirmed the commit.
    Tests use this callback to kill the process at either point. `observe_all` sets it for all databases of a process.
    """

    _observers_of_all: ClassVar[list[Observer]] = []

    def __init__(
        self,
        url: str | URL,
        *,
        schema: str = SCHEMA,
        prepare: bool = True,
        lease_s: float = 30,
        observe: Observer | None = None,
    ) -> None:
        self.url = with_driver(url)
        self.names = Names(schema)
        self.observe = observe
        settings = ServerSettings.of(schema, lease_s)
        self.engine: Engine = create_engine(
            self.url.difference_update_query(["options"]),
            isolation_level="AUTOCOMMIT",
            use_native_hstore=False,  # otherwise each new connection queries for `hstore`, which no table uses
            pool_size=_POOL_SIZE,
            max_overflow=0,  # an overflow connection is closed after one use, so it prepares its statement in vain
            pool_timeout=_POOL_WAIT_S,
            pool_use_lifo=True,
            pool_reset_on_return=None,  # see `_take_back`
            skip_autocommit_rollback=True,  # the driver gives up Python's lock for each, even if it has nothing to do
            connect_args=connect_arguments(self.url, settings if prepare else None),
            hide_parameters=True,  # parameters contain users' texts, and errors are logged
        )
        event.listen(self.engine, "handle_error", hide_values)
        event.listen(self.engine, "handle_error", _drop_if_useless)
        event.listen(self.engine, "do_execute", _fail_again)
        session = _Session(self.names, None if prepare else settings.local())
        event.listen(self.engine, "connect", partial(_connected, session))
        event.listen(self.engine, "reset", _take_back)
        self._transactional = self.engine.execution_options(isolation_level="READ COMMITTED")
        self._ordinary = threading.BoundedSemaphore(_POOL_SIZE - _RESERVED)

    def run(self, statement: Statement, parameters: Mapping[str, Any], *, urgent: bool = False) -> Sequence[Row[Any]]:
        """Run one statement, which commits by itself, and return its rows.

        Some connections are reserved for `urgent` statements (lease renewals), so that these run at once even if
        statements on all other connections wait for locks.

        Raises:
            Unavailable: the database cannot be reached or is read-only; a write may or may not have happened.
            IllegalTransition: a session's state does not allow the transition; nothing was written.
        """
        if statement.writes:
            self._notify("before", statement.name)
        with mapped_errors(), nullcontext() if urgent else self._room():
            rows = self._run_with_retry(statement, parameters)
        if statement.writes:
            self._notify("after", statement.name)
        return rows

    @contextmanager
    def transaction(self, name: str) -> Iterator[Transaction]:
        """A block whose statements commit together, or not at all.

        Never call a model, a tool or the network inside the block, because the transaction holds row locks.

        Raises:
            Unavailable: the database cannot be reached or is read-only, or a table has changed since the connection
                prepared a statement; the commit may or may not have happened.
        """
        with mapped_errors(), self._room(), self._transactional.begin() as connection:
            yield Transaction(connection)
            self._notify("before", name)
        self._notify("after", name)

    @contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """Try to acquire the lock `name` for the duration of the block; yields whether the lock was acquired.

        Each schema has its own locks. The lock is an advisory lock of a transaction that is idle during the block, so
        it blocks no other statement and no vacuum. If the connection is lost, the server releases the lock, and the
        block is not notified.
        """
        with mapped_errors(), self._room(), self._transactional.begin() as connection:
            transaction = Transaction(connection)
            transaction.run(_STAY_IDLE, {})
            yield bool(transaction.run(_LOCK, {"name": name})[0].locked)

    def define(self, sql: str) -> None:
        """Run a statement that PostgreSQL does not allow in a transaction, such as `CREATE INDEX CONCURRENTLY`.

        The statement may wait and run for hours: it has a connection outside of the pool, without time limits. Behind a
        pooler, the time limits of the role apply. Names in `sql` must have the markers `@schema.` and `@vector.`; see
        `perdure.database.schema`.
        """
        with mapped_errors(), self.engine.connect() as connection:
            connection.detach()
            if connection.info[_SESSION].local is None:
                connection.exec_driver_sql(_UNLIMITED.format(local="false"))
            connection.exec_driver_sql(_rendered(connection, sql))

    def analyze(self, table: str) -> None:
        """Update the planner's statistics of one of perdure's tables. Blocks no reader and no writer.

        No limit on the duration of statements applies, but the limit on waiting for a lock does.

        Raises:
            Unavailable: the database cannot be reached, or another session maintains the table (`VACUUM`, an index).
        """
        with mapped_errors(), self._room(), self._transactional.begin() as connection:
            local = connection.info[_SESSION].local or ""
            connection.exec_driver_sql(local + _UNLIMITED.format(local="true") + _LOCK_LIMIT)
            connection.exec_driver_sql(_rendered(connection, f"ANALYZE @schema.{table}"))

    def close(self) -> None:
        """Close the idle connections. A connection in use is closed when it is returned to the pool."""
        self.engine.dispose()

    def _run_with_retry(self, statement: Statement, parameters: Mapping[str, Any]) -> Sequence[Row[Any]]:
        """Run one statement. If it fails because its connection is useless, run it again on a new connection.

        An error that the server reports aborts the statement's transaction, so the second run writes nothing twice. If
        the connection was lost, the outcome is unknown, so the statement is not repeated.
        """
        for _ in range(_TRIES - 1):
            try:
                with self.engine.connect() as connection:
                    return _rows(connection, statement, parameters)
            except DBAPIError as error:
                if not (error.connection_invalidated and _is_about_the_connection(_code(error.orig))):
                    raise
                log.warning("replacing connections: %s failed with %s", statement.name, first_line(str(error.orig)))
        with self.engine.connect() as connection:
            return _rows(connection, statement, parameters)

    @contextmanager
    def _room(self) -> Iterator[None]:
        if not self._ordinary.acquire(timeout=_POOL_WAIT_S):
            raise Unavailable(_BUSY)
        try:
            yield
        finally:
            self._ordinary.release()

    @classmethod
    def observe_all(cls, observe: Observer) -> None:
        """Call `observe` for each commit of this process, also through databases that are opened already."""
        cls._observers_of_all.append(observe)

    def _notify(self, moment: Moment, name: str) -> None:
        if self.observe is not None:
            self.observe(moment, name)
        for observe in self._observers_of_all:
            observe(moment, name)


def as_json(value: object) -> str:
    """`value` as JSON text for a `jsonb` parameter. Rejects NaN and infinities, as PostgreSQL does."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)


@dataclass(frozen=True, slots=True)
class _Session:
    """State shared by the connections of one `Database`.

    `local` has the `SET LOCAL` statements for the start of each transaction behind a pooler; `None` without a pooler.
    """

    names: Names
    local: str | None


def _connected(session: _Session, connection: Any, record: ConnectionPoolEntry) -> None:
    psycopg2.extensions.register_type(_UUIDS, connection)
    record.info[_SESSION] = session


def _take_back(connection: Any, *_: Any) -> None:
    """Make the pool replace a connection that is returned to it closed or within a transaction.

    Also resets the isolation level before SQLAlchemy returns the connection to autocommit. Otherwise the driver resets
    it at the begin of the connection's next transaction, with a statement of its own.
    """
    if connection.closed or connection.status != psycopg2.extensions.STATUS_READY:
        raise psycopg2.InterfaceError("connection already closed, or in a transaction")
    if not connection.autocommit:
        connection.set_isolation_level(None)


def _rows(
    connection: Connection, statement: Statement, parameters: Mapping[str, Any], *, first: bool = True
) -> Sequence[Row[Any]]:
    """Run `statement` and return its rows. `first`: whether the statement is the first of its transaction."""
    info = connection.info  # SQLAlchemy discards `info` with the pooled connection
    session: _Session = info[_SESSION]
    if session.local is not None:
        local = session.local if first else ""
        return _execute(connection, local + _rendered(connection, statement.sql), parameters or None)
    info[_RUNS] = runs = info.get(_RUNS, 0) + 1
    if runs >= _FIRST_REPLAN and runs & (runs - 1) == 0:
        connection.exec_driver_sql("DISCARD PLANS")
    if statement.name not in info:
        connection.exec_driver_sql(_rendered(connection, statement.prepare))
        info[statement.name] = True
    rows = _execute(connection, statement.execute, tuple(parameters[name] for name in statement.parameters))
    info[statement.execute] = True  # the statement matched the tables; see `_drop_if_useless`
    return rows


def _execute(
    connection: Connection, sql: str, parameters: tuple[Any, ...] | Mapping[str, Any] | None
) -> Sequence[Row[Any]]:
    """Run a statement on the driver's own cursor, and return its rows.

    SQLAlchemy's execution of a statement takes 90 µs of CPU more. SQLAlchemy handles the errors: the statement begins
    once more with it, and `_fail_again` raises the driver's error there.
    """
    try:
        with closing(connection.connection.cursor()) as cursor:
            cursor.execute(sql, parameters)
            columns: Any = cursor.description  # `None` without rows; empty for rows without columns
            if columns is None:
                return ()
            row = _row_of(tuple([column[0] for column in columns]))
            return [row(values) for values in cursor.fetchall()]
    except psycopg2.Error as error:
        connection.exec_driver_sql(sql, parameters, execution_options={_FAILED: error})
        raise


_row_of = lru_cache(maxsize=None)(result_tuple)


def _fail_again(_cursor: Any, _statement: str, _parameters: Any, context: ExecutionContext) -> None:
    """Raise the error of a statement that has just failed, so that SQLAlchemy handles it."""
    if (error := context.execution_options.get(_FAILED)) is not None:
        raise error


def _rendered(connection: Connection, sql: str) -> str:
    """`sql` with its markers replaced by schema names. The schema of `vector` is read once for each `Database`."""
    names: Names = connection.info[_SESSION].names
    if names.needs_vector(sql):
        names.vector = connection.exec_driver_sql(EXTENSION_SCHEMA).scalar()
    return names.render(sql)


def _drop_if_useless(context: ExceptionContext) -> None:
    """Make SQLAlchemy close a connection that has become useless.

    SQLAlchemy then also replaces the pooled connections that were opened before the error, each at its next use.
    """
    code = _code(context.original_exception)
    if context.is_disconnect or context.connection is None or not _is_about_the_connection(code):
        return
    context.is_disconnect = code in _USELESS or context.statement in context.connection.info


def _is_about_the_connection(code: str | None) -> bool:
    return code is not None and (code in _USELESS or code.startswith(_CHANGED))


def _code(error: BaseException | None) -> str | None:
    return error.pgcode if isinstance(error, psycopg2.Error) else None


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Convert the driver's errors to `Unavailable` or `IllegalTransition`. Errors that match neither stay unchanged."""
    try:
        yield
    except PoolTimeout as error:
        raise Unavailable(_BUSY) from error
    except DBAPIError as error:
        mapped = _mapped(error)
        if mapped is None:
            raise
        raise mapped from error
    except (psycopg2.OperationalError, psycopg2.InterfaceError) as error:
        # SQLAlchemy does not wrap the driver's error if that sets a connection's isolation level.
        raise _unreachable(error) from error
    except psycopg2.DatabaseError as error:
        if type(error) is not psycopg2.DatabaseError or error.pgcode is not None:
            raise
        # The server closed the connection at the end of a transaction. The driver has no subclass for this error.
        raise _unreachable(error) from error


def _unreachable(error: BaseException | None) -> Unavailable:
    """`Unavailable` with the first line of the driver's error, which is about the connection and has no values."""
    reason = first_line(str(error))
    hint = next((f". {hint}" for part, hint in _HINTS.items() if part in reason), "")
    return Unavailable(_UNREACHABLE, reason=f"{reason}{hint}")


def was_refused(error: Unavailable | DBAPIError) -> bool:
    """Whether a server that can be reached has refused a statement, so that another statement may succeed."""
    cause = error.__cause__ if isinstance(error, Unavailable) else error
    return isinstance(cause, DBAPIError) and not cause.connection_invalidated and _code(cause.orig) is not None


def _mapped(error: DBAPIError) -> Unavailable | IllegalTransition | None:
    """The `Unavailable` or `IllegalTransition` for a driver's error; `None` if neither applies."""
    code = _code(error.orig) or ""
    if code == _READ_ONLY or (code == _NOT_ON_A_STANDBY and (error.statement or "").startswith("SET TRANSACTION")):
        return Unavailable("The database accepts no writes at present; please try again.")
    if (refused := _REFUSED.get(code) or _REFUSED.get(code[:2])) is not None:
        return Unavailable(refused)
    if error.connection_invalidated or (isinstance(error, OperationalError) and not code.startswith(_OVER_A_LIMIT)):
        return _unreachable(error.orig)
    if code == _ILLEGAL_TRANSITION and isinstance(error.orig, psycopg2.Error):
        diagnosis = error.orig.diag
        return IllegalTransition(diagnosis.message_primary or "", diagnosis.message_detail or "")
    return None
